"""`errors`: the exceptions of many runs, each once: in which runs and workers it came, and what ended with it.

A run may fail without any: by an exit code or a signal, whose reason is at best in the last line that it printed. Those
are told beside them, and are no exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from orchestrator import unexplained
from orchestrator.crew import Crew
from orchestrator.errors import SpecctlError
from orchestrator.fleet import Fleet, TargetView
from orchestrator.logscan import settled
from orchestrator.model import BAD
from orchestrator.resolve import Run
from orchestrator.unexplained import Unexplained
from orchestrator.verbs import log_errors, status
from orchestrator.verbs.log_errors import Judged

AT_ONCE = 8
"""Runs whose logs are searched at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One exception in one run. Times are by this machine's clock."""

    result: log_errors.Result
    judged: Judged
    first_at: float
    last_at: float


@dataclass(kw_only=True, slots=True)
class Kind:
    """One exception, by type and frames, in every run that printed it: those in which it came last come first."""

    seen: list[Seen] = field(default_factory=list)

    @property
    def newest(self) -> log_errors.Group:
        return self.seen[0].judged.group

    @property
    def fingerprint(self) -> str:
        return self.newest.fingerprint

    @property
    def type(self) -> str:
        return self.newest.type

    @property
    def message(self) -> str:
        return self.newest.message

    @property
    def traceback(self) -> str:
        return self.newest.traceback

    @property
    def hint(self) -> str | None:
        return self.newest.hint

    @property
    def count(self) -> int:
        return sum(one.judged.group.count for one in self.seen)

    @property
    def first_at(self) -> float:
        return min(one.first_at for one in self.seen)

    @property
    def last_at(self) -> float:
        return max(one.last_at for one in self.seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A run that ended badly, and no exception says why. The time is by this machine's clock."""

    run: Run
    ending: Unexplained
    at: float


@dataclass(kw_only=True, slots=True)
class Alike:
    """Runs that failed in the same way without an exception, the newest first."""

    failed: list[Failed] = field(default_factory=list)

    @property
    def ending(self) -> Unexplained:
        return self.failed[0].ending


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    kinds: list[Kind]
    alike: list[Alike]
    runs: int
    """How many runs were looked at."""
    refused: list[tuple[Run, SpecctlError]]
    """Runs whose logs could not be searched, and why."""
    silent: list[TargetView]
    older: int
    """Runs that ended longer ago than is looked at."""
    notes: list[str]


def run(fleet: Fleet, words: Sequence[str], *, everything: bool) -> Result:
    """`words` as for `status`. Raises as it does."""
    found = status.run(fleet, list(words), everything=everything)
    crew = Crew(AT_ONCE)
    asked = [(run, crew.do(partial(_search, fleet, run))) for run in found.runs if _may_have_some(run)]
    answers, refused = [], []
    for run, future in asked:
        answer = future.result()
        if isinstance(answer, SpecctlError):
            refused.append((run, answer))
        else:
            answers.append(answer)
    unsearched = {one.run_id for one, _ in refused}
    searched = [one for one in found.runs if one.run_id not in unsearched]
    return Result(
        kinds=kinds_of(answers), alike=alike_of(searched), runs=len(searched), refused=refused,
        silent=found.unreachable, older=found.older, notes=found.notes,
    )  # fmt: skip


def kinds_of(answers: Sequence[log_errors.Result]) -> list[Kind]:
    """The exceptions of all of them, the newest first."""
    kinds: dict[str, Kind] = {}
    for answer in answers:
        for judged in answer.found:
            if log_errors.only_reports(judged, answer.verdict):
                continue
            ahead_s = answer.probe.observed_at - time.time()
            first, last = judged.group.first.at - ahead_s, judged.group.last.at - ahead_s
            seen = Seen(result=answer, judged=judged, first_at=first, last_at=last)
            kinds.setdefault(judged.group.fingerprint, Kind()).seen.append(seen)
    for kind in kinds.values():
        kind.seen.sort(key=lambda one: -one.last_at)
    return sorted(kinds.values(), key=lambda kind: -kind.last_at)


def alike_of(runs: Sequence[Run]) -> list[Alike]:
    """Those of them that failed without an exception, the newest first."""
    found: dict[tuple[str, str], Alike] = {}
    for run in runs:
        probe, verdict = run.probe, run.verdict
        if verdict.live or verdict.state not in BAD or verdict.error is not None:
            continue
        ending = unexplained.of(probe, verdict)
        end = probe.exit or probe.program_exit
        at = (end.at if end else probe.observed_at) - (probe.observed_at - time.time())
        one = Failed(run=run, ending=ending, at=at)
        found.setdefault((ending.kind, ending.line), Alike()).failed.append(one)
    for alike in found.values():
        alike.failed.sort(key=lambda one: -one.at)
    return sorted(found.values(), key=lambda alike: -alike.failed[0].at)


def _may_have_some(run: Run) -> bool:
    """Whether its supervisor has seen any, or did not come to look at all of its logs."""
    return settled(run.probe.summary).findings_total > 0 or run.probe.unread_bytes > 0 or not run.probe.log.verified


def _search(fleet: Fleet, run: Run) -> log_errors.Result | SpecctlError:
    try:
        return log_errors.of_run(fleet, run)
    except SpecctlError as error:
        return error
