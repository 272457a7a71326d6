"""`prune`: what nobody needs goes, and only when asked; what lives, is unknown or is about to be used stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import boot, lease
from orchestrator.agent.prune import remove
from orchestrator.agent.receive import News
from orchestrator.agent.tree import part_of
from orchestrator.agent.unneeded import Asked, look
from orchestrator.model import WorkPaths
from tests.driver import Done, Specctl

LONG_AGO = time.time() - 10 * 86400


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for agents outside a workdir: this machine may have had tests of a full disk."""
    monkeypatch.setattr(boot, "OUTSIDE", (str(tmp_path),))
    return tmp_path / f"specctl-agents-{os.geteuid()}"


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    return tmp_path / "w"


def aged(path: Path) -> Path:
    os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    return path


def a_bundle(workdir: Path, name: str) -> Path:
    folder = workdir / "bundles" / name
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "x.py").write_text("pass\n")
    (folder / ".complete").touch()
    aged(folder / ".complete")
    return folder


def keys(workdir: Path, **asked: Any) -> set[str]:
    wanted = Asked(**{"ended": None, "older_than_s": 0.0, "keep_checkpoints": False, **asked})
    return {item.key for item in look(WorkPaths(workdir=str(workdir)), wanted, time.time()).items}


def notes(workdir: Path) -> str:
    wanted = Asked(ended=None, older_than_s=0.0, keep_checkpoints=False)
    return "\n".join(look(WorkPaths(workdir=str(workdir)), wanted, time.time()).notes)


def test_it_shows_first_and_removes_only_what_was_shown_with_yes(specctl: Specctl) -> None:
    old = specctl.launch("--no-source", "--", "true").json["run_id"]
    live = specctl.launch("--", sys.executable, specctl.program("steps.py")).json["run_id"]
    used = json.loads((specctl.run_dir(live) / "run.json").read_text())["spec"]["bundle"]
    idle = json.loads((specctl.run_dir(old) / "run.json").read_text())["spec"]["bundle"]
    assert used != idle
    for bundle in (used, idle):
        aged(specctl.workdir / "bundles" / bundle / ".complete")

    done = specctl("prune")
    assert done.code == 0 and old not in done.out and idle not in done.out, done
    done = specctl("prune", "--runs", "--older-than", "0s")
    assert done.code == 0 and old in done.out and idle in done.out and live not in done.out and used not in done.out
    assert "nothing was removed" in done.err and "--yes" in done.err
    assert specctl.run_dir(old).exists()

    done = specctl("prune", "local", "--runs", "--older-than", "0s", "--yes", "--json")
    assert done.code == 0, done
    [place] = done.json["targets"]
    gone = {key for key in place["gone"] if "/specctl-agents-" not in key}
    assert gone == {f"run/{old}", f"bundle/{idle}"} and place["live"] == 1
    assert place["freed_bytes"] > 0 and place["failed"] == []
    assert not specctl.run_dir(old).exists() and not (specctl.workdir / "bundles" / idle).exists()
    assert sorted(path.name for path in (specctl.workdir / "runs").iterdir()) == [live]
    assert specctl.status(live)["state"] == "RUNNING"
    assert specctl("prune", "--older-than", "3d").code == 2
    lines = (specctl.home / "state/specctl/launches.jsonl").read_text().splitlines(keepends=True)
    (specctl.home / "state/specctl/launches.jsonl").write_text(lines[0])
    assert "has no such run: removed, or never got that far" in specctl("logs", "@last").err
    done = specctl("launch", "local", "--no-source", "--until", "process", "--", "sleep", "5")
    assert done.code == 0, done.err


def test_a_run_that_cannot_be_read_keeps_all_that_it_might_use(workdir: Path) -> None:
    a_bundle(workdir, "a" * 16)
    assert keys(workdir) == {f"bundle/{'a' * 16}"}
    run = workdir / "runs" / "20260101-000000-x-aaaa"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{ damaged")
    assert keys(workdir, ended={run.name}) == set()
    assert "cannot be read" in notes(workdir)


def test_what_a_living_process_names_stays(workdir: Path) -> None:
    bundle = a_bundle(workdir, "b" * 16)
    env = workdir / "envs" / ("c" * 16)
    env.mkdir(parents=True)
    (env / "specctl-complete").touch()
    aged(env / "specctl-complete")
    assert keys(workdir) == {f"bundle/{'b' * 16}", f"env/{'c' * 16}"}
    process = subprocess.Popen(["sleep", "60"], env={"PYTHONPATH": f"{bundle}/trainer", "VIRTUAL_ENV": str(env)})
    try:
        assert keys(workdir) == set()
    finally:
        process.kill()
        process.wait()
    assert keys(workdir) == {f"bundle/{'b' * 16}", f"env/{'c' * 16}"}


def test_agents_that_a_full_workdir_kept_outside_go_when_nobody_runs_them(workdir: Path, outside: Path) -> None:
    workdir.mkdir()
    outside.mkdir(mode=0o700)
    names = [letter * 16 for letter in "abc"]
    for name in names:
        (outside / name).mkdir()
    (outside / "d.txt").touch()
    for name in names[1:]:
        aged(outside / name)
    process = subprocess.Popen(["sleep", "60"], env={"PYTHONPATH": str(outside / names[1])})
    try:
        assert keys(workdir) == {f"agent/{outside / names[2]}"}, "one is young, one is in use"
    finally:
        process.kill()
        process.wait()
    assert "d.txt is not specctl's" in notes(workdir)
    wanted = keys(workdir)
    assert len(wanted) == 2
    asked = Asked(ended=None, older_than_s=0.0, keep_checkpoints=False)
    gone, failed = remove(WorkPaths(workdir=str(workdir)), asked, wanted, News(lambda _: None))
    assert set(gone) == wanted and failed == []
    assert sorted(path.name for path in outside.iterdir()) == [names[0], "d.txt"]
    aged(outside / names[0])
    outside.chmod(0o777)
    assert keys(workdir) == set(), "whoever may write there may put anything in its place"


def test_links_mounts_and_strange_names_stay_and_are_named(workdir: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "trainer").mkdir(parents=True)
    (precious / ".complete").touch()
    aged(precious / ".complete")
    (workdir / "bundles").mkdir(parents=True)
    (workdir / "bundles" / ("d" * 16)).symlink_to(precious)
    (workdir / "bundles" / "my notes.txt").write_text("mine")
    (workdir / "envs").symlink_to(precious)
    said = notes(workdir)
    assert keys(workdir) == set()
    assert "is a link" in said and "my notes.txt is not specctl's" in said and f"{workdir}/envs is a link" in said
    if os.geteuid() == 0:
        bundle = a_bundle(workdir, "e" * 16)
        if subprocess.run(["mount", "--bind", precious, bundle / "trainer"], capture_output=True).returncode == 0:
            try:
                assert keys(workdir) == set() and "mounted" in notes(workdir)
            finally:
                subprocess.run(["umount", bundle / "trainer"], check=True)


def test_what_never_became_whole_goes_when_nobody_can_still_be_at_it(workdir: Path, tmp_path: Path) -> None:
    for name in (f"{'a' * 16}.77.tmp", f"{'b' * 16}.78.tmp"):
        (workdir / "bundles" / name).mkdir(parents=True)
    aged(workdir / "bundles" / f"{'a' * 16}.77.tmp")
    (workdir / "runs" / "20260101-000000-x-aaaa.9.gone").mkdir(parents=True)
    part = tmp_path / "data" / os.fsdecode(part_of(b"model.bin"))
    part.parent.mkdir()
    part.write_bytes(b"x" * 5000)
    (workdir / "pushes").mkdir()
    record = workdir / "pushes" / "f.json"
    record.write_text(json.dumps({"dst": "/data/model.bin", "parts": [str(part), "/etc/passwd"]}))
    expected = {f"left over/bundles/{'a' * 16}.77.tmp", "left over/runs/20260101-000000-x-aaaa.9.gone"}
    assert keys(workdir) == expected
    aged(record)
    assert keys(workdir) == expected | {"upload/f"}
    [upload] = [
        item
        for item in look(
            WorkPaths(workdir=str(workdir)), Asked(ended=None, older_than_s=0, keep_checkpoints=False), time.time()
        ).items
        if item.kind == "upload"
    ]
    assert upload.paths == [str(record), str(part)]


def test_a_run_with_checkpoints_can_be_kept_and_a_young_one_is(specctl: Specctl) -> None:
    run_id = specctl.launch("--no-source", "--", "true").json["run_id"]
    folder = specctl.run_dir(run_id) / "checkpoints" / "step-5"
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(b"weights")
    (folder / "COMPLETE.json").write_text(json.dumps({"files": {"w": {"bytes": 7}}}))
    paths = specctl.workdir
    assert keys(paths, ended={run_id}) == {f"run/{run_id}"}
    assert keys(paths, ended={run_id}, keep_checkpoints=True) == set()
    assert keys(paths, ended={run_id}, older_than_s=3600.0) == set()
    assert keys(paths, ended=set()) == set()
    (item,) = look(
        WorkPaths(workdir=str(paths)), Asked(ended={run_id}, older_than_s=0, keep_checkpoints=False), time.time()
    ).items
    assert "checkpoints: 1" in item.why


def racing(specctl: Specctl, prune: Callable[[], Done], stop: threading.Event) -> list[Done]:
    done: list[Done] = []
    while not stop.is_set():
        done.append(prune())
    return done


def test_a_bundle_that_a_launch_has_found_survives_until_its_run_is_on_record(specctl: Specctl) -> None:
    (specctl.project / "p.py").write_text("print('step=1 tok/s=1')\n")
    first = specctl.launch("--", sys.executable, "p.py").json["run_id"]
    bundle = json.loads((specctl.run_dir(first) / "run.json").read_text())["spec"]["bundle"]
    home = specctl.workdir / "bundles" / bundle
    shutil.rmtree(specctl.run_dir(first))
    aged(home / ".complete")
    assert keys(specctl.workdir) == {f"bundle/{bundle}"}

    # A launch has asked whether it is there, and has not yet said what for.
    assert lease.found(str(home), ".complete")
    assert keys(specctl.workdir) == set()
    done = specctl("prune", "--yes", "--json")
    assert done.code == 0 and home.exists()

    # A launch whose bundle is old enough to go, beside prunes that never rest: it finds it, or sends it again.
    stop = threading.Event()
    pruned: list[Done] = []
    thread = threading.Thread(
        target=lambda: pruned.extend(racing(specctl, lambda: specctl("prune", "--yes", "--json"), stop))
    )  # fmt: skip
    thread.start()
    try:
        if (home / ".complete").exists():
            aged(home / ".complete")
        done = specctl.launch("--until", "process", "--timeout", "20", "--", sys.executable, "p.py")
        assert done.json["state"] == "SUCCEEDED", done
    finally:
        stop.set()
        thread.join()
    # What the launch took between the look and the removal is kept, and said to be.
    assert all(one.code == 0 or "it is in use by now" in one.out for one in pruned), pruned


def test_marking_waits_for_a_removal_under_way_and_then_finds_nothing(workdir: Path) -> None:
    home = a_bundle(workdir, "a" * 16)
    answers: list[bool] = []
    with lease.pruning(WorkPaths(workdir=str(workdir))):
        thread = threading.Thread(target=lambda: answers.append(lease.found(str(home), ".complete")))
        thread.start()
        thread.join(0.3)
        assert answers == []
        home.rename(workdir / "elsewhere")
    thread.join()
    assert answers == [False]
