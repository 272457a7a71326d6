"""How `top` looks: the columns that fit, a row a run or target, and what is known of the one that is selected.

What is old is said in the past tense, and greyed: `was RUNNING`, with how long ago. Pure: texts of `rich`, for whatever
screen shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rich.text import Text

from orchestrator.health import age
from orchestrator.record import record
from orchestrator.render.status import why
from orchestrator.render.text import colour, count, number, one_line, workers
from orchestrator.resolve import Run
from orchestrator.series import bins
from orchestrator.verbs.top import Sighting
from orchestrator.verbs.trend import Points, Trends

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.,-~=*#"
LEAST_RANGE = 0.05
"""A figure that moves by less than this share of itself is drawn flat: its noise is no news."""

BOUNDS_S = (5, 10, 20, 30, 60)

Sort = Literal["state", "newest", "tok/s", "loss", "target", "last step"]
SORTS: tuple[Sort, ...] = ("state", "newest", "tok/s", "loss", "target", "last step")


@record
class Row:
    """A line of the list: a run, or (`run` is None) a target."""

    sighting: Sighting
    run: Run | None

    @property
    def key(self) -> str:
        return f"target {self.sighting.target.name}" if self.run is None else self.run.probe.nonce or self.run.run_id

    @property
    def fresh(self) -> bool:
        return self.sighting.fresh

    @property
    def state(self) -> str:
        """Of what is old, what it was."""
        if self.run is None:
            if self.sighting.error is not None:
                return "UNREACHABLE"
            return "answers" if self.fresh else "silent" if self.sighting.age_s is not None else "asked"
        return self.run.verdict.state if self.fresh else f"was {self.run.verdict.state}"

    @property
    def style(self) -> str:
        if self.run is None:
            return colour("UNREACHABLE") if self.sighting.error is not None else "dim"
        return colour(self.run.verdict.state) if self.fresh else "dim"

    @property
    def seen(self) -> str:
        """How old it is; of what is fresh a bound, so that a list that says nothing new need not be drawn again."""
        age_s = self.sighting.age_s
        if age_s is None:
            return "never"
        return next((f"<{bound} s" for bound in BOUNDS_S if self.fresh and age_s < bound), age(age_s))

    @property
    def old(self) -> str:
        """`not seen for 12 s: no answer for 10 s`; empty for what is fresh."""
        if self.fresh:
            return ""
        since = "not seen yet" if self.sighting.age_s is None else f"not seen for {age(self.sighting.age_s)}"
        return f"{since}: {self.sighting.why}" if self.sighting.why else since


def rows(sightings: Sequence[Sighting], *, sort: Sort = "state", wanted: str = "") -> list[Row]:
    """The runs in the order that was chosen, then the targets; of those that have all words of `wanted` in them."""
    runs = [Row(sighting=one, run=run) for one in sightings for run in one.runs]
    runs.sort(key=_order(sort))
    found = [*runs, *(Row(sighting=one, run=None) for one in sightings)]
    words = wanted.lower().split()
    return [row for row in found if all(word in _text(row).lower() for word in words)]


def _order(sort: Sort) -> Callable[[Row], tuple[float | str, ...]]:
    def key(row: Row) -> tuple[float | str, ...]:
        assert row.run is not None
        verdict, newest = row.run.verdict, -row.run.probe.created_at
        last: float | str = newest
        if sort == "state":
            return float(not verdict.live), newest
        if sort == "tok/s":
            last = -(verdict.tok_s or 0.0)
        elif sort == "loss":
            last = float("inf") if verdict.loss is None else verdict.loss
        elif sort == "target":
            last = row.run.target.name
        elif sort == "last step":
            last = -(verdict.last_progress_at or 0.0)
        return last, newest

    return key


def _text(row: Row) -> str:
    """What a filter looks at."""
    said = [row.sighting.target.name, row.state]
    if row.run is not None:
        said += [row.run.run_id, row.run.probe.note, row.run.probe.owner]
    return " ".join(said)


def summary(sightings: Sequence[Sighting], *, every_s: float, sort: Sort, wanted: str) -> Text:
    """The first line: how much there is, and how much of it is not known."""
    runs = [(one.fresh, run.verdict.live) for one in sightings for run in one.runs]
    silent = sum(not one.fresh for one in sightings)
    old = sum(not fresh for fresh, _ in runs)
    said = f"{count(sum(fresh and live for fresh, live in runs), 'run')} live"
    said += f", {sum(fresh and not live for fresh, live in runs)} ended"
    line = Text.assemble(("specctl top", "bold"), f"  {said}")
    line.append(f", {old} not known" if old else "", style="bold magenta")
    line.append(f" · {count(len(sightings), 'target')}")
    line.append(f", {silent} silent" if silent else "", style="bold magenta")
    line.append(f" · by {sort}" if sort != SORTS[0] else "")
    line.append(f" · only {wanted!r}" if wanted.strip() else "")
    line.append(f" · every {every_s:g} s", style="dim")
    return line


# --- the list -------------------------------------------------------------------------------------------------------


@record
class Column:
    """`>name` is aligned to the right. Those of the lowest `rank` stay longest when there is little room."""

    name: str
    width: int
    rank: int


COLUMNS = (
    Column(name="state", width=0, rank=0), Column(name="run", width=0, rank=0), Column(name="target", width=0, rank=3),
    Column(name=">step", width=8, rank=2), Column(name=">tok/s", width=9, rank=4),
    Column(name="~tok_s", width=10, rank=6), Column(name=">loss", width=7, rank=5),
    Column(name="~loss", width=10, rank=7), Column(name=">last step", width=9, rank=9),
    Column(name=">workers", width=7, rank=8), Column(name=">seen", width=6, rank=1),
)  # fmt: skip
LEAST_RUN, MOST_RUN, LEAST_WHY, GAP = 14, 40, 20, 1
WHOLE = 5
"""The names of runs are shown whole before columns of a higher rank than this are shown at all."""


def columns(width: int, found: Sequence[Row]) -> list[Column]:
    """Those that fit; what room is left then is the reason's."""
    longest = min(MOST_RUN, max((len(row.run.run_id) for row in found if row.run is not None), default=LEAST_RUN))
    widths = {
        "state": max((len(row.state) for row in found), default=8), "run": LEAST_RUN,
        "target": min(16, max([6, *(len(row.sighting.target.name) for row in found)])),
    }  # fmt: skip
    sized = {one.name: Column(name=one.name, width=widths.get(one.name, one.width), rank=one.rank) for one in COLUMNS}
    room, chosen, whole = width, set(), False
    for one in sorted(sized.values(), key=lambda one: one.rank):
        if one.rank > WHOLE and not whole:
            whole = True
            run = min(longest, LEAST_RUN + max(0, room))
            room -= run - LEAST_RUN
            sized["run"] = Column(name="run", width=run, rank=0)
        if one.width + GAP > room and one.rank > 1:
            break
        room -= one.width + GAP
        chosen.add(one.name)
    if not whole and room > 0:
        sized["run"] = Column(name="run", width=min(longest, LEAST_RUN + room), rank=0)
    result = [one for name, one in sized.items() if name in chosen]
    return [*result, Column(name="why / note", width=room - GAP, rank=99)] if room > LEAST_WHY else result


def head(chosen: Sequence[Column]) -> Text:
    names = {"~tok_s": "", "~loss": ""}
    line = Text(style="bold")
    for one in chosen:
        name = names.get(one.name, one.name)
        line.append(_fit(name.lstrip(">"), one.width, right=name.startswith(">")) + " " * GAP)
    return line


def cells(row: Row, chosen: Sequence[Column], trends: Trends, bars: str) -> list[tuple[str, str]]:
    """(text, style) for each column, as wide as it is."""
    return [(_fit(text, one.width, right=one.name.startswith(">"), name=one.name), style)
            for one in chosen for text, style in [_cell(row, one, trends, bars)]]  # fmt: skip


def _cell(row: Row, column: Column, trends: Trends, bars: str) -> tuple[str, str]:
    run, dim = row.run, "" if row.fresh else "dim"
    name = column.name
    if name == "state":
        return row.state, row.style
    if name == ">seen":
        return row.seen, dim
    if name == "target":
        return row.sighting.target.name, dim
    if run is None:
        return (_place(row) if name == "run" else row.old or _gpus(row) if name == "why / note" else ""), "dim"
    verdict = run.verdict
    if name == "run":
        return run.run_id, dim
    if name in ("~tok_s", "~loss"):
        return spark(_recent(trends.of(run, name[1:])), column.width, bars), dim or "cyan"
    if name == "why / note":
        words = " · ".join(filter(None, (row.old, why(run), run.probe.note)))
        return one_line(words), dim
    since = None if verdict.last_progress_at is None else verdict.observed_at - verdict.last_progress_at
    if since is not None and not row.fresh:
        since += row.sighting.age_s or 0.0
    return {
        ">step": "-" if verdict.step is None else f"{verdict.step:,}", ">tok/s": number(verdict.tok_s),
        ">loss": number(verdict.loss, 4), ">last step": "-" if since is None else age(since),
        ">workers": workers(verdict) if row.fresh else "-",
    }[name], dim  # fmt: skip


def _place(row: Row) -> str:
    live = sum(run.verdict.live for run in row.sighting.runs)
    if row.sighting.view is None:
        return "(target)"
    if not row.fresh:
        return f"({count(live, 'run')} lived)" if live else "(target)"
    return f"({count(live, 'run')} live)" if live else "(idle)"


def _gpus(row: Row) -> str:
    view = row.sighting.view
    if view is None:
        return ""
    if view.gpus_error:
        return view.gpus_error
    if view.no_workdir:
        return f"no runs there, nor its workdir {view.target.workdir}"
    parts = []
    for gpu in view.gpus:
        use = gpu["utilization_percent"]
        parts.append(f"{gpu['index']}: {'-' if use is None else use} %")
    return f"GPU {', '.join(parts)}" if parts else ""


def _fit(text: str, width: int, *, right: bool = False, name: str = "") -> str:
    """`text` in exactly `width` columns. Of a run's id the end stays, which tells it from the others."""
    text = one_line(text)
    if len(text) > width:
        text = f"…{text[len(text) - width + 1 :]}" if name == "run" and width > 1 else f"{text[: max(0, width - 1)]}…"
        text = text[:width]
    return text.rjust(width) if right else text.ljust(width)


# --- curves ---------------------------------------------------------------------------------------------------------


def spark(points: Points, width: int, bars: str = BARS) -> str:
    """One character a bin, blank where nothing was written down."""
    values = bins(points, width)
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    least = LEAST_RANGE * max(abs(low), abs(high))
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    top = len(bars) - 1
    return "".join(
        " " if value is None else bars[round((value - low) / (high - low) * top) if high > low else top // 2]
        for value in values
    )


def _recent(points: Points) -> Points:
    """Those of the later half of the steps: a list has no room for how it began."""
    if not points:
        return points
    half = (points[0][0] + points[-1][0]) / 2
    return [point for point in points if point[0] >= half]
