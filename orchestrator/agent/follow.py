"""Reading logs as they grow: the run's own and the program's, into events, metrics and a summary of constant size."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.logscan import Event, Scanner
from orchestrator.model import FollowedLog, ForeignLog, LogSummary

READ_BYTES = 1 << 20
SETTLE_S = 0.5
"""Silence after which a traceback that has its last line is taken to be over."""
DIRTY = (b"\x1b", b"\r", b"\0")


class Follower:
    """One log and what has been read out of it. Opened once: a file that is replaced under its name is not followed."""

    def __init__(
        self,
        path: str,
        *,
        foreign: ForeignLog | None = None,
        summary: LogSummary | None = None,
        patterns: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.foreign = path, foreign
        base = foreign.base if foreign else 0
        self.scanner = Scanner(summary=summary, patterns=patterns, base_offset=base)
        self.offset = max(base, self.scanner.resume_offset)
        self.lost: str | None = None
        """Why reading ended early, or None."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if foreign is not None and (found.st_dev, found.st_ino) != (foreign.device, foreign.inode):
            self.lost = "replaced by another file"
        self._grew_at, self._settled = 0.0, True
        self.dirty = False
        """Whether bytes that need cleaning have been read since the last mark."""

    def advance(self, now: float, *, budget_bytes: int = 8 * READ_BYTES) -> list[Event]:
        """The events of what has been written since the last call, reading at most about `budget_bytes`."""
        events: list[Event] = []
        if self.lost is not None:
            return events
        size = os.fstat(self._fd).st_size
        if size < self.offset:
            self.lost = f"truncated from {self.offset} to {size} bytes"
            return events
        while budget_bytes > 0:
            data = os.pread(self._fd, READ_BYTES, self.offset)
            if not data:
                if not self._settled and now - self._grew_at >= SETTLE_S:
                    self._settled = True
                    events += self.scanner.settle(now)
                break
            self._grew_at, self._settled = now, False
            self.offset += len(data)
            budget_bytes -= len(data)
            self.dirty = self.dirty or any(byte in data for byte in DIRTY)
            events += self.scanner.feed(data, now)
        return events

    def finish(self, now: float) -> list[Event]:
        """The rest, and what an end of the log makes certain: the open last line, an open traceback."""
        events = self.advance(now, budget_bytes=1 << 62)
        return events + self.scanner.finish(now)

    @property
    def behind(self) -> bool:
        """Whether there is more to read now."""
        return self.lost is None and os.fstat(self._fd).st_size > self.offset

    def followed(self) -> FollowedLog:
        foreign = self.foreign
        if foreign is not None:
            foreign = dataclasses.replace(foreign, size=os.fstat(self._fd).st_size)
        return FollowedLog(summary=self.scanner.summary(), foreign=foreign)

    def close(self) -> None:
        os.close(self._fd)


def merge(logs: Iterable[FollowedLog]) -> LogSummary:
    """One summary of a run that writes several logs: steps from the log that stepped last, findings from all."""
    summaries = [log.summary for log in logs]
    if not summaries:
        return LogSummary()
    if len(summaries) == 1:
        return summaries[0]
    best = max(summaries, key=lambda summary: (summary.step_at or 0.0, summary.phase_at or 0.0))
    phased = max(summaries, key=lambda summary: summary.phase_at or 0.0)
    stepped = {worker.name for worker in best.workers}

    def all_of(name: str) -> list[Any]:
        return [item for summary in summaries for item in getattr(summary, name)]

    findings = sorted(all_of("findings"), key=lambda found: found.at)
    return dataclasses.replace(
        best,
        phase=phased.phase,
        phase_at=phased.phase_at,
        workers=best.workers + [worker for worker in all_of("workers") if worker.name not in stepped],
        findings=findings[:8],
        tail=sorted(all_of("tail"), key=lambda found: found.at),
        open_findings=all_of("open_findings"),
        findings_total=sum(summary.findings_total for summary in summaries),
    )
