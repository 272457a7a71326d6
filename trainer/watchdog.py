"""Whether the run has been without a step for too long, and if so, who holds it up and what every thread does.

The main thread asks, which waits for the workers anyway; so a worker that hangs holds up nobody who could tell. Only
time counts in which the process itself ran: one that was frozen for an hour has not been hanging for an hour.
"""

from __future__ import annotations

import statistics
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable

from trainer.pipeline import Worker
from trainer.sections import WatchdogConfig

FIRST_FACTOR, AWAY_FACTOR = 10.0, 5.0
LONGEST_LOOK_S = 2.0
"""More than that between two looks is time in which this process did not run."""
STEPS_KEPT = 101


class NoProgress(RuntimeError):
    """No step has ended for too long; `worker` is the one that all wait for."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class Watchdog:
    """Told of every step, asked several times a second. `now` is `time.monotonic()`."""

    def __init__(self, config: WatchdogConfig, *, now: float) -> None:
        self.config = config
        self._intervals_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._stepped_at: float | None = None
        self._looked_at = now
        self.quiet_s = 0.0
        """For which no step has ended, and this process has run."""
        self._reported = False

    def stepped(self, now: float) -> None:
        if self._stepped_at is not None:
            self._intervals_s.append(now - self._stepped_at)
        self._stepped_at, self.quiet_s, self._reported = now, 0.0, False

    def again(self) -> None:
        """The run begins anew from where it is."""
        self._stepped_at, self.quiet_s, self._reported = None, 0.0, False

    def limit_s(self, *, away: bool) -> float:
        """How long may no step end? `away`: a checkpoint is being written, or the drafter evaluated."""
        if self._stepped_at is None:
            limit_s = FIRST_FACTOR * self.config.least_s
        else:
            # A copy: a worker may be adding to it.
            median_s = statistics.median(list(self._intervals_s) or [0.0])
            limit_s = max(self.config.least_s, self.config.factor * median_s)
        return AWAY_FACTOR * limit_s if away else limit_s

    def look(self, now: float, *, away: bool) -> str | None:
        """How long has no step ended, if that is too long and has not been told yet?"""
        self.quiet_s += min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        if self.config.action == "off" or self._reported or self.quiet_s <= self.config.least_s:
            return None
        limit_s = self.limit_s(away=away)
        if self.quiet_s <= limit_s:
            return None
        self._reported = True
        return f"no step for {self.quiet_s:.1f} s (limit {limit_s:.1f} s)"


def who_holds_up(workers: Iterable[Worker]) -> Worker:
    """The first that waits for none of the others."""
    ordered = list(workers)
    return next((worker for worker in ordered if not worker.idle), ordered[0])


def stacks() -> dict[str, str]:
    """By thread: where it is, outermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return {
        names.get(ident, f"thread {ident}"): "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident != own
    }
