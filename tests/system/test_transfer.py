"""`push` and `pull`: what arrives is what was sent, a broken transfer goes on, and nothing over there is ever lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.agent import pushes, receive
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.parcel import Incoming, Outgoing
from orchestrator.agent.tree import entry, part_of, walk
from orchestrator.model import WorkPaths
from tests.driver import Specctl, poll_until
from tests.sshd import LoopbackSshd
from trainer.export.contract import Contract, Gate, Layout, Origin, Rope, TargetFacts

LARGE = 96 << 20
"""Long enough on its way to be met in the middle of it."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def large(path: Path, size: int = LARGE) -> Path:
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for number in range(size >> 20):
            file.write(number.to_bytes(8, "big") + block[8:])
    return path


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """`root` and every name below it, with mode and content."""
    found = {}
    for path in [root, *root.rglob("*")]:
        content = b"" if path.is_dir() else path.read_bytes() if not path.is_symlink() else bytes(path.readlink())
        found[str(path.relative_to(root))] = (path.lstat().st_mode, content)
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def odd(specctl: Specctl) -> Path:
    """A folder with everything that a name, a mode and a link can be."""
    root = specctl.project / "odd"
    (root / "deep" / "empty").mkdir(parents=True)
    for name in (b"-dash", b"new\nline", b"\xff\xfe", b"sp ace '\"$(x)`", "ünï".encode(), b".hidden"):
        (root / os.fsdecode(name)).write_bytes(b"content of " + name)
    (root / "deep" / "program").write_text("#!/bin/sh\n")
    (root / "deep" / "program").chmod(0o750)
    (root / "private").write_text("secret")
    (root / "private").chmod(0o600)
    (root / "empty").touch()
    (root / "link").symlink_to("deep/program")
    (root / "dangling").symlink_to("/no/such/place")
    (root / "deep").chmod(0o555)
    root.chmod(0o750)
    os.utime(root / "empty", (1_000_000_000, 1_000_000_000))
    return root


def test_a_folder_arrives_with_odd_names_modes_links_and_times_and_is_not_sent_twice(
    specctl: Specctl, odd: Path
) -> None:
    place = specctl.home / "far" / "copy"
    done = specctl("push", "local", "odd", str(place), "--json")
    assert done.code == 0, done.err
    assert snapshot(place) == snapshot(odd)
    assert (place / "empty").stat().st_mtime == 1_000_000_000
    assert done.json["files"] == 11 and done.json["same"] == 0 and done.json["verified"]

    (odd / "private").write_text("another")
    (place / "only there").write_text("not the source's")
    done = specctl("push", "local", "odd", f"{place}/.", "--json")
    assert (done.json["files"], done.json["same"], done.json["sent_bytes"]) == (1, 10, 7)
    assert (place / "private").read_text() == "another"
    assert (place / "only there").read_text() == "not the source's"


@pytest.mark.parametrize(
    ("kind", "destination", "place"),
    [
        ("file", "in/workdir", "w/in/workdir"),
        ("file", "~/at/home", "h/at/home"),
        ("file", "/there", "there/src"),
        ("file", "/new/", "new/src"),
        ("file", "/new/name", "new/name"),
        ("dir", "/mirror", "mirror"),
        ("dir", "/copy", "copy"),
        ("dir", "/there/", "there/src"),
        ("dir", "/there/.", "there"),
        ("dir", "~", "h/src"),
        ("dir", "new/", "w/new/src"),
    ],
)
def test_where_a_source_comes_to_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, destination: str, place: str
) -> None:
    for name in ("w", "h", "there/other", "copy/a", "h/x"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path / "h"))
    dst = f"{tmp_path}{destination}" if destination.startswith("/") else destination
    request: dict[str, object] = {"dst": dst, "name": "src", "kind": kind, "names": ["", "a", "b"]}
    call = Call(
        request=request, payload=sys.stdin.buffer, paths=WorkPaths(workdir=f"{tmp_path}/w"), emit=lambda frame: None
    )  # fmt: skip
    assert receive.place(call)["root"] == f"{tmp_path}/{place}"
    merged = {"kind": "dir", "names": ["", "a", "wheels"], "dst": f"{tmp_path}/w/."}
    for more in ({"dst": "bundles/x"}, {"dst": "wheels/x"}, {"dst": "prune.lock"}, merged):
        request.update(more)
        with pytest.raises(Refusal, match="specctl's own"):
            receive.place(call)


def test_what_cannot_be_pushed_is_one_message_and_changes_nothing(specctl: Specctl) -> None:
    (specctl.project / "data").mkdir()
    (specctl.project / "data" / "x").write_text("x")
    taken = specctl.home / "taken"
    (taken / "x").mkdir(parents=True)
    (specctl.home / "file").write_text("f")
    before = snapshot(taken)
    for words, code, said in (
        (("local", "absent", "/tmp/x"), 2, "absent: no such file"),
        (("local", "data", str(taken)), 1, f"{taken}/x is a folder there and a file here"),
        (("local", "data", f"{specctl.home}/file/below"), 1, "is no folder"),
        (("local", "data", str(specctl.home)), 2, f"{specctl.home}/. merges the two"),
    ):
        done = specctl("push", *words)
        assert done.code == code and said in done.err and done.err.count("error:") == 1, (words, done)
    assert snapshot(taken) == before and (specctl.home / "file").read_text() == "f"


def met_in_the_middle(specctl: Specctl, place: Path, *words: str) -> subprocess.Popen[str]:
    """A transfer of which some, but not all has arrived."""
    process = specctl.start(*words)
    part = Path(os.fsdecode(part_of(os.fsencode(place))))
    poll_until(lambda: process.poll() is not None or (part.exists() and part.stat().st_size), what="a first part")
    assert process.poll() is None, process.communicate()
    return process


def test_ctrl_c_says_how_far_it_was_and_the_same_command_goes_on(specctl: Specctl) -> None:
    source = large(specctl.project / "model.bin")
    place = specctl.home / "far" / "model.bin"
    process = met_in_the_middle(specctl, place, "push", "local", "model.bin", str(place))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "goes on where this one ended" in err
    assert not place.exists()
    done = specctl("push", "local", "model.bin", str(place), "--json")
    assert done.code == 0, done.err
    assert done.json["resumed_bytes"] > 0
    assert done.json["sent_bytes"] + done.json["resumed_bytes"] == LARGE
    assert sha256(place) == sha256(source) == done.json["sha256"]
    assert names(place.parent) == ["model.bin"] and names(specctl.workdir / "pushes") == []


@pytest.fixture
def over_ssh(sshd: LoopbackSshd) -> Iterator[Specctl]:
    driver = Specctl(SPECCTL_SSH_CONFIG=str(sshd.ssh_config))
    driver.inventory.write_text(
        f"targets:\n  box: {{ssh: node1, workdir: {driver.workdir}, python: {sys.executable}}}\n"
    )
    yield driver
    driver.close()


def test_a_dropped_link_is_unknown_and_the_same_command_goes_on(over_ssh: Specctl, sshd: LoopbackSshd) -> None:
    source = large(over_ssh.project / "model.bin")
    place = over_ssh.home / "far.bin"
    process = met_in_the_middle(over_ssh, place, "push", "box", "model.bin", str(place))
    sshd.stop()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3 and "goes on where this one ended" in err, err
    assert not place.exists()
    sshd.start()
    done = over_ssh("push", "box", "model.bin", str(place), "--json")
    assert done.code == 0 and done.json["resumed_bytes"] > 0, done.err
    assert sha256(place) == sha256(source)

    launched = over_ssh.launch("--no-source", "--until", "process", "--", "sleep", "60", target="box")
    run_id = launched.json["run_id"]
    assert run_id, launched
    process = met_in_the_middle(over_ssh, over_ssh.project / "far.bin", "pull", run_id, str(place))
    sshd.stop()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3 and "goes on where this one ended" in err, err
    sshd.start()
    done = over_ssh("pull", run_id, str(place), "--json")
    assert done.code == 0 and done.json["resumed_bytes"] > 0, done.err
    assert sha256(over_ssh.project / "far.bin") == sha256(source)


def test_a_part_of_another_content_is_not_gone_on_from(specctl: Specctl) -> None:
    (specctl.project / "f").write_bytes(b"right" * 400_000)
    place = specctl.home / "f"
    Path(os.fsdecode(part_of(os.fsencode(place)))).write_bytes(b"wrong" * 100_000)
    done = specctl("push", "local", "f", str(place), "--json")
    assert done.code == 0 and done.json["resumed_bytes"] == 0 and done.json["sent_bytes"] == 2_000_000
    assert place.read_bytes() == b"right" * 400_000


def test_holes_stay_holes_and_sizes_are_whole_numbers(specctl: Specctl) -> None:
    with (specctl.project / "sparse").open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"the end")
    done = specctl("push", "local", "sparse", "sparse", "--json")
    assert done.code == 0 and done.json["total_bytes"] == (64 << 20) + 7
    found = specctl.workdir / "sparse"
    assert sha256(found) == sha256(specctl.project / "sparse")
    assert found.stat().st_blocks * 512 < 8 << 20


def test_a_source_that_changes_meanwhile_is_an_error_and_what_was_there_stays(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    place.mkdir()
    (source / "a").write_bytes(b"a" * (1 << 20))
    (source / "b").write_bytes(b"b")
    (place / "a").write_text("the old one")
    tree = walk(os.fsencode(source))
    outgoing = Outgoing(os.fsencode(source), tree.entries, {}, tick=lambda count: None)
    incoming = Incoming(os.fsencode(place), tree.entries, tick=lambda count: None)
    incoming.folders()
    for number, (events, raw) in enumerate(outgoing.frames()):
        if number == 1:
            with (source / "a").open("ab") as file:
                file.write(b"more")
        incoming.accept(events, raw)
    incoming.finish()
    assert incoming.failed == [("a", "it was changed while it was read")]
    assert (place / "a").read_text() == "the old one" and (place / "b").read_bytes() == b"b"


def test_bytes_that_are_damaged_on_the_way_get_no_name(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(1 << 20))
    tree = walk(os.fsencode(tmp_path / "source"))
    outgoing = Outgoing(os.fsencode(tmp_path / "source"), tree.entries, {}, tick=lambda count: None)
    incoming = Incoming(os.fsencode(tmp_path / "place"), tree.entries, tick=lambda count: None)
    incoming.folders()
    for events, raw in outgoing.frames():
        incoming.accept(events, bytes([raw[0] ^ 1]) + raw[1:] if raw else raw)
    [(_, why)] = incoming.failed
    assert "damaged" in why
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a//b", "a/../../x", "a\0b"])
def test_a_far_side_cannot_lead_out_of_the_folder(path: str) -> None:
    with pytest.raises(ValueError):
        entry([path, "file", 1, 0o644, 0, 0, ""])


def test_a_disk_that_fills_up_is_one_message(specctl: Specctl, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        large(specctl.project / "big", 6 << 20)
        done = specctl("push", "local", "big", f"{disk}/big")
        assert done.code == 1 and "too little room" in done.err and names(disk) == []
        many = specctl.project / "many"
        many.mkdir()
        for number in range(1500):  # each takes a whole page of the disk
            (many / str(number)).write_bytes(b"x" * 1000)
        done = specctl("push", "local", "many", f"{disk}/many")
        assert done.code == 1 and "No space left" in done.err and "goes on where" in done.err
        assert done.err.count("error:") == 1
        assert not [name for name in names(disk / "many") if name.startswith(".specctl")]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_push_whose_laptop_has_gone_gives_way_and_one_that_moves_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "STUCK_S", 1.0)
    said: list[object] = []
    call = Call(request={}, payload=sys.stdin.buffer, paths=WorkPaths(workdir=str(tmp_path)), emit=said.append)
    code = (
        "import sys, time\nfrom orchestrator.agent import pushes\nfrom orchestrator.agent.main import Call\n"
        "from orchestrator.model import WorkPaths\n"
        "call = Call(request={}, payload=None, paths=WorkPaths(workdir=sys.argv[1]), emit=print)\n"
        "with pushes.held(call, '/data', []) as touch:\n"
        "    print('held', flush=True)\n"
        "    while True: time.sleep(0.05); sys.argv[2] == 'moves' and touch()\n"
    )
    for kind in ("moves", "stuck"):
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), kind], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(pushes.__file__).parents[2])},
        )  # fmt: skip
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            if kind == "moves":
                with pytest.raises(Exception, match="under way"), pushes.held(call, "/data", []):
                    pass
                assert holder.poll() is None
            else:
                with pushes.held(call, "/data", []):
                    assert holder.wait(timeout=10) == -signal.SIGKILL
        finally:
            holder.kill()
            holder.wait()
    assert said and not names(tmp_path / "pushes")


TRAINS = """
import os, json, pathlib, time
root = pathlib.Path(os.environ["SPECCTL_RUN_DIR"])
for step in (1, 2, 10):
    folder = root / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(b"w" * 1000 * step)
    (folder / "COMPLETE.json").write_text(json.dumps({"step": step, "files": {"w": {"bytes": 1000 * step}}}))
(root / "checkpoints" / "step-11").mkdir()
pathlib.Path("result.txt").write_text("in the code folder")
n = 0
while True:
    n += 1
    print(f"step={n} tok/s=5", flush=True)
    time.sleep(0.05)
"""


def test_a_pull_from_a_living_run_brings_what_is_worth_having(specctl: Specctl) -> None:
    run_id = specctl.launch("--", sys.executable, "-c", TRAINS).json["run_id"]
    done = specctl("pull", "@last", "--to", "got")
    assert done.code == 0, done.err
    assert "newest of 3 whole checkpoints" in done.err and "step-11" in done.err
    assert done.err.index("checkpoints/step-10") < len(done.err) and "ok got/" in done.out
    got = specctl.project / "got" / run_id
    assert sorted(path.name for path in (got / "checkpoints").iterdir()) == ["step-10"]
    assert (got / "checkpoints/step-10/w").stat().st_size == 10_000
    record = json.loads((got / "run.json").read_text())
    assert record["spec"]["run_id"] == run_id
    log = got / f"{run_id}.a1.log"
    first = log.read_bytes()
    assert b"step=1 " in first and (specctl.run_dir(run_id) / log.name).read_bytes().startswith(first)
    poll_until(lambda: (specctl.run_dir(run_id) / log.name).stat().st_size > len(first))
    assert specctl("pull", run_id, "--to", "got").code == 0
    assert log.read_bytes().startswith(first) and log.stat().st_size > len(first)

    done = specctl("pull", run_id, "result.txt", "--json")
    mine = specctl.project / "result.txt"
    assert done.code == 0 and mine.read_text() == "in the code folder"
    assert specctl("pull", run_id, "result.txt").code == 0
    mine.write_text("edited since")
    refused = specctl("pull", run_id, "result.txt")
    assert refused.code == 1 and "result.txt here was changed later than the run's" in refused.err, refused
    assert "move it away, or choose another place" in refused.err and mine.read_text() == "edited since"
    assert specctl("pull", run_id, "result.txt", "--to", "got").code == 0
    assert done.json["sha256"] == {"": sha256(specctl.project / "got/result.txt")}
    done = specctl("pull", run_id, "checkpoints", "--to", "all")
    assert done.code == 0 and (specctl.project / "all/checkpoints/step-2/w").stat().st_size == 2000
    done = specctl("pull", run_id, "no/such", "--to", "all")
    assert done.code == 4 and "checkpoints" in done.err and "code" in done.err
    done = specctl("pull", run_id, "result.txt", "--to", "result.txt")
    assert done.code == 2 and "not a folder" in done.err
    assert specctl("pull", "nosuchrun").code == 4
    assert specctl.status(run_id)["state"] == "RUNNING"


def exported(directory: Path, *, step: int, gate: Gate | None) -> None:
    """As `python -m trainer export` leaves it, by its own classes, around a file that is no weights."""
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(b"w" * step)
    layout = Layout(
        block_size=4, mask_token_id=3, layer_ids=[1, 2], layer_id_base=0, rope=Rope(theta=1e4, dims=16, style="halves")
    )
    target = TargetFacts(architecture="LlamaForCausalLM", layers=6, hidden=64, vocabulary=400, files={})
    (directory / "contract.json").write_bytes(Contract(
        format="zlab", dtype="bfloat16", layout=layout, origin=Origin(run="0123", step=step, weights="ema"),
        target=target, torch="2.13.0", files={}, gate=gate,
    ).as_bytes())  # fmt: skip


def test_an_export_is_pulled_with_what_its_contract_says_of_it(specctl: Specctl) -> None:
    run_id = specctl.launch("--", sys.executable, "-c", TRAINS).json["run_id"]
    none = specctl("pull", run_id, "--export", "--to", "got")
    assert none.code == 4 and f"{run_id}/export is not there" in none.err
    assert f"python -m trainer export {specctl.run_dir(run_id)}, where the run is, makes one" in none.err

    export = specctl.run_dir(run_id) / "export"
    seen = Gate(arithmetic="float32", blocks=48, kept_by_trainer=[47, 45, 43], kept_by_reference=[47, 45, 43])
    exported(export, step=10, gate=seen)
    done = specctl("pull", run_id, "--export", "--to", "got")
    assert done.code == 0, done.err
    assert "export of step 10: zlab, bfloat16, moving average of the weights" in done.err
    assert "gate passed: of 48 blocks slots 1, 2, ... were kept in 47 45 43" in done.err
    got = specctl.project / "got" / run_id
    assert names(got) == ["export"] and snapshot(got / "export") == snapshot(export)

    exported(export, step=2, gate=None)
    done = specctl("pull", run_id, "--export", "--to", "got")
    assert done.code == 0 and "made before the run's newest checkpoint, step-10" in done.err
    assert "nobody has seen that it decodes as it was trained" in done.err
    done = specctl("pull", run_id, "--export", "--to", "got", "--json")
    assert done.json["export"] == {
        "format": "zlab", "dtype": "bfloat16", "step": 2, "weights": "ema", "blocks": None, "kept": None, "newest": 10,
    }  # fmt: skip
    assert (done.json["files"], done.json["same"], done.json["verified"]) == (0, 2, True)

    (export / "contract.json").write_text("{}")
    done = specctl("pull", run_id, "--export", "--to", "got")
    assert done.code == 0 and "export of an unknown step" in done.err
    (export / "contract.json").write_text("{")
    done = specctl("pull", run_id, "--export", "--to", "got")
    assert done.code == 4 and "is not whole: its contract.json cannot be read" in done.err
    assert specctl("pull", run_id, "export", "--export").code == 2


def test_thousands_of_small_files_travel_in_one_stream(specctl: Specctl) -> None:
    many = specctl.project / "many"
    for folder in range(20):
        (many / str(folder)).mkdir(parents=True)
        for number in range(100):
            (many / str(folder) / str(number)).write_bytes(f"{folder} {number}".encode() * 100)
    done = specctl("push", "local", "many", "many", "--json")
    assert done.code == 0 and done.json["files"] == 2_000
    assert snapshot(specctl.workdir / "many") == snapshot(many)
