"""Where a launch cannot live it is refused before anything is sent, with one message and nothing left behind.

Over a real sshd, so that the target's own Python, PATH and tmux take part, and not those of the laptop's side.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.agent import boot
from tests.driver import Done, Specctl, over_ssh, poll_until
from tests.sshd import LoopbackSshd

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other users need root")
OLD_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.[6-9]*/bin/python3"))


def refused(driver: Specctl, *words: str) -> Done:
    done = driver("launch", "box", *(words or ("--", "true")))
    assert done.code == 1, done.err
    assert done.out == "" and done.err.count("error:") == 1, done.err
    return done


def test_the_boot_text_can_be_read_by_the_oldest_python_that_it_must_refuse() -> None:
    ast.parse(Path(str(boot.__file__)).read_text(), feature_version=(3, 6))


@pytest.mark.skipif(not OLD_PYTHONS, reason="no Python older than 3.10 on this machine")
def test_a_python_that_is_too_old_is_named_with_one_that_would_do(box: Specctl) -> None:
    python = OLD_PYTHONS[0]
    over_ssh(box, python=str(python))
    done = refused(box)
    version = python.parent.parent.name.rpartition(".")[0]
    assert f"{python} there is Python {version}" in done.err and "3.10 or newer" in done.err
    assert "set `python: /" in done.err, "there are newer ones on this machine"
    assert not box.workdir.exists()


def test_a_python_that_is_missing_or_none_at_all_is_named_with_what_would_do(box: Specctl) -> None:
    for python in ("/nowhere/python3", "/bin/sh"):
        over_ssh(box, python=python)
        assert f"{python} cannot run specctl's agent there" in refused(box).err
    half = box.home / "half"  # a Python whose standard library has lost a part
    half.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'raise ModuleNotFoundError(\"No module named json\")'\n")
    half.chmod(0o755)
    over_ssh(box, python=str(half))
    assert "No module named json" in refused(box).err
    assert not box.workdir.exists()


def test_a_tmux_is_found_where_it_is_and_refused_where_it_is_too_old(box: Specctl, sshd: LoopbackSshd) -> None:
    tools = sshd.home / ".local" / "bin"
    tools.mkdir(parents=True)
    old = box.home / "old"
    old.mkdir()
    (old / "tmux").write_text("#!/bin/sh\necho tmux 2.8\n")
    (old / "tmux").chmod(0o755)
    found = subprocess.run(["which", "tmux"], capture_output=True, text=True, check=True).stdout.strip()
    look = (
        "from orchestrator.agent import system, tmux\n"
        "from orchestrator.agent.main import Refusal\n"
        f"system.PATH = ('{old}',)\n"
        "try:\n    print(tmux.find())\nexcept Refusal as refusal:\n    print(refusal.message, refusal.hint)\n"
    )
    environ = {"PATH": str(old), "HOME": str(sshd.home), "PYTHONPATH": str(Path(boot.__file__).parents[2])}

    def asked() -> str:
        return subprocess.run([sys.executable, "-c", look], env=environ, capture_output=True, text=True).stdout

    assert f"{old}/tmux is tmux 2.8, and 3.2a or newer is needed" in asked()
    (tools / "tmux").symlink_to(found)
    assert f"program='{tools}/tmux'" in asked(), "one of the user's own is taken, past one that is too old"
    (old / "tmux").write_text("#!/bin/sh\necho 'tmux: need UTF-8 locale (LC_CTYPE) but have ANSI' >&2; exit 1\n")
    (tools / "tmux").unlink()
    assert "need UTF-8 locale" in asked() and "libc-bin" in asked()
    (old / "tmux").unlink()
    assert f"tmux not found (searched {old}:" in asked()


def test_a_workdir_too_deep_for_a_socket_is_reached_by_a_short_name(box: Specctl) -> None:
    deep = box.home / ("d" * 60) / ("e" * 60)
    over_ssh(box, workdir=str(deep))
    box.workdir = deep
    launch = ("launch", "box", "--no-source", "--until", "process", "--", "sleep", "60")
    assert box(*launch).code == 0
    assert (deep / f"tmux-{os.geteuid()}").is_socket()
    [alias] = [path for path in Path("/tmp").glob(f"specctl-{os.geteuid()}-*") if path.readlink() == deep]
    alias.unlink()  # as a cleaner of /tmp does
    [agent] = (deep / "agents").iterdir()
    (agent / "orchestrator" / "frames.py").unlink()  # and it has been at the agent, too, which is then sent again
    assert box(*launch).code == 0
    assert [path.name for path in (deep / "agents").iterdir()] == [agent.name]
    listed = subprocess.run(["tmux", "-S", f"{alias}/tmux-{os.geteuid()}", "ls"], capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 2, "both runs are on one server"
    alias.unlink()


@ROOT
@pytest.mark.parametrize(
    ("options", "said"),
    [("ro", "read-only file system"), ("size=64k", "is full"), ("size=6m,nr_inodes=10", "is full")],
)
def test_a_workdir_that_cannot_be_written_is_refused_and_left_as_it_was(box: Specctl, options: str, said: str) -> None:
    with mounted(box, options) as place:
        over_ssh(box, workdir=f"{place}/w")
        done = refused(box)
        assert said in done.err and f"{place}/w" in done.err and "`workdir:`" in done.err
        assert list(place.iterdir()) == []
        assert box("status", "box").code == 0


@ROOT
def test_a_disk_that_fills_up_leaves_nothing_that_a_later_launch_would_believe(box: Specctl) -> None:
    for number in range(200):
        (box.project / f"{number}.txt").write_text(f"{number}")
    with mounted(box, "size=32m,nr_inodes=2000") as place:
        workdir, fillers = place / "w", place / "fillers"
        over_ssh(box, workdir=str(workdir))
        box("launch", "box", "--no-source", "--until", "process", "--", "true")  # the agent is there now
        bundles = set((workdir / "bundles").iterdir())
        fillers.mkdir()
        fill(fillers, leave=100)  # files: too few for the bundle
        done = box.launch("--", "true", target="box")
        assert done.code == 1 and done.json["state"] == "NEVER_STARTED", done.err
        assert "No space left on device" in done.json["error"]["message"]
        assert set((workdir / "bundles").iterdir()) == bundles

        fill(fillers, leave=350)  # enough for the bundle, and too few for the run's own copy of it
        done = box.launch("--", "true", target="box")
        assert done.code == 1 and done.json["state"] == "NEVER_STARTED"
        assert "No space left on device" in done.json["error"]["message"]
        assert not (workdir / "runs" / done.json["run_id"] / "code").exists()
        assert len(set((workdir / "bundles").iterdir()) - bundles) == 1

        (fillers / "large").write_bytes(bytes(free_bytes(place) - (3 << 20)))
        # The agent itself is some of it.
        assert re.search(r"has too little room for 4\.\d MiB: the file system at", refused(box).err)
        told = box("targets", "box")
        assert told.code == 1 and "has too little room for 4.0 MiB: the file system at" in told.out
        shutil.rmtree(fillers)
        run_id = box.launch("--until", "process", "--", "sleep", "60", target="box").json["run_id"]
        fillers.mkdir()
        fill(fillers, leave=0)
        shutil.rmtree(next((workdir / "agents").iterdir()))  # as after an update of specctl
        fill(fillers, leave=0)
        assert box.status("box")["state"] in ("RUNNING", "STARTING")
        done = box("stop", run_id, "--now")
        assert done.code == 0 and "STOPPED" in done.out, "a full disk keeps no run from being stopped"
        assert not (workdir / "agents").exists(), "the agent that looked was elsewhere"
        shutil.rmtree(f"/tmp/specctl-agents-{os.geteuid()}")


@ROOT
def test_an_environment_is_not_made_where_its_libraries_could_not_be_loaded(box: Specctl) -> None:
    (box.project / "run.yaml").write_text("requirements: [small]\n")
    with mounted(box, "noexec,size=32m") as place:
        over_ssh(box, workdir=f"{place}/w")
        done = box.launch("--config", "run.yaml", "--", "true", target="box")
        assert done.code == 1 and "noexec" in done.json["error"]["message"]


@ROOT
def test_people_who_share_a_workdir_are_told_whose_it_is(box: Specctl) -> None:
    shared = box.home / "shared"
    box.home.chmod(0o755)
    over_ssh(box, workdir=str(shared), python="/usr/bin/python3")
    run_id = box.launch("--until", "process", "--", "sleep", "60", target="box").json["run_id"]
    box.workdir = shared
    over_ssh(box, workdir=str(shared), python="/usr/bin/python3", user="nobody")
    done = refused(box)
    assert f"{shared} belongs to root, and nobody cannot write there" in done.err and "chown" in done.err
    row = box.status("box")
    assert row["run_id"] == run_id and row["state"] == "UNREACHABLE" and "run of the user root" in row["why"]
    done = box("stop", run_id)
    assert done.code == 1 and "cannot be stopped: it is a run of the user root" in done.err
    assert box.processes(run_id), "and it goes on"
    over_ssh(box, workdir=str(shared), python="/usr/bin/python3")
    assert box("stop", run_id, "--now").code == 0


def test_a_session_that_ends_with_the_login_is_not_called_verified(box: Specctl, sshd: LoopbackSshd) -> None:
    wrapper, reaper = box.home / "login", box.home / "reaper.py"
    reaper.write_text(REAPER)
    wrapper.write_text(
        f"#!/bin/sh\nsetsid {sys.executable} {reaper} $PPID {box.workdir}/ </dev/null >/dev/null 2>&1 &\n"
        'exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    wrapper.chmod(0o755)
    key = (sshd.root / "id.pub").read_text()
    (sshd.root / "authorized_keys").write_text(f'command="{wrapper}" {key}')
    begun = time.monotonic()
    done = box.launch("--", "python", box.program("steps.py"), target="box")
    assert done.code == 1 and not done.json["verified"] and done.json["state"] in ("LOST", "KILLED")
    assert "enable-linger" in done.json["error"]["message"], time.monotonic() - begun
    poll_until(lambda: not box.processes(done.json["run_id"]))


REAPER = """
# What logind does with KillUserProcesses=yes: when the login is over, all that it has left behind ends.
import os, signal, sys, time
login, workdir = int(sys.argv[1]), sys.argv[2].encode()
while os.path.exists(f"/proc/{login}"):
    time.sleep(0.02)
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        text = open(f"/proc/{pid}/cmdline", "rb").read() + open(f"/proc/{pid}/environ", "rb").read()
        if workdir in text and int(pid) not in (os.getpid(), os.getppid()):
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


class mounted:
    """A tmpfs with `options` in the driver's home."""

    def __init__(self, driver: Specctl, options: str) -> None:
        self.place, self.options = driver.home / "place", options

    def __enter__(self) -> Path:
        self.place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", self.options, "specctl-test", self.place], check=True)
        return self.place

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", self.place], check=True)


def fill(folder: Path, *, leave: int) -> None:
    """Makes or removes files until the file system has room for `leave` more."""
    for name in sorted(folder.iterdir()):
        if os.statvfs(folder).f_favail >= leave:
            break
        name.unlink()
    for number in range(os.statvfs(folder).f_favail - leave):
        (folder / f"{time.monotonic_ns()}-{number}").touch()


def free_bytes(place: Path) -> int:
    room = os.statvfs(place)
    return room.f_bavail * room.f_frsize
