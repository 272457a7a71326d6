"""A run's own clock: the wall clock as it was when the run was accepted, going on by the time since boot.

A wall clock is set, by hand or by NTP, while a run goes on. What specctl notes of a run it notes by the run's clock,
which nobody sets; who looks at the run sees by how much the wall clock has been set since (`Probe.clock_set_by_s`), and
says these times by the clock of now. A file's time is the wall clock's: nothing tells whether it is from before.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from orchestrator.model import Finding, FollowedLog, LogSummary, OpenFinding, Worker
from orchestrator.record import record

SET_S = 1.0
"""Clocks that are apart by less are the same: they are not read in the same instant."""
READINGS = 3
"""This process may have to wait between two clocks; the readings that were closest together count."""


def booted_at() -> float:
    """What the wall clock would have shown at boot, had it been right then: another time once it has been set."""
    found = []
    for _ in range(READINGS):
        before, now, after = _since_boot(), time.time(), _since_boot()
        found.append((after - before, now - (before + after) / 2))
    return min(found)[1]


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@record
class Clock:
    """The clock of one run, as long as its boot lasts."""

    booted_at: float

    @classmethod
    def of(cls, record: dict[str, Any], boot: str) -> Clock:
        """That of the run with this run.json (`records.spec`). In another boot there is only the wall clock."""
        known: float | None = record["booted_at"] if record["boot"] == boot else None
        return cls(booted_at=booted_at() if known is None else known)

    def now(self) -> float:
        return self.booted_at + _since_boot()

    @property
    def set_by_s(self) -> float:
        """By how much the wall clock has been set since; 0.0 for never."""
        by_s = booted_at() - self.booted_at
        return by_s if abs(by_s) > SET_S else 0.0


def moved(log: FollowedLog, by_s: float) -> FollowedLog:
    """`log` with its times by another clock, which is ahead by so much."""
    if not by_s:
        return log

    def at(time_s: float | None) -> float | None:
        return None if time_s is None else time_s + by_s

    def found(one: Finding) -> Finding:
        return dataclasses.replace(one, at=one.at + by_s)

    def worker(one: Worker) -> Worker:
        return dataclasses.replace(one, step_at=at(one.step_at), died_at=at(one.died_at))

    def opened(one: OpenFinding) -> OpenFinding:
        return dataclasses.replace(one, finding=found(one.finding))

    summary: LogSummary = dataclasses.replace(
        log.summary, phase_at=at(log.summary.phase_at), step_at=at(log.summary.step_at),
        workers=[worker(one) for one in log.summary.workers], findings=[found(one) for one in log.summary.findings],
        tail=[found(one) for one in log.summary.tail], open_findings=[opened(one) for one in log.summary.open_findings],
        scan=dataclasses.replace(log.summary.scan, advance_at=at(log.summary.scan.advance_at)),
    )  # fmt: skip
    foreign = log.foreign
    if foreign is not None and log.grew_at is not None:
        foreign = dataclasses.replace(foreign, modified_at=log.grew_at + by_s)
    return FollowedLog(summary=summary, foreign=foreign, grew_at=at(log.grew_at))
