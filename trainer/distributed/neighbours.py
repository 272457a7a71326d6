"""Notices at once that another process of this machine has gone, which one that was killed cannot tell of itself.

What it leaves behind is a broken connection at best (gloo), and on NVLink nothing at all: a kernel of NCCL's waits
until torchrun, which asks the others to end and is not heard, kills them after 30 s. So a thread waits here for the
kernel's word of each process that torchrun has started on this machine. It calls neither CUDA nor NCCL, and if
this process is still there after a while, a timer that waits for no lock ends it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

LEAVE_S = 20.0
"""So long after another's bad end this process may still be there; torchrun would kill it after 30 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A process that is no more."""

    rank: int
    pid: int
    code: int | None
    """Its exit code, or of a signal minus its number; None: nobody has seen it."""

    def __str__(self) -> str:
        who = f"process {self.rank} (pid {self.pid})"
        if self.code is None:
            return f"{who} has gone without a word"
        if self.code >= 0:
            return f"{who} ended with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"{who} was killed by {name}"


def watch(pids: Mapping[int, int], on_bad_end: Callable[[Gone], bool]) -> None:
    """From now on. `pids` by rank; `on_bad_end` is called in a thread of its own, and says whether this process is to
    end for that. Where the kernel has no such word, nothing is watched."""
    if pids and hasattr(os, "pidfd_open"):
        threading.Thread(target=_wait, args=(pids, on_bad_end), name="neighbours", daemon=True).start()


def _wait(pids: Mapping[int, int], on_bad_end: Callable[[Gone], bool]) -> None:
    poll, ranks = select.poll(), dict[int, int]()
    ends: list[Gone] = []
    for rank, pid in pids.items():
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            ends.append(Gone(rank=rank, pid=pid, code=None))
        except OSError:  # an old kernel, or a container that forbids it
            return
        else:
            poll.register(descriptor, select.POLLIN)
            ranks[descriptor] = rank
    while ends or ranks:
        for gone in ends:
            if gone.code == 0:
                continue
            timer = threading.Timer(LEAVE_S, _leave, [gone])
            timer.daemon = True
            timer.start()
            if not on_bad_end(gone):
                timer.cancel()
        ends = []
        for descriptor, _ in poll.poll() if ranks else []:
            poll.unregister(descriptor)
            os.close(descriptor)
            rank = ranks.pop(descriptor)
            ends.append(Gone(rank=rank, pid=pids[rank], code=_code(pids[rank])))


def _code(pid: int) -> int | None:
    """Of a process that has ended, as long as its parent has not asked for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] in "ZX" else None
    except (OSError, ValueError, IndexError):
        return None


def _leave(gone: Gone) -> None:
    os.write(sys.stderr.fileno(), f"trainer: stuck for {LEAVE_S:.0f} s since {gone}: ends now\n".encode())
    os._exit(1)
