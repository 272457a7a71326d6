"""`watch`: what happens to a run, told as it is written down there, to somebody who may not be looking.

Everything comes from the run's own records, each with an id that is the same whenever it is told: its place in
events.jsonl. So nothing is missed while the link is lost or this machine sleeps, and what was told twice can be known.
How far somebody has been told is kept here, and only moves on once telling has worked.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import health, index, whole
from orchestrator.errors import NoAnswer, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.health import age
from orchestrator.inventory import Target
from orchestrator.model import Probe, Verdict
from orchestrator.remote import understood
from orchestrator.resolve import Run, resolve
from orchestrator.timeline import NO_DEATH
from orchestrator.verbs.logs import IDLE_S, refuse_damaged

KINDS = {
    "exception": ("exception",), "worker": ("worker_down",), "stall": ("stalled", "stall_over", "no_progress"),
    "decay": ("decay", "decay_over"), "checkpoint": ("checkpoint",), "phase": ("phase",),
    "queue": ("queued", "dequeued"), "end": (),
}  # fmt: skip
"""What can be told of -> the events that say it. An end is told by the run's state, since not every end is written."""
USUAL = ("queue", "exception", "worker", "stall", "decay", "end")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """One thing that happened. `id` is the same whenever it is told."""

    id: str
    run_id: str
    target: str
    kind: str
    at: float
    """By the container's clock."""
    text: str
    fields: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Bookmark:
    """How far somebody has been told of a run. Without a path it is forgotten with the command."""

    path: Path | None = None
    start: int = 0
    ended: bool = False

    @classmethod
    def of(cls, run_id: str, sink: str, *, again: bool) -> Bookmark:
        """`sink` says who is told, and how: another one has heard nothing yet."""
        name = hashlib.sha256(sink.encode()).hexdigest()[:16]
        mark = cls(path=index.folder() / "watched" / f"{run_id}.{name}.json")
        if not again and mark.path is not None:
            with suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
                known = json.loads(mark.path.read_text())
                mark.start, mark.ended = max(0, int(known["start"])), bool(known["ended"])
        return mark

    def move(self, *, start: int | None = None, ended: bool = False) -> None:
        """Raises `OSError`: who cannot keep it would be told everything again."""
        self.start, self.ended = self.start if start is None else start, self.ended or ended
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole.write_whole(self.path, json.dumps({"start": self.start, "ended": self.ended}).encode())


@dataclass(kw_only=True, slots=True)
class Watched:
    """What was said last of the run, once it is over."""

    run: Run
    notes: list[str]
    told: int = 0
    probe: Probe | None = None
    verdict: Verdict | None = None
    lost_at: float | None = None


def find(fleet: Fleet, query: str | None) -> Watched:
    found = resolve(fleet, query)
    refuse_damaged(found.run)
    return Watched(run=found.run, notes=found.notes)


def run(fleet: Fleet, watched: Watched, mark: Bookmark, *, on: tuple[str, ...], tell: Callable[[News], None],
        say: Callable[[str], None]) -> None:  # fmt: skip
    """Tells of everything of `on` from the bookmark on, until the run has ended. `tell` returns when somebody has been
    told for certain. A lost link is looked for as long as it takes; `say` gets a word about it."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            for news, after in _news(fleet, watched, mark.start):
                if watched.lost_at is not None:
                    say(f"the link is back after {age(time.monotonic() - watched.lost_at)}")
                    watched.lost_at, pause_s = None, FIRST_PAUSE_S
                if news is not None and news.kind in on:
                    tell(news)
                    watched.told += 1
                if after is not None:
                    mark.move(start=after)
            break
        except UnreachableError as error:
            if not error.may_pass:
                raise
            if watched.lost_at is None:
                watched.lost_at = time.monotonic()
                say(f"link lost: {error.message}; looking for it, and nothing will be missing")
        time.sleep(pause_s * random.uniform(0.75, 1.25))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert watched.probe is not None and watched.verdict is not None
    if "end" in on and not mark.ended:
        tell(_end(watched.run.target, watched.probe, watched.verdict))
        watched.told += 1
    mark.move(ended=True)


def _news(fleet: Fleet, watched: Watched, start: int) -> Iterator[tuple[News | None, int | None]]:
    """(what happened, the byte after it); (None, None): nothing, but the link lives."""
    target, run_id = watched.run.target, watched.run.run_id
    with fleet.agent(target).stream(
        "events", deadline_s=None, idle_s=IDLE_S, run_id=run_id, start=start, follow=True
    ) as frames:
        for frame in frames:
            if frame.get("final"):
                watched.probe = understood(Probe, frame.get("probe"), target)
                watched.verdict = health.judge(watched.probe)
                return
            if "event" not in frame:
                yield None, None
                continue
            kind = next((kind for kind, events in KINDS.items() if frame["event"] in events), None)
            place, fields = int(frame["place"]), dict(frame["fields"])
            if kind is None or fields.get("reason") in NO_DEATH:
                yield None, int(frame["next"])
                continue
            yield News(
                id=f"{run_id}:{place}", run_id=run_id, target=target.name, kind=kind, at=float(frame["at"]),
                text=_text(str(frame["event"]), fields), fields={"event": frame["event"], **fields},
            ), int(frame["next"])  # fmt: skip
    raise NoAnswer("the agent ended without its last word", target=target.name, run_id=run_id)


def _end(target: Target, probe: Probe, verdict: Verdict) -> News:
    return News(
        id=f"{probe.run_id}:end", run_id=probe.run_id, target=target.name, kind="end",
        at=probe.exit.at if probe.exit else verdict.observed_at,
        text=f"{verdict.state}: {verdict.why}",
        fields={"state": verdict.state, "why": verdict.why, "step": verdict.step},
    )  # fmt: skip


def _text(event: str, fields: dict[str, Any]) -> str:
    """What happened, in a line."""
    say = {key: value for key, value in fields.items() if value is not None}
    step = f" at step {say['step']:,}" if isinstance(say.get("step"), int) else ""
    if event == "exception":
        message = str(say.get("message", "")).partition("\n")[0]
        worker = f" in {say['worker']}" if say.get("worker") else ""
        return f"{say.get('type', 'an exception')}{f': {message}' if message else ''}{worker}{step}"
    if event == "worker_down":
        return f"{say.get('worker', 'a worker')} died"
    if event == "stalled":
        return f"no step for {age(_number(say.get('silent_s')))}{step} (limit {age(_number(say.get('limit_s')))})"
    if event == "no_progress":
        return str(say.get("message", "no progress")).partition("\n")[0]
    if event in ("stall_over", "decay_over"):
        return f"it steps again{step}" if event == "stall_over" else "tok/s is as it was before"
    if event == "decay":
        before = say.get("before_tok_s", say.get("median_tok_s"))
        return f"tok/s has fallen to {_number(say.get('tok_s')):,.0f} from {_number(before):,.0f}{step}"
    if event == "queued":
        return f"waits in line for {say.get('gpus', 'its GPUs')}: {say.get('behind', '')}"
    if event == "dequeued":
        return f"has {say.get('gpus', 'its GPUs')} after {age(_number(say.get('waited_s')))} in line, and starts"
    if event == "phase":
        return f"phase {say.get('phase', '?')}"
    return f"{event}{step}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
