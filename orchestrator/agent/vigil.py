"""The supervisor's own notes of what no line says: that a run stands still, and that it has become slow.

A probe sees it while it lasts; these notes are for whoever comes later (`specctl watch`), by the same rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.agent import records
from orchestrator.agent.journal import Journal
from orchestrator.agent.merge import merge
from orchestrator.logscan import pace, settled
from orchestrator.logscan.pace import Limits, Progress
from orchestrator.model import FollowedLog, RunPaths

EVERY_S = 5.0
OVER = 0.8
"""tok/s is as it was again when it is back at this part of what it had fallen from."""


class Vigil:
    """Looks now and then; each stall and each fall is noted once, and its end."""

    def __init__(self, paths: RunPaths, journal: Journal, *, nonce: str, created_at: float) -> None:
        self.paths, self.journal, self.nonce, self.created_at = paths, journal, nonce, created_at
        self._looked_at = time.monotonic()
        self._stalled_at: float | None = None
        """When it had made its last step, of the stall that is noted and not over."""
        self._fallen_from: float | None = None

    def look(self, followed: Callable[[], list[FollowedLog]], now: float) -> None:
        """`now` and the logs' times are by the run's own clock."""
        if time.monotonic() - self._looked_at < EVERY_S:
            return
        self._looked_at = time.monotonic()
        summary, beat = settled(merge(followed())), records.heartbeat(self.paths, self.nonce)
        progress = Progress.of(summary, beat, now)
        if progress.at is not None:
            limit_s = progress.patience_s(summary, created_at=self.created_at, limits=Limits())
            self._stall(progress, now - progress.at, limit_s)
        if beat is None:  # a trainer that keeps its heartbeat notes itself that it has become slow
            self._fall(summary.tok_s, pace.fallen_from(summary, Limits()))

    def _stall(self, progress: Progress, silent_s: float, limit_s: float) -> None:
        if self._stalled_at is not None and progress.at != self._stalled_at:
            self.journal.event("stall_over", step=progress.step)
            self._stalled_at = None
        if self._stalled_at is None and silent_s > limit_s:
            self._stalled_at = progress.at
            self.journal.event(
                "stalled", step=progress.step, silent_s=round(silent_s, 1), limit_s=round(limit_s, 1),
                phase=progress.phase if progress.after_step else None,
            )  # fmt: skip

    def _fall(self, tok_s: float | None, fallen_from: float | None) -> None:
        if self._fallen_from is None and fallen_from is not None:
            self._fallen_from = fallen_from
            self.journal.event("decay", tok_s=tok_s, before_tok_s=fallen_from)
        elif self._fallen_from is not None and tok_s is not None and tok_s >= OVER * self._fallen_from:
            self._fallen_from = None
            self.journal.event("decay_over", tok_s=tok_s)
