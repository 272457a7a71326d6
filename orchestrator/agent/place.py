"""Whether a launch can live here: asked first, before anything is sent, so that a refusal leaves nothing behind.

What it tells is found by doing it: a file is written and synced, a link and a socket are made, tmux is started, the
GPUs' device files are opened by the user who will run.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import shutil
import socket
import sys
import tempfile

from orchestrator import ailments
from orchestrator.agent import cgroup, claiming, gpu, proc, space, system, tmux
from orchestrator.agent.main import MAKE_ROOM, Call, Refusal, describe, hint_of

MODULES = ("ctypes", "fcntl", "hashlib", "select", "subprocess", "tarfile", "tempfile")
"""What the agent needs of the standard library, beyond what `boot.py` has shown to be there."""
SHM = "/dev/shm"
PROBE_BYTES = 64 << 10


def check(call: Call, *, present: bool, prepares: bool) -> tuple[list[str], bool]:
    """(what there is to say of GPUs and limits, whether the run will claim any GPU). Raises `Refusal` with the first
    reason why a launch cannot work here. `present`: its bundle is there already; `prepares`: its environment is not."""
    _python()
    copies = 1 if present else 2  # the bundle, and the run's own copy of it
    workdir = call.paths.workdir
    room(workdir, copies * int(call.request.get("bytes") or 0))
    if prepares and (closed := ailments.runs_no_programs(space.mount(os.path.dirname(call.paths.env("x"))), workdir)):
        raise Refusal("preflight", closed.what, closed.hint)
    _file_system(call)
    tmux.find()
    tmux.socket_of(call.paths)
    asked = bool((call.request.get("wish") or {}).get("must"))
    numbers = [int(number) for number in call.request.get("gpus") or []]
    said = gpu.check(numbers, int(call.request.get("cuda") or 0), asked=asked)
    more, claims = claiming.preflight(call)
    return [*said, *more, *_warnings()], claims


def _warnings() -> list[str]:
    """What keeps no run from starting, and may end it later."""
    there = os.path.isdir(SHM)
    found: list[ailments.Ailment | None] = [
        *ailments.limits(proc.read("/proc/self/limits").decode("ascii", "replace")),
        ailments.shm(there=there, writable=os.access(SHM, os.W_OK), disk=space.disk_of(SHM) if there else None),
        _memory(), _processes(), _tmp(),
        None if shutil.which("grep") else ailments.NO_GREP,
    ]  # fmt: skip
    return [f"warning: {one.what} ({one.hint})" for one in found if one is not None]


def _memory() -> ailments.Ailment | None:
    there = re.search(rb"^MemTotal:\s+(\d+) kB", proc.read("/proc/meminfo"), re.MULTILINE)
    allowed = [most for most, _ in cgroup.limits(cgroup.own_folder(), "memory.max", "memory.current")]
    allowed += [int(there[1]) << 10] if there else []
    return ailments.memory(min(allowed)) if allowed else None


def _processes() -> ailments.Ailment | None:
    limits = cgroup.limits(cgroup.own_folder(), "pids.max", "pids.current")
    return next(filter(None, (ailments.processes(most, now) for most, now in limits)), None)


def _tmp() -> ailments.Ailment | None:
    path = os.environ.get("TMPDIR") or "/tmp"
    usable = os.path.isdir(path) and os.access(path, os.W_OK)
    return ailments.tmp(
        path, user=system.name_of(os.geteuid()), usable=usable, mount=space.mount(path), disk=space.disk_of(path)
    )  # fmt: skip


def _python() -> None:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Refusal("python", f"{sys.executable} there has no module {name} ({error})") from error


def room(workdir: str, wanted: int) -> None:
    """Raises `Refusal` when `wanted` bytes and a run's records have no room in the workdir."""
    if why := ailments.lacks_room(space.disk_of(workdir), wanted):
        raise Refusal(
            "preflight", f"the workdir {workdir} {why}",
            f"{MAKE_ROOM}, or choose another `workdir:` in hosts.yaml",
        )  # fmt: skip


def _file_system(call: Call) -> None:
    """Raises `Refusal` when the workdir's file system cannot do what the records of a run rest on."""
    doing, folder = "written", None
    try:
        folder = tempfile.mkdtemp(prefix=".check-", dir=call.paths.workdir)
        with open(os.path.join(folder, "file"), "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            doing = "locked"
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        doing = "given a second name (a hard link)"
        os.link(os.path.join(folder, "file"), os.path.join(folder, "link"))
        doing = "linked (a symbolic link)"
        os.symlink("file", os.path.join(folder, "symlink"))
        doing = "made a socket, for tmux,"
        before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.chdir(folder)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind("socket")
        finally:
            os.fchdir(before)
            os.close(before)
    except OSError as error:
        raise Refusal(
            "preflight", f"in the workdir {call.paths.workdir} a file cannot be {doing}: {describe(error)}",
            hint_of(error) or "choose a `workdir:` on a local disk of the target in hosts.yaml",
        ) from error  # fmt: skip
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

