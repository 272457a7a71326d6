"""Who stands before a pipe to tee: `python train.py | tee log` ends with tee's exit code, whatever became of the other.

A shell's pipe has the code of its last command, so the supervisor looks for processes whose output reaches a `tee`
while they live, and keeps a handle on each. Since Linux 6.15 a handle (pidfd) tells the code of a process that its
parent has collected; where the kernel is older, that the code is not known is all there is to say.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.agent import proc
from orchestrator.model import Process

PIDFD_GET_INFO = 0xC040FF0B
INFO_EXIT = 1 << 3
INFO_BYTES, MASK_AT, STATUS_AT = 64, 0, 60
LIMIT = 16
"""Handles that are kept: of the newest pipe, and that is rarely longer than three commands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """The end of a process that a pipe has hidden. `code` is None if nobody knows it; below 0 it is a signal."""

    name: str
    code: int | None


class Pipes:
    """The newest pipe to a tee that was seen in a run, and who writes into it."""

    def __init__(self) -> None:
        self._since = 0
        """Start time of the tee."""
        self._handles: dict[tuple[int, int], tuple[str, int]] = {}
        """(pid, start time) -> name and pidfd."""

    def seen(self, tree: list[Process]) -> list[Process]:
        """`tree`, which has been looked at."""
        tees = [one for one in tree if one.name == "tee" and one.start_ticks >= self._since]
        if tees:
            newest = max(one.start_ticks for one in tees)
            if newest > self._since:
                self.forget()
                self._since = newest
            for one in writers(tree, [tee for tee in tees if tee.start_ticks == newest]):
                key = (one.pid, one.start_ticks)
                if key in self._handles:  # it may have been the shell's name, before it became the command
                    self._handles[key] = (one.name, self._handles[key][1])
                elif len(self._handles) < LIMIT:
                    with suppress(OSError):
                        self._handles[key] = (one.name, os.pidfd_open(one.pid))
        return tree

    def ended_badly(self) -> Hidden | None:
        """The first of them that did not end with 0, or of whose end nothing is known. A writer whose reader has left
        first (SIGPIPE) has not failed."""
        for name, fd in self._handles.values():
            code = exit_code(fd)
            if code is None or code not in (0, -signal.SIGPIPE):
                return Hidden(name=name, code=code)
        return None

    def forget(self) -> None:
        for _, fd in self._handles.values():
            os.close(fd)
        self._handles.clear()


def writers(tree: list[Process], tees: Iterable[Process]) -> list[Process]:
    """The commands of the pipes that end in one of `tees`: those that write into it, straight or through others. What
    such a command has itself started is its own business."""
    pipes = {pipe for tee in tees if (pipe := _pipe(tee.pid, 0))}
    output = {one.pid: _pipe(one.pid, 1) for one in tree}
    found: set[int] = set()
    while more := {pid for pid, pipe in output.items() if pipe in pipes} - found:
        found |= more
        pipes |= {pipe for pid in more if (pipe := _pipe(pid, 0))}
    return [one for one in tree if one.pid in found and _parent(one.pid) not in found]


def exit_code(pidfd: int) -> int | None:
    """How the process ended that this was a handle of; None if that cannot be told."""
    info = bytearray(INFO_BYTES)
    struct.pack_into("=Q", info, MASK_AT, INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info, MASK_AT)
    if not mask & INFO_EXIT:
        return None
    return os.waitstatus_to_exitcode(struct.unpack_from("=i", info, STATUS_AT)[0])


def _pipe(pid: int, fd: int) -> str | None:
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return None
    return target if target.startswith("pipe:") else None


def _parent(pid: int) -> int | None:
    found = proc.stat(pid)
    return found[1] if found else None
