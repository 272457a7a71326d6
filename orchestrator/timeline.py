"""What the run and each of its workers did when, as far as records of its own say so. Pure.

A part of a lane is only there where a record stands behind it: an event that says what began, or rows of figures that
somebody wrote meanwhile. Everything else stays empty, since nothing was seen.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from orchestrator.logscan.pace import BUSY_PHASE, COMPILE_PHASE
from orchestrator.model import Probe, Verdict
from orchestrator.record import record
from orchestrator.series import Row, Series, gaps

SHARES = ("busy", "wait_input", "wait_room", "wait_peers")
"""What a worker of the trainer's did with its time between two rows, as shares of it."""
NO_DEATH = ("done", "aborted")
"""How a trainer's worker goes down that has no more to do, or was told to stop."""
Kind = Literal[
    "queued", "start", "warm-up", "train", "save", "stop", "phase", "up", "step", "shares", "stalled", "dead", "done",
]  # fmt: skip


@record
class Event:
    """One line of events.jsonl."""

    at: float
    event: str
    fields: dict[str, Any]


@record
class Part:
    """What was done from `since` to `until`. `shares` are `SHARES`, of the kind `shares`."""

    since: float
    until: float
    kind: Kind
    text: str
    shares: list[float] = field(default_factory=list)


@record
class Mark:
    """Something that happened at a moment."""

    at: float
    kind: Literal["exception", "checkpoint", "notice"]
    text: str


@record
class Lane:
    """`name` None: the run as a whole."""

    name: str | None
    parts: list[Part]
    marks: list[Mark]


@record
class Timeline:
    """Times are by the container's clock. `until`: the last moment of which anything was seen."""

    since: float
    until: float
    lanes: list[Lane]


def timeline(events: Sequence[Event], series: Sequence[Series], probe: Probe, verdict: Verdict, *, whole: bool,
             unread: tuple[float, float] | None = None) -> Timeline:  # fmt: skip
    """`series`: of the run and of its workers, those of `SHARES` among them. `whole`: they were not read in parts.
    `unread`: from when to when there were events that are none of `events`."""
    events = sorted(events, key=lambda one: one.at)
    seen = [one.at for one in events] + [row.until for one in series for row in one.rows]
    since = min([probe.created_at, *seen])
    until = max([probe.created_at, *seen])
    if probe.exit is not None:
        until = max(until, probe.exit.at)
    elif verdict.live:
        until = max(until, probe.observed_at)
    names = {worker.name for worker in verdict.workers} | {one.worker for one in series if one.worker is not None}
    names |= {str(one.fields["worker"]) for one in events if one.event == "worker_up" and one.fields.get("worker")}
    lanes = [_run(events, series, until, names)]
    for name in sorted(names, key=_natural):
        own = [one for one in events if str(one.fields.get("worker")) == name]
        lanes.append(_worker(name, own, [one for one in series if one.worker == name], until, whole=whole))
    if unread is not None:
        lanes = [dataclasses.replace(one, parts=[_told(part, unread) for part in one.parts]) for one in lanes]
    return Timeline(since=since, until=until, lanes=lanes)


def _told(part: Part, unread: tuple[float, float]) -> Part:
    """The part as far as its events tell: what began before the unread ones may have ended among them."""
    if part.kind in ("shares", "step") or part.since > unread[0] or part.until <= unread[0]:
        return part
    return dataclasses.replace(part, until=unread[0])


def _natural(name: str) -> list[tuple[int, str]]:
    """drafter-2 before drafter-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", name)]


# --- the run --------------------------------------------------------------------------------------------------------


def _run(events: Sequence[Event], series: Sequence[Series], until: float, names: set[str]) -> Lane:
    phases = [(one.at, str(one.fields.get("phase"))) for one in events if one.event == "phase"]
    parts = []
    started = next((one.at for one in events if one.event == "started"), None)
    rows = _rows([one for one in series if one.worker is None] or series)
    ends = [one.at for one in events if one.event in ("ended", "program_ended")]
    for number, one in enumerate(events):
        if one.event == "queued":
            over = next((later.at for later in events[number:] if later.event in ("dequeued", "ended")), until)
            parts.append(Part(since=one.at, until=over, kind="queued", text=f"in line: {one.fields.get('behind')}"))
    before = min([at for at, _ in phases[:1]] + [row.at for row in rows[:1]], default=None)
    if started is not None and before is None:
        said = "it ran; neither a phase nor a step was written down"
        parts.append(Part(since=started, until=min(ends, default=until), kind="phase", text=said))
    elif started is not None and before is not None and before > started:
        parts.append(Part(since=started, until=before, kind="start", text="started; nothing was said yet"))
    for number, (at, phase) in enumerate(phases):
        later = [one for one, _ in phases[number + 1 : number + 2]]
        following = min(later + [end for end in ends if end >= at], default=until)
        parts.append(Part(since=at, until=following, kind=_kind(phase), text=f"phase {phase}"))
    if not any(part.kind == "train" for part in parts):
        parts += _steps(rows)
    parts += _stalls(events, until)
    marks = [mark for one in events if (mark := _mark(one, names)) is not None]
    return Lane(name=None, parts=parts, marks=marks)


PHASES: dict[str, Kind] = {
    "train": "train", "stopping": "stop", "import": "start", "data": "start", "load_target": "start",
}  # fmt: skip


def _kind(phase: str) -> Kind:
    if COMPILE_PHASE.search(phase):
        return "warm-up"
    if BUSY_PHASE.search(phase):
        return "save"
    return PHASES.get(phase, "phase")


def _stalls(events: Sequence[Event], until: float) -> list[Part]:
    parts = []
    for number, one in enumerate(events):
        if one.event == "stalled":
            over = next((later.at for later in events[number:] if later.event in ("stall_over", "ended")), until)
            silent_s = _number(one.fields.get("silent_s"))
            step = one.fields.get("step")
            text = f"stalled: no step since step {step}" if step is not None else "stalled: no step"
            parts.append(Part(since=one.at - silent_s, until=over, kind="stalled", text=text))
    return parts


def _mark(one: Event, names: set[str]) -> Mark | None:
    """What of the run happened at a moment; an exception of a worker with a lane of its own is there."""
    said = one.fields
    if one.event == "exception":
        return None if str(said.get("worker")) in names else Mark(at=one.at, kind="exception", text=exception(one))
    if one.event == "checkpoint":
        return Mark(at=one.at, kind="checkpoint", text=f"checkpoint of step {said.get('step')}")
    words = {
        "degraded": f"goes on without {said.get('lost')}", "resume": f"went on from step {said.get('step')}",
        "nonfinite": f"a loss or gradient was not finite ({said.get('action')})",
        "decay": "tok/s has fallen", "decay_over": "tok/s is as it was before", "no_progress": said.get("message"),
    }  # fmt: skip
    if one.event in words:
        return Mark(at=one.at, kind="notice", text=str(words[one.event]).partition("\n")[0])
    return None


def exception(one: Event) -> str:
    """`RuntimeError: boom`."""
    first = str(one.fields.get("message") or "").partition("\n")[0]
    kind = str(one.fields.get("type") or "an exception")
    return f"{kind}: {first}" if first else kind


# --- a worker -------------------------------------------------------------------------------------------------------


def _worker(name: str, events: Sequence[Event], series: Sequence[Series], until: float, *, whole: bool) -> Lane:
    ups = [one.at for one in events if one.event == "worker_up"]
    busy = {one.metric: one for one in series if one.metric in SHARES}
    rows = _rows(series)
    parts: list[Part] = []
    if rows and ups and ups[0] < rows[0].at:
        parts.append(Part(since=ups[0], until=rows[0].at, kind="up", text="up, no step yet"))
    elif ups and not rows:
        first_down = next((one.at for one in events if one.event == "worker_down" and one.at >= ups[0]), until)
        parts.append(Part(since=ups[0], until=first_down, kind="up", text="up; no step was written down"))
    if set(busy) == set(SHARES):
        parts = [*(_shares(busy, ups, whole=whole))] or parts
    else:
        parts += _steps(rows)
    parts += _ends(events, rows, until)
    marks = [Mark(at=one.at, kind="exception", text=exception(one)) for one in events if one.event == "exception"]
    return Lane(name=name, parts=parts, marks=marks)


def _shares(series: dict[str, Series], ups: list[float], *, whole: bool) -> list[Part]:
    """A row tells of the time since the one before it; the first of that since the worker was up."""
    rows = {name: {row.number: row for row in one.rows} for name, one in series.items()}
    numbers = sorted(set.intersection(*(set(one) for one in rows.values())))
    first = rows[SHARES[0]]
    apart = set() if whole else gaps([first[number].at for number in numbers])
    parts, before = [], ups[0] if ups else None
    for place, number in enumerate(numbers):
        row = first[number]
        since = row.at if before is None or place in apart else before
        means = [rows[name][number].sums.mean or 0.0 for name in SHARES]
        low = number * series[SHARES[0]].width
        last = low + series[SHARES[0]].width - 1
        steps = f"step {low}" if low == last else f"steps {max(low, 1)} to {last}"
        if row.until > since:
            parts.append(Part(since=since, until=row.until, kind="shares", text=steps, shares=means))
        before = row.until
    return parts


def _steps(rows: Sequence[Row]) -> list[Part]:
    """Where rows come so closely that it stepped all the time."""
    apart = gaps([row.at for row in rows])
    groups: list[list[Row]] = []
    for number, row in enumerate(rows):
        if number == 0 or number in apart:
            groups.append([])
        groups[-1].append(row)
    return [
        Part(since=group[0].at, until=max(row.until for row in group), kind="step",
             text=f"stepping: {sum(row.sums.count for row in group):,} steps written down")
        for group in groups
    ]  # fmt: skip


def _ends(events: Sequence[Event], rows: Sequence[Row], until: float) -> list[Part]:
    """From where it went down to where it was up again, stepped again, or nothing more is known."""
    parts: list[Part] = []
    stepped = rows[-1].until if rows else 0.0
    for number, one in enumerate(events):
        if one.event != "worker_down" or (parts and parts[-1].until > one.at):
            continue
        again = next((later.at for later in events[number:] if later.event == "worker_up"), None)
        if again is None and stepped > one.at:
            again = next(row.at for row in rows if row.until > one.at)
        reason = one.fields.get("reason")
        if reason in NO_DEATH:
            said = "done" if reason == "done" else "was told to stop"
            parts.append(Part(since=one.at, until=again or until, kind="done", text=said))
            continue
        last = next((exception(earlier) for earlier in reversed(events[: number + 1])
                     if earlier.event == "exception"), None)  # fmt: skip
        parts.append(Part(since=one.at, until=again or until, kind="dead", text=f"dead: {last}" if last else "dead"))
    return parts


def _rows(series: Sequence[Series]) -> list[Row]:
    """Of the figure that was written down most often."""
    return max((one.rows for one in series), key=len, default=[])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
