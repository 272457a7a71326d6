"""`<workdir>/pushes/`: who pushes where right now, and which parts a broken push has left for the next one.

A record is locked by the push that writes it, and its time says when that last moved: closing a channel stops nothing
in a container, so the push of a laptop that has gone may wait there for ever, and the next one takes its place.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256

from orchestrator.agent import files, proc
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.tree import encoded, shown

STUCK_S = 10.0
"""A push that has not moved for so long is one whose laptop has gone."""


def folder(workdir: str) -> str:
    return f"{workdir}/pushes"


def parts_of(path: str) -> list[str]:
    """The parts that the push of this record has left."""
    value = files.read_json(path) or {}
    parts = value.get("parts")
    found = parts if isinstance(parts, list) else []
    return [part for part in found if isinstance(part, str) and os.path.lexists(encoded(part))]


@contextmanager
def held(call: Call, root: str, parts: list[str]) -> Iterator[Callable[[], None]]:
    """Inside it nobody else pushes to `root`; call what it gives for every sign of life. Raises `Refusal`."""
    os.makedirs(folder(call.paths.workdir), exist_ok=True)
    path = f"{folder(call.paths.workdir)}/{sha256(encoded(root)).hexdigest()[:16]}.json"
    fd = _locked(path, root, call)
    try:
        me = proc.stat(os.getpid())
        value = {
            "dst": root, "pid": os.getpid(), "start_ticks": me[0].start_ticks if me else 0,
            "parts": sorted({*parts, *parts_of(path)}),
        }  # fmt: skip
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(value, ensure_ascii=True).encode("ascii") + b"\n", 0)
        yield lambda: os.utime(fd)
        if not parts_of(path):
            os.unlink(path)
    except BaseException:
        if not parts_of(path):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def _locked(path: str, root: str, call: Call) -> int:
    began: float | None = None
    moved_at = 0.0
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = os.fstat(fd).st_mtime
            os.close(fd)
        else:
            if _is(fd, path):
                return fd
            os.close(fd)  # whoever held it has removed it at the end
            continue
        if began is None:
            began, moved_at = time.monotonic(), found
            call.emit({"waiting": f"for another push to {shown(root)}, which seems to be under way"})
        waited_s = time.monotonic() - began
        if found != moved_at or waited_s > 2 * STUCK_S:
            raise Refusal(
                "preflight", f"another push to {shown(root)} is under way", "wait for it to end, then push again"
            )
        if waited_s > STUCK_S:
            _end(path)
        time.sleep(0.1)


def _is(fd: int, path: str) -> bool:
    try:
        return os.fstat(fd).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


def _end(path: str) -> None:
    """Ends the process that a push has left behind."""
    value = files.read_json(path) or {}
    pid, ticks = value.get("pid"), value.get("start_ticks")
    if type(pid) is int and type(ticks) is int and proc.same(pid, ticks) is not None:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # somebody else's: it is waited for a little longer, and then said to be there
