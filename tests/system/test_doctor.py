"""`specctl doctor` on real machines: what it needs (a shell), what it leaves (nothing), and what it says of the way
there and of what is missing. In containers: tests/lab/test_doctor.py; every word it has: tests/unit/test_doctor.py."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from orchestrator.doctor import report, script
from orchestrator.doctor.checks import CHECKS
from tests.driver import Done, Specctl, over_ssh
from tests.sshd import LoopbackSshd

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="another user's eyes need root")
TOKEN = "specctl-7"
SHELLS = [["sh"], ["dash"], ["bash", "--posix"], ["busybox", "ash"]]


def outcomes(done: Done, name: str = "box") -> dict[str, dict[str, Any]]:
    """Check -> the worst that it found."""
    [row] = [row for row in done.json["targets"] if row["name"] == name]
    worst: dict[str, dict[str, Any]] = {}
    order = ("ok", "unknown", "warn", "fail")
    for one in row["checks"]:
        before = worst.get(one["check"])
        if before is None or order.index(one["status"]) > order.index(before["status"]):
            worst[one["check"]] = one
    return worst


def facts(shell: list[str], *, user: str | None = None, workdir: str = "/nowhere/w", quick: bool = True,
          python: str | None = None, path: str | None = None, python_s: int = 60) -> report.Report:  # fmt: skip
    """What the script tells of this machine under that shell, and only that."""
    argv = script.on_target(
        TOKEN, user=user, workdir=workdir, python=python, quick=quick, env={"SECRET": "x", "CUDA_CACHE_PATH": "/c"},
        gpus=[0], python_s=python_s,
    )  # fmt: skip
    argv[argv.index("sh") : argv.index("sh") + 1] = shell
    assert not any("SECRET" in word for word in argv), "an argument can be read by all"
    environ = {**os.environ, "PATH": path or os.environ["PATH"]}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environ)
    found = report.read(done.stdout, TOKEN)
    assert found.whole and done.returncode == 0, done.stderr + done.stdout[-500:]
    assert done.stderr == "", "whatever a program there complains of is part of a fact"
    return found


def test_a_machine_is_examined_through_nothing_but_a_shell_and_nothing_is_left_there(box: Specctl) -> None:
    done = box("doctor", "--json")
    assert done.code == 0, done.out
    found = outcomes(done)
    assert {check.name for check in CHECKS} <= set(found)
    assert {found[rung]["status"] for rung in ("ssh", "reachable", "host key", "login", "shell")} == {"ok"}
    assert found["torch"]["status"] == "ok" and found["clock"]["status"] == "ok"
    assert not box.workdir.exists() and list(box.home.glob(".specctl*")) == []
    text = box("doctor", "--verbose", "--quick")
    assert text.code == 0 and "  ok   tmux: tmux 3." in text.out and "1 of 1 target without a failure." in text.out
    quick = outcomes(box("doctor", "--quick", "--json"))
    assert not {"torch", "compiler"} & set(quick)


def test_on_this_machine_home_is_where_a_launch_would_put_things() -> None:
    driver = Specctl("targets:\n  here: {}\n")
    found = outcomes(driver("doctor", "--quick", "--json"), "here")
    assert found["home"]["what"] == str(driver.home)
    assert found["workdir"]["what"].startswith(f"{driver.home}/.specctl ")
    [row] = driver("targets", "--json").json["targets"]
    assert row["found"]["workdir"] == f"{driver.home}/.specctl"
    driver.close()


@pytest.mark.parametrize("shell", SHELLS, ids=[" ".join(shell) for shell in SHELLS])
def test_every_shell_tells_the_same(shell: list[str]) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"no {shell[0]} on this machine")
    here, there = facts(["sh"]), facts(shell)
    assert [*there.facts] == [*here.facts]
    for key in ("uid", "user", "groups", "home", "home-is", "system", "tmux", "utf8", "socket", "nearest", "workdir"):
        assert there.all(key) == here.all(key), key
    for folder in ("tmp", "shm", "workdir"):
        one, other = here.place(folder), there.place(folder)
        assert one is not None and other is not None and one.disk is not None and other.disk is not None
        assert (one.path, one.writable, one.mount) == (other.path, other.writable, other.mount)
        assert (one.disk.total_bytes, one.disk.mount) == (other.disk.total_bytes, other.disk.mount)
    assert there.one("nearest") == "/" and there.limit("Max open files") == here.limit("Max open files")


@ROOT
@pytest.mark.parametrize("shell", SHELLS, ids=[" ".join(shell) for shell in SHELLS])
@pytest.mark.parametrize("tool", ["setpriv", "su"])
def test_the_runs_user_is_who_looks(shell: list[str], tool: str, tmp_path: Path) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"no {shell[0]} on this machine")
    path = os.environ["PATH"]
    if tool == "su":  # as where there is no setpriv, or busybox's, which cannot do it
        (tmp_path / "setpriv").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "setpriv").chmod(0o755)
        path = f"{tmp_path}:{path}"
        tmp_path.chmod(0o755)
    seen = facts(shell, user="nobody", workdir="/root/it's \"$HOME\"/w", path=path)
    assert seen.one("login") == "root" and seen.user == "nobody" and seen.one("uid") == "65534"
    assert seen.one("workdir") == "/root/it's \"$HOME\"/w"
    place = seen.place("workdir")
    assert place is not None and not place.writable, "root's success says nothing of another user's"
    assert facts(shell, user="65534").user == "nobody", "a user may be a number"
    missing = facts(shell, user="nobody-of-that-name")
    assert missing.one("user-missing") == "nobody-of-that-name" and missing.user == "root"


@ROOT
def test_a_device_file_is_opened_by_the_user_who_will_run(tmp_path: Path) -> None:
    shell = ["unshare", "--mount", "sh"]
    bind = Path(tempfile.mkdtemp(prefix="dev-", dir="/tmp"))
    try:
        for name in ("nvidia0", "nvidiactl"):
            os.mknod(bind / name, 0o660 | stat.S_IFCHR, os.makedev(1, 3))
            (bind / name).chmod(0o660)
            os.chown(bind / name, 0, 44)
        (bind / "nvidia1").write_text("")
        (bind / "nvidia-uvm").symlink_to("/nowhere")
        wrapped = bind / "sh"
        # A /dev of its own, with everything of the real one in it.
        wrapped.write_text(
            "#!/bin/sh\nmkdir /run/specctl-dev && mount --bind /dev /run/specctl-dev && mount -t tmpfs dev /dev\n"
            "for n in null zero full urandom random; do touch /dev/$n; mount --bind /run/specctl-dev/$n /dev/$n; done\n"
            f"ln -s /proc/self/fd /dev/fd; cp -a {bind}/nvidia* /dev/; exec sh \"$@\"\n"
        )
        wrapped.chmod(0o755)
        argv = [*shell[:-1], str(wrapped)]
        seen = facts(argv, user="nobody")
    finally:
        shutil.rmtree(bind)
        Path("/run/specctl-dev").rmdir()
    devices = seen.devices
    assert devices["/dev/nvidia0"].refusal == "Permission denied" and devices["/dev/nvidia0"].mode == 0o660
    assert devices["/dev/nvidia0"].group == "video" and devices["/dev/nvidia0"].owner == "root"
    assert not devices["/dev/nvidia1"].character


@ROOT
@pytest.mark.skipif(shutil.which("busybox") is None, reason="no busybox on this machine")
def test_a_machine_that_has_nothing_but_busybox_tells_all(tmp_path: Path) -> None:
    """As Alpine: its sh, its df, its ls, its su; with /proc and /dev, and no user but root and one more."""
    root = tmp_path / "root"
    for folder in ("bin", "proc", "dev", "etc", "tmp", "home/train"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(str(shutil.which("busybox")), root / "bin/busybox")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\ntrain:x:1234:1234::/home/train:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\ntrain:x:1234:\nvideo:x:44:train\n")
    os.chown(root / "home/train", 1234, 1234)
    wrapper = tmp_path / "sh"
    wrapper.write_text(
        f"#!/bin/sh\nset -e\ncd {root}\nmount --bind . .\ncd {root}\nmount -t proc proc proc\nmount --rbind /dev dev\n"
        'chroot . /bin/busybox --install -s /bin\nexec chroot . /bin/env -i PATH=/bin /bin/sh "$@"\n'
    )
    wrapper.chmod(0o755)
    seen = facts(["unshare", "--mount", "--pid", "--fork", str(wrapper)], user="train", workdir="~/w")
    assert seen.one("login") == "root" and seen.user == "train" and seen.groups == ["train", "video"], seen.facts
    assert seen.one("workdir") == "/home/train/w" and seen.one("home-is") == "directory writable"
    place, shm = seen.place("workdir"), seen.place("shm")
    assert place is not None and place.writable and place.disk is not None and place.disk.total_bytes > 0
    assert shm is not None and shm.mount.kind == "tmpfs" and seen.all("tmux") == [] and not seen.all("python-code")
    assert seen.program("grep") is not None and seen.memory_bytes("MemTotal") and seen.limit("Max open files")


def test_a_node_whose_cluster_file_system_hangs_is_not_waited_for(box: Specctl) -> None:
    (box.home / "bin").mkdir()
    hangs = box.home / "bin/dpkg-query"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    box.inventory.write_text("targets:\n  box: {vmid: 100}\n")
    done = box("doctor", "--timeout", "3", "--json", PATH=f"{box.home}/bin:{os.environ['PATH']}")
    pct = outcomes(done)["pct"]
    assert done.code == 3 and pct["status"] == "fail" and "the look at pct and /etc/pve hangs" in pct["what"]
    assert pct["mend"].endswith("systemctl restart pve-cluster") and "within 3 s" in pct["what"]


def test_a_launch_tells_the_limits_that_a_training_would_run_into(box: Specctl) -> None:
    words = ["launch", "local", "--json", "--no-source", "--until", "process", "--", "sleep", "60"]
    root = os.geteuid() == 0
    (box.home / "t").mkdir()
    mounts = f"mount -t tmpfs -o size=32m shm /dev/shm && mount -t tmpfs -o noexec t {box.home}/t"
    small = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    done = subprocess.run(
        [*(small if root else []), "prlimit", "--nofile=700:700", sys.executable, "-m", "orchestrator", *words],
        cwd=box.project, capture_output=True, text=True, check=False,
        env={**box.environ, "SPECCTL_INVENTORY": str(local_only(box)), "TMPDIR": f"{box.home}/t"},
    )  # fmt: skip
    answer = json.loads(done.stdout)
    told = [one["value"] for one in answer["evidence"] if one["what"] == "preflight"]
    assert [one for one in told if one.startswith("warning: the limit of open files is 700: ")], answer
    assert [one for one in told if one.startswith("warning: /dev/shm ")] or not root, answer
    assert [one for one in told if one.startswith(f"warning: {box.home}/t runs no programs")] or not root, answer
    assert box("stop", answer["run_id"], "--now", SPECCTL_INVENTORY=str(local_only(box))).code == 0


def local_only(driver: Specctl) -> Path:
    path = driver.home / "local.yaml"
    path.write_text(f"targets:\n  local: {{workdir: {driver.workdir}}}\n")
    return path


def test_a_key_that_nobody_knows_is_no_question_and_ends_the_round(box: Specctl, sshd: LoopbackSshd) -> None:
    known = sshd.known_hosts.read_text()
    sshd.known_hosts.write_text("")
    try:
        done = box("doctor", "--json")
    finally:
        sshd.known_hosts.write_text(known)
    found = outcomes(done)
    assert done.code == 3 and [found[rung]["status"] for rung in ("reachable", "host key", "login")] == [
        "ok", "fail", "unknown",
    ]  # fmt: skip
    assert "is not known: the server shows" in found["host key"]["what"] and found["host key"]["mend"]
    assert {found[check.name]["what"] for check in CHECKS} == {"not looked at: host key comes first"}


def test_the_way_there_is_told_apart_by_rung(box: Specctl, sshd: LoopbackSshd) -> None:
    box.inventory.write_text(f"""
targets:
  closed: {{ssh: 'root@127.0.0.1:1'}}
  box: {{ssh: node1, workdir: {box.workdir}}}
  local: {{workdir: {box.home}/l}}
""")
    authorized = sshd.root / "authorized_keys"
    kept = authorized.read_text()
    authorized.write_text("")
    try:
        done = box("doctor", "--quick", "--json")
    finally:
        authorized.write_text(kept)
    assert done.code == 3, "one that could not be looked into weighs more than what was found elsewhere"
    assert outcomes(done, "closed")["reachable"]["status"] == "fail"
    login = outcomes(done)["login"]
    assert login["status"] == "fail" and "cannot log in as" in login["what"] and "authorized_keys" in login["mend"]
    assert "shell" not in outcomes(done, "local"), "there is no way to go"


def test_a_shell_that_does_not_run_what_it_is_given_is_said_to_be_so(box: Specctl, sshd: LoopbackSshd) -> None:
    authorized = sshd.root / "authorized_keys"
    kept = authorized.read_text()
    authorized.write_text(f'command="echo This account is currently not available." {kept}')
    try:
        done = box("doctor", "--json")
    finally:
        authorized.write_text(kept)
    shell = outcomes(done)["shell"]
    assert done.code == 3 and shell["status"] == "fail" and "account is currently not available" in shell["what"]
    assert "echo works" in shell["mend"]


def test_a_shell_that_prints_without_end_is_left_and_said_to_do_so(box: Specctl, sshd: LoopbackSshd) -> None:
    authorized = sshd.root / "authorized_keys"
    kept = authorized.read_text()
    authorized.write_text(f'command="exec yes welcome" {kept}')
    try:
        done = box("doctor", "--json", timeout_s=60)
    finally:
        authorized.write_text(kept)
    shell = outcomes(done)["shell"]
    assert done.code == 3 and shell["what"] == "the login shell prints without end: 16 MiB so far", shell
    assert "~/.bashrc" in shell["mend"] and len(done.out) < 20_000


def test_a_python_that_hangs_costs_its_own_limit_and_no_other_fact(tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nsleep 600\n")
    hangs.chmod(0o755)
    seen = facts(["sh"], python=str(hangs), python_s=1)
    assert seen.number("python-code") == 137 and seen.place("workdir") is not None


def test_what_was_told_before_something_hung_counts_and_what_hung_is_named(box: Specctl) -> None:
    hangs = box.home / "python"
    hangs.write_text("#!/bin/sh\nsleep 600\n")
    hangs.chmod(0o755)
    over_ssh(box, python=str(hangs))
    done = box("doctor", "--quick", "--timeout", "4", "--json")
    found = outcomes(done)
    assert done.code == 1 and found["tmux"]["status"] == "ok", found
    assert "hangs at the look at python" in found["python"]["what"] and "within 4 s" in found["python"]["what"]
    assert found["workdir"]["status"] == "unknown" and "at python" in found["workdir"]["what"]
    wrong = box("doctor", "--timeout", "soon")
    assert wrong.code == 2 and "no number of seconds" in wrong.err


def test_each_thing_that_is_missing_is_told_with_the_command_of_this_target(box: Specctl, sshd: LoopbackSshd) -> None:
    (box.home / "file").write_text("")
    over_ssh(box, python=str(box.home / "none"), workdir=f"{box.home}/file/w", gpus=[0, 7])
    done = box("doctor")
    assert done.code == 1, done.out
    lines = [line.strip() for line in done.out.splitlines()]
    at = next(n for n, line in enumerate(lines) if line.startswith("fail python: "))
    assert "does not run there" in lines[at] and lines[at + 1].startswith("seen  ") and "No such file" in lines[at + 1]
    assert lines[at + 2].startswith("mend  there is Python 3.") and "set `python: /" in lines[at + 2]
    assert f"{box.home}/file is not a directory" in done.out and f"mv {box.home}/file {box.home}/file.away" in done.out
    assert "fail devices: /dev/nvidia0 is not there; /dev/nvidia7 is not there" in done.out
    assert "mend  ssh -F" in done.out and " node1 " in done.out
    assert "3 failures" in done.out, "that torch could not be asked follows from the first, and is not one more"
    assert "0 of 1 target without a failure." in done.out


@pytest.mark.parametrize("name", ["w", "a work 'dir' of $HOME"])
def test_torch_is_asked_in_the_newest_environment_whatever_the_workdir_is_called(tmp_path: Path, name: str) -> None:
    workdir = tmp_path / name
    for number, environment in enumerate(("older", "newer")):
        (torch := workdir / "envs" / environment / "lib/python3.11/site-packages/torch").mkdir(parents=True)
        os.utime(torch, (1e9 + number, 1e9 + number))
    seen = facts(["sh"], workdir=str(workdir), quick=False)
    assert seen.one("torch-python") == f"{workdir}/envs/newer/bin/python"


def test_torch_is_asked_in_the_python_that_runs_will_have_with_their_gpus(box: Specctl) -> None:
    fake = box.home / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text(
        "import os, warnings\n__version__ = '9.9+cu999'\n"
        "class version: cuda = '99.9'\n"
        "class cuda:\n"
        "    @staticmethod\n    def is_available():\n"
        "        warnings.warn('CUDA unknown error, of ' + os.environ['CUDA_VISIBLE_DEVICES']); return False\n"
        "    @staticmethod\n    def device_count(): return 0\n"
        "class _C:\n    @staticmethod\n    def _cuda_getDeviceCount():\n"
        "        raise RuntimeError('Error 999: unknown error; LD ' + os.environ.get('LD_SOMETHING', ''))\n"
    )
    box.inventory.write_text(
        f"targets:\n  box: {{ssh: node1, workdir: {box.workdir}, python: {sys.executable}, gpus: [2, 3], "
        f"env: {{PYTHONPATH: {box.home}, LD_SOMETHING: seen, TOKEN: hidden}}}}\n"
    )
    torch = outcomes(box("doctor", "--json"))["torch"]
    assert torch["status"] == "fail" and "torch 9.9+cu999" in torch["what"], torch
    assert "/dev/nvidia2 is not there" in torch["what"], "what it comes from"
    assert "Error 999: unknown error; LD seen" in torch["evidence"]
