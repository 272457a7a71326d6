"""How loss and tok/s of runs have gone, for whoever looks on: their curves so far, and then what each look adds.

The curves are read once a run, one run of a target at a time, so that what hangs holds up nobody else's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from orchestrator.crew import Crew
from orchestrator.errors import SpecctlError
from orchestrator.fleet import Fleet
from orchestrator.resolve import Run
from orchestrator.verbs import plot

METRICS = ("loss", "tok_s")
POINTS = 1024
"""Of a run that is looked at for longer every other point goes."""
ROWS = 256
AT_ONCE = 4


Points = list[tuple[float, float | None]]


@dataclass(kw_only=True, slots=True)
class Trend:
    """Per metric, (step, figure) in order of the steps; no figure: from there to the next nothing was written down."""

    points: dict[str, Points] = field(default_factory=lambda: {name: [] for name in METRICS})
    asked: bool = False

    def add(self, metric: str, step: float, figure: float) -> None:
        points = self.points[metric]
        while points and points[-1][0] >= step:  # a run may go on from a step that it has been at before
            points.pop()
        points.append((step, figure))
        if len(points) > POINTS:
            del points[1:-1:2]

    def begin(self, metric: str, curve: Points) -> None:
        """Puts what was written down before the first look in front of what was seen since."""
        points = self.points[metric]
        first = points[0][0] if points else float("inf")
        self.points[metric] = [*(point for point in curve if point[0] < first), *points]


class Trends:
    """Those of all runs that have been seen, by nonce."""

    def __init__(self, fleet: Fleet, changed: Callable[[], None]) -> None:
        self._fleet, self._changed = fleet, changed
        self._found: dict[str, Trend] = {}
        self._wanted: dict[str, list[Run]] = {}
        """By target, those whose curves are still to be read; the last one is next."""
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._crew = Crew(AT_ONCE)
        self._ended = False

    def saw(self, run: Run) -> None:
        """Adds what a look has seen; the curve of a run that lives is then read, too."""
        verdict = run.verdict
        with self._lock:
            trend = self._found.setdefault(run.probe.nonce, Trend())
            if verdict.step is not None:
                for metric, figure in (("loss", verdict.loss), ("tok_s", verdict.tok_s)):
                    if figure is not None:
                        trend.add(metric, verdict.step, figure)
        if verdict.live and verdict.step is not None:
            self.want(run)

    def want(self, run: Run) -> None:
        """Has the run's curve read next, unless it has been."""
        with self._lock:
            trend = self._found.setdefault(run.probe.nonce, Trend())
            if trend.asked or self._ended:
                return
            trend.asked = True
            self._wanted.setdefault(run.target.name, []).append(run)
        self._next(run.target.name)

    def of(self, run: Run, metric: str) -> Points:
        with self._lock:
            trend = self._found.get(run.probe.nonce)
            return list(trend.points[metric]) if trend else []

    def stop(self) -> None:
        with self._lock:
            self._ended = True
            self._wanted.clear()

    def _next(self, target: str) -> None:
        with self._lock:
            if target in self._busy or not self._wanted.get(target):
                return
            self._busy.add(target)
            run = self._wanted[target].pop()
        self._crew.do(partial(self._read, run))

    def _read(self, run: Run) -> None:
        try:
            drawn = plot.of_run(self._fleet, run, list(METRICS), workers=False, rows=ROWS)
        except (SpecctlError, EOFError):
            drawn = None  # what the looks see is drawn all the same
        with self._lock:
            self._busy.discard(run.target.name)
            trend = self._found[run.probe.nonce]
            for series in drawn.series if drawn else ():
                trend.begin(series.metric, _points(plot.line(series, "", since=0.0, by="step")))
        self._changed()
        self._next(run.target.name)


def _points(line: plot.Line) -> Points:
    """A gap begins at the point before it."""
    found: Points = []
    for step, figure in zip(line.x, line.y, strict=True):
        found.append((found[-1][0], None) if step is None else (step, figure))
    return found
