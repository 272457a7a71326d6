"""What the session of a run shows to whoever attaches: its logs as they grow, as `tail -f` of several files would.

For eyes only: nothing ever reads it back, and a terminal that nobody drains costs a part of the picture, never a round
of the supervisor.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

from orchestrator.agent.follow import Follower

SHOWN_BYTES = 16 << 10
"""More than this of one round is skipped: it is several screens, and nobody reads that fast."""
WAIT_S = 0.05
"""How long one round waits for tmux to take it all."""


class Pane:
    """The supervisor's own terminal."""

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}
        self._last = ""
        os.set_blocking(1, False)

    def follow(self, followers: Sequence[Follower]) -> None:
        """Shows how the logs have grown since the last call; the first one is the run's own. Raises `OSError`."""
        own = followers[0].path
        self._last = self._last or own
        for follower in followers:
            # Of a log that the program writes by itself only what is this run's, and nothing of what was there before.
            start = self._shown.setdefault(follower.path, follower.foreign.base if follower.foreign else 0)
            if follower.offset == start or follower.shared:
                continue
            self._shown[follower.path] = follower.offset
            if follower.path != self._last:
                self.say(f"==> {follower.path} <==" if follower.path != own else "==> the run's own log <==")
                self._last = follower.path
            self._write(_part(follower.path, start, follower.offset))

    def say(self, text: str) -> None:
        self._write(f"\n{text}\n".encode("utf-8", "replace"))

    def _write(self, data: bytes) -> None:
        try:
            while data:
                if not select.select([], [1], [], WAIT_S)[1]:
                    return
                data = data[os.write(1, data) :]
        except OSError:
            pass  # gone with its tmux server


def _part(path: str, start: int, end: int) -> bytes:
    """The bytes between, from the first whole line of the last part on when they are too many."""
    if end < start:
        start = 0  # it has begun again
    skipped = end - start > SHOWN_BYTES
    with open(path, "rb") as file:
        file.seek(max(start, end - SHOWN_BYTES))
        data = file.read(end - file.tell())
    return b"[...]\n" + data.partition(b"\n")[2] if skipped else data
