"""`plot`: figures of one or several runs over their steps, ready to be drawn one over the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from orchestrator import health
from orchestrator.crew import Crew
from orchestrator.errors import NotFound
from orchestrator.fleet import Fleet
from orchestrator.model import Probe, Verdict
from orchestrator.remote import QUICK_S, understood
from orchestrator.resolve import Run, resolve
from orchestrator.series import Series, gaps
from orchestrator.verbs.logs import refuse_damaged

By = Literal["step", "time"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The series of one run."""

    target: str
    probe: Probe
    verdict: Verdict
    series: list[Series]
    there: list[str]
    """The names of all figures that the run has written down."""
    whole: bool
    """False: metrics.jsonl is so long that it was read in parts."""
    notes: list[str]

    @property
    def run_id(self) -> str:
        return self.probe.run_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a plot: None, None is a gap. `x` is a step, or seconds since the launch."""

    run_id: str
    worker: str | None
    """None: of the run itself."""
    x: list[float | None]
    y: list[float | None]
    spread: list[float | None]

    @property
    def label(self) -> str:
        return self.run_id if self.worker is None else f"{self.run_id} {self.worker}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    runs: list[Drawn]
    metrics: list[str]
    by: By
    absent: list[str] = field(default_factory=list)
    """What was asked for, and no run has written down."""

    @property
    def there(self) -> list[str]:
        """Every figure that any of the runs has written down."""
        return sorted({name for run in self.runs for name in run.there})

    def lines(self, metric: str) -> list[Line]:
        """Of one figure, run by run, the run's own before its workers'."""
        found = []
        for run in self.runs:
            for one in run.series:
                if one.metric == metric:
                    found.append(line(one, run.run_id, since=run.probe.created_at, by=self.by))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    probe: Probe
    series: list[Series]
    there: list[str]
    whole: bool


def run(fleet: Fleet, queries: Sequence[str | None], metrics: Sequence[str], *, workers: bool, by: By) -> Result:
    """Raises as `resolve` does; `NotFound` where no run has any of the figures."""
    crew = Crew(8)
    asked = [crew.do(partial(_one, fleet, query, list(metrics), workers)) for query in queries or [None]]
    runs = list({one.run_id: one for each in asked for one in [each.result()]}.values())
    found = [metric for metric in metrics if any(one.metric == metric for run in runs for one in run.series)]
    if not found:
        there = sorted({name for run in runs for name in run.there})
        which = ", ".join(run.run_id for run in runs)
        raise NotFound(
            f"no {' or '.join(metrics)} was written down by {which}",
            hint=f"there is: {', '.join(there)}" if there else "a run has figures from its first step on",
        )
    return Result(runs=runs, metrics=found, by=by, absent=[metric for metric in metrics if metric not in found])


def _one(fleet: Fleet, query: str | None, metrics: list[str], workers: bool) -> Drawn:
    resolved = resolve(fleet, query)
    refuse_damaged(resolved.run)
    return of_run(fleet, resolved.run, metrics, workers=workers, notes=resolved.notes)


def of_run(fleet: Fleet, run: Run, metrics: list[str], *, workers: bool, rows: int | None = None,
           deadline_s: float = QUICK_S, notes: Sequence[str] = ()) -> Drawn:  # fmt: skip
    """`rows`: how many a series may have at most, if not as many as are usual."""
    target = run.target
    frame = fleet.agent(target).call(
        "curves", deadline_s=deadline_s, run_id=run.run_id, metrics=metrics, workers=workers, rows=rows
    )
    answer = understood(_Answer, frame, target)
    return Drawn(
        target=target.name, probe=answer.probe, verdict=health.judge(answer.probe), series=answer.series,
        there=answer.there, whole=answer.whole, notes=list(notes),
    )  # fmt: skip


def line(series: Series, run_id: str, *, since: float, by: By) -> Line:
    """`since` is the time from which on times are counted."""
    x: list[float | None] = []
    y: list[float | None] = []
    spread: list[float | None] = []
    places = [float(series.step(row)) if by == "step" else row.at - since for row in series.rows]
    apart = gaps(places)
    for number, (place, row) in enumerate(zip(places, series.rows, strict=True)):
        if number in apart:
            x, y, spread = [*x, None], [*y, None], [*spread, None]
        x.append(place)
        y.append(row.sums.mean)
        spread.append(row.sums.spread)
    return Line(run_id=run_id, worker=series.worker, x=x, y=y, spread=spread)
