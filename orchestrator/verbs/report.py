"""`report`: all that the other verbs read of one or several runs, gathered for one page.

A part that could not be read is an error in its place: the page says so there, and shows the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from orchestrator.crew import Crew
from orchestrator.errors import NoAnswer, SpecctlError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.remote import understood
from orchestrator.resolve import Run, resolve
from orchestrator.timeline import SHARES, Event, Timeline, timeline
from orchestrator.verbs import compare, errors, log_errors, plot, show
from orchestrator.verbs.logs import IDLE_S, refuse_damaged

T = TypeVar("T")

METRICS = ("loss", "tok_s", "lr", "grad_norm", "mfu")
"""Figures that are shown if nobody asks for others."""
ROWS = 1024
"""Of a series, however many steps there were: each row keeps the smallest and the largest figure of its steps."""
CURVES_S = 120.0
"""How long the reading of 64 MiB of them may take on a busy machine."""
OLDEST, NEWEST = 1000, 4000
"""Events from the beginning and from the end of a run that are kept."""
AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """One run."""

    run: Run
    shown: show.Result | SpecctlError
    drawn: plot.Drawn | SpecctlError
    timeline: Timeline | SpecctlError
    events_left_out: int
    searched: log_errors.Result | SpecctlError
    made: compare.One | SpecctlError
    """What it was made of, to be compared."""

    @property
    def unknown(self) -> list[SpecctlError]:
        """Why parts of it could not be read, each reason once."""
        parts = (self.shown, self.drawn, self.timeline, self.searched, self.made)
        return list({str(one): one for one in parts if isinstance(one, SpecctlError)}.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """What changed from the first run to another one."""

    a: Page
    b: Page
    result: compare.Result | SpecctlError


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    pages: list[Page]
    unseen: list[tuple[str, SpecctlError]]
    """Runs that could not be looked at, as they were asked for, and why."""
    metrics: list[str]
    pairs: list[Pair]
    kinds: list[errors.Kind]
    """The exceptions of all runs whose logs were searched."""
    notes: list[str]

    @property
    def exit_code(self) -> int:
        unknown = self.unseen or any(page.unknown or page.run.verdict.state == "UNREACHABLE" for page in self.pages)
        return UnreachableError.exit_code if unknown else 0


def run(fleet: Fleet, queries: Sequence[str | None], metrics: Sequence[str]) -> Result:
    """Raises `NotFound` and `Ambiguous` as `resolve` does, and `UnreachableError` where not one run could be seen."""
    crew = Crew(AT_ONCE)
    asked = [(query, crew.do(partial(resolve, fleet, query))) for query in queries or [None]]
    found: dict[str, Run] = {}
    unseen: list[tuple[str, SpecctlError]] = []
    notes: list[str] = []
    for query, future in asked:
        try:
            resolved = future.result()
        except UnreachableError as error:
            unseen.append((query or "your only live run", error))
            continue
        found[resolved.run.run_id] = resolved.run
        notes += resolved.notes
    if not found:
        raise unseen[0][1]
    pages = [one.result() for one in [crew.do(partial(_page, fleet, run, metrics)) for run in found.values()]]
    drawn = [page.drawn for page in pages if isinstance(page.drawn, plot.Drawn)]
    there = {name for one in drawn for name in one.there}
    if absent := [name for name in metrics if name not in there and name not in METRICS]:
        notes.append(f"no {' or '.join(absent)} was written down; there is: {', '.join(sorted(there - {*SHARES}))}")
    first, *others = pages
    pairs = [crew.do(partial(_pair, fleet, first, page)) for page in others]
    return Result(
        pages=pages, unseen=unseen, metrics=list(metrics), pairs=[one.result() for one in pairs],
        kinds=errors.kinds_of([page.searched for page in pages if isinstance(page.searched, log_errors.Result)]),
        notes=notes,
    )  # fmt: skip


def _page(fleet: Fleet, run: Run, metrics: Sequence[str]) -> Page:
    wanted = [*dict.fromkeys([*metrics, *SHARES])]
    drawn = _try(lambda: _curves(fleet, run, wanted))
    events = _try(lambda: _events(fleet, run))
    searched = _try(lambda: log_errors.of_run(fleet, run))
    left_out = 0
    lanes: Timeline | SpecctlError
    if isinstance(events, SpecctlError):
        lanes = events
    elif isinstance(drawn, SpecctlError):
        lanes = drawn
    else:
        oldest, newest, left_out = events
        unread = (oldest[-1].at, newest[0].at) if left_out else None
        lanes = timeline(
            [*oldest, *newest], drawn.series, drawn.probe, drawn.verdict, whole=drawn.whole, unread=unread
        )  # fmt: skip
    shown = _try(lambda: show.of_run(fleet, run, events=0, diff=True))
    return Page(
        run=shown.run if isinstance(shown, show.Result) else run, shown=shown, drawn=drawn, timeline=lanes,
        events_left_out=left_out, searched=searched,
        made=searched if isinstance(searched, SpecctlError) else _try(lambda: compare.gathered(fleet, searched)),
    )  # fmt: skip


def _curves(fleet: Fleet, run: Run, metrics: list[str]) -> plot.Drawn:
    refuse_damaged(run)
    return plot.of_run(fleet, run, metrics, workers=True, rows=ROWS, deadline_s=CURVES_S)


def _pair(fleet: Fleet, a: Page, b: Page) -> Pair:
    for page in (a, b):
        if isinstance(page.made, SpecctlError):
            return Pair(a=a, b=b, result=page.made)
    assert isinstance(a.made, compare.One) and isinstance(b.made, compare.One)
    one, other = a.made, b.made
    return Pair(a=a, b=b, result=_try(lambda: compare.between(fleet, one, other)))


def _try(read: Callable[[], T]) -> T | SpecctlError:
    try:
        return read()
    except SpecctlError as error:
        return error


def _events(fleet: Fleet, run: Run) -> tuple[list[Event], list[Event], int]:
    """(the oldest events of the run, the newest, how many between them were left out)."""
    refuse_damaged(run)
    oldest: list[Event] = []
    newest: deque[Event] = deque(maxlen=NEWEST)
    total = 0
    with fleet.agent(run.target).stream(
        "events", deadline_s=None, idle_s=IDLE_S, run_id=run.run_id, start=0, follow=False
    ) as frames:
        for frame in frames:
            if frame.get("final"):
                return oldest, list(newest), total - len(oldest) - len(newest)
            if "event" in frame:
                one = understood(Event, {key: frame[key] for key in ("at", "event", "fields")}, run.target)
                oldest.append(one) if len(oldest) < OLDEST else newest.append(one)
                total += 1
    raise NoAnswer("the agent ended without its last word", target=run.target.name, run_id=run.run_id)
