"""`logs --errors`: every exception in one run's logs, grouped, and what came of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator import health
from orchestrator.errors import NoAnswer
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.logscan.launchers import is_report
from orchestrator.model import Probe, Verdict
from orchestrator.remote import understood
from orchestrator.resolve import Run, resolve
from orchestrator.verbs.logs import IDLE_S, Since, refuse_damaged, theirs


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an exception stands in a log, and when it had been written."""

    log: str
    offset: int
    at: float
    exact: bool
    """The supervisor saw it then; else the time of the next mark, by which it had been written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One exception, however often it came. `traceback` is the first one's."""

    type: str
    message: str
    traceback: str
    fingerprint: str
    count: int
    first: Place
    last: Place
    workers: dict[str, int] = field(default_factory=dict)
    down: list[str] = field(default_factory=list)
    """The workers that ended with it, by what the log says."""
    followed: bool = False
    """A step came after the last of them."""
    hint: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A group, and whether it is the run's failure, a worker's, or only something that was printed."""

    group: Group
    ended: Literal["run", "worker"] | None
    """`run`, `worker`, or None: it ended nothing that is known."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    target: Target
    probe: Probe
    verdict: Verdict
    notes: list[str]
    since: Since | None
    found: list[Judged]
    left_out: int
    """How many more there are, beyond so many different ones."""
    searched_bytes: int
    gone: int
    """How many files that held lines of the run are nowhere any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    probe: Probe
    groups: list[Group]
    left_out: int
    bytes: int
    gone: int


def run(fleet: Fleet, run: str | None, *, attempt: int | None = None, since_at: float | None = None) -> Result:
    """Of the one run that is meant. Raises as `resolve` and `of_run` do."""
    asked_at = time.time()
    found = resolve(fleet, run)
    since_at = theirs(since_at, found.run.probe, asked_at, time.time())
    return of_run(fleet, found.run, attempt=attempt, since_at=since_at, notes=found.notes)


def of_run(fleet: Fleet, run: Run, *, attempt: int | None = None, since_at: float | None = None,
           notes: Sequence[str] = ()) -> Result:  # fmt: skip
    """`since_at` is by the clock of its target. Raises `IdentityError` for logs that cannot be shown to be its own."""
    refuse_damaged(run)
    since, final = None, None
    with fleet.agent(run.target).stream(
        "errors", deadline_s=None, idle_s=4 * IDLE_S, run_id=run.run_id, attempt=attempt, since_at=since_at,
    ) as frames:  # fmt: skip
        for frame in frames:
            if "since" in frame:
                since = understood(Since, frame["since"], run.target)
            final = frame if frame.get("final") else None
    if final is None:
        raise NoAnswer("the agent ended without its last word", target=run.target.name, run_id=run.run_id)
    answer: _Answer = understood(_Answer, final, run.target)
    verdict = health.judge(answer.probe)
    return Result(
        target=run.target, probe=answer.probe, verdict=verdict, notes=list(notes), since=since,
        found=[judged(group, answer.probe, verdict) for group in answer.groups], left_out=answer.left_out,
        searched_bytes=answer.bytes, gone=answer.gone,
    )  # fmt: skip


def judged(group: Group, probe: Probe, verdict: Verdict) -> Judged:
    """What became of it. An exception in the text is a finding; a failure only if something ended with it."""
    gone = {worker.name for worker in verdict.workers if worker.name in verdict.workers_gone}
    ended = sorted(gone.intersection(group.down))
    blamed = verdict.error is not None and verdict.error.fingerprint == group.fingerprint
    if blamed and not verdict.live and not (ended and _went_on(verdict)):
        return Judged(group=group, ended="run", why=f"the run ended with it: {verdict.state}, {verdict.why}")
    if ended:
        return Judged(group=group, ended="worker", why=f"{', '.join(ended)} ended with it")
    if group.followed or _stepped_since(group, probe):
        if group.down:
            why = f"steps followed it, although the log says that {', '.join(group.down)} ended with it"
            return Judged(group=group, ended=None, why=why)
        return Judged(group=group, ended=None, why="steps followed it: a finding, no failure")
    if is_report(group.type) and not verdict.live:
        return Judged(group=group, ended=None, why=f"it only says that a process of the run has failed: {verdict.why}")
    if verdict.live:
        return Judged(group=group, ended=None, why="nothing has ended with it, and no step has followed it yet")
    return Judged(group=group, ended=None, why=f"no step followed it, but the run did not end with it: {verdict.state}")


def only_reports(one: Judged, verdict: Verdict) -> bool:
    """Whether it is a launcher's report of a failure for which the run has a better reason."""
    return is_report(one.group.type) and one.ended is None and not one.group.followed and not verdict.live


def _went_on(verdict: Verdict) -> bool:
    """Whether the run outlived a worker that had died: others were left, and its end is not that of a failure."""
    return verdict.state != "FAILED" and any(worker.name not in verdict.workers_gone for worker in verdict.workers)


def _stepped_since(group: Group, probe: Probe) -> bool:
    """Whether a step was seen after it, in whichever log."""
    summary: Any = probe.summary
    times = [worker.step_at for worker in summary.workers if worker.name in group.workers] or [summary.step_at]
    return any(at is not None and at > group.last.at for at in times)
