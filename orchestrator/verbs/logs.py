"""`logs`: the lines of one run, searched where they are; only what matches travels.

Whoever follows is connected again when the link is lost: each log is asked for from the line after the last that came,
so that none is missing and none comes twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orchestrator import health
from orchestrator.errors import (
    IdentityError,
    LinkLost,
    NoAnswer,
    UnreachableError,
)
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.model import Probe, Verdict, ordinal
from orchestrator.remote import understood
from orchestrator.resolve import Run, resolve

IDLE_S = 15.0
"""The agent says every two seconds that it is there; this much silence is a lost link. A reader who takes none of what
has come is no silence."""
PATIENCE_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was typed; the names are those of grep."""

    run: str | None
    grep: str | None = None
    last: int | None = None
    follow: bool = False
    after: int = 0
    before: int = 0
    ignore_case: bool = False
    invert: bool = False
    attempt: int | None = None
    since_at: float | None = None
    """By this machine's clock."""
    places: bool = False
    """Whether `Lines.each` will be asked where each line stands."""
    patience_s: float = PATIENCE_S
    """How long a link that was lost is looked for, by who follows."""


class Line(NamedTuple):
    """One line as it stands in its log. `offset` is its first byte there; `match` is False for context."""

    offset: int
    line: str
    match: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Whole lines of one log, as they came."""

    log: str
    data: bytes
    at: int | None
    offsets: list[int] | None
    context: list[int]

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")

    def each(self) -> Iterator[Line]:
        context, offset = frozenset(self.context), self.at
        for index, line in enumerate(self.text.split("\n")[:-1]):
            if self.offsets is not None:
                offset = self.offsets[index]
            assert offset is not None
            yield Line(offset, line, index not in context)
            offset += len(line.encode()) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """Something that happened to a log or to the link; no line of a log."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSince:
    """From when on there are lines of one log."""

    path: str
    mark_at: float | None
    """The time of the mark at which they begin; None: the beginning of the log."""
    quiet: bool
    """Nothing has been written to it since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Since:
    """What `--since` came to, by the container's clock."""

    at: float
    files: list[LogSince]


Item = Lines | Word | Since | None
"""None: nothing, but the link lives."""


@dataclass(kw_only=True, slots=True)
class Logs:
    """The lines, and, when they have all been read, what they are of."""

    target: Target
    probe: Probe
    notes: list[str]
    items: Iterator[Item]
    matched: int = 0
    total: int = 0
    shown: int = 0
    """Lines that have been handed out, context included."""
    foreign: list[dict[str, Any]] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    """Logs of its own that only repeat what the run's log says, and are not shown for that."""
    copied: int = 0
    """So many bytes of the run's log are lines from before the run, which its program has copied there."""
    seen: Verdict
    asked_at: float
    """As the run was when the lines were asked for, and when that was on this machine's clock."""
    seen_at: float
    link_lost: bool = False
    """Nothing has been heard since the last word about the link."""
    verdict: Verdict | None = None
    """As it was after the last line."""
    last_byte_at: float | None = None


@contextmanager
def run(fleet: Fleet, request: Request) -> Iterator[Logs]:
    """The lines that were asked for. Reading on raises `UnreachableError` when the link dies (for good, with -f)."""
    asked_at = time.time()
    found = resolve(fleet, request.run)
    with of_run(fleet, found.run, request, asked_at=asked_at, notes=found.notes) as logs:
        yield logs


@contextmanager
def of_run(
    fleet: Fleet, run: Run, request: Request, *, asked_at: float | None = None, notes: Sequence[str] = ()
) -> Iterator[Logs]:
    """Of a run that has been seen, in a look that was asked for at `asked_at`."""
    refuse_damaged(run)
    now = time.time()
    logs = Logs(
        target=run.target, probe=run.probe, notes=list(notes), items=iter(()), seen=run.verdict,
        asked_at=now if asked_at is None else asked_at, seen_at=now,
    )  # fmt: skip
    with closing(_Reading(fleet, run, request, logs).items()) as items:
        logs.items = items
        yield logs


def refuse_damaged(run: Run) -> None:
    """Raises `IdentityError` for a run whose directory no longer says what it is: so whose are its logs?"""
    if run.probe.damaged is not None:
        raise IdentityError(
            f"its run directory is damaged ({run.probe.damaged}), so nothing shows that a log there is this run's",
            target=run.target.name, run_id=run.run_id,
            hint=f"what is left of its files is in {run.target.workdir}/runs/{run.run_id} there; "
            f"specctl status {run.run_id} tells what of it lives, specctl stop {run.run_id} ends that",
        )  # fmt: skip


def theirs(at: float | None, probe: Probe, asked_at: float, seen_at: float) -> float | None:
    """A time of this machine's clock by the container's, which a probe has read between `asked_at` and `seen_at`.

    Clocks that agree as far as that can tell are taken to agree; else it is the least difference that there must be.
    """
    if at is None:
        return None
    ahead_s = min(max(0.0, probe.observed_at - seen_at), probe.observed_at - asked_at)
    return at + ahead_s


@dataclass(kw_only=True, slots=True)
class _File:
    """One log file, and from which byte on its lines are still to come."""

    path: str
    device: int
    inode: int
    restarts: int
    start: int
    wanted: int


class _Reading:
    """One `logs`, over as many connections as it takes."""

    def __init__(self, fleet: Fleet, run: Run, request: Request, logs: Logs) -> None:
        self.fleet, self.run, self.request, self.logs = fleet, run, request, logs
        self._files: dict[tuple[int, int], _File] = {}
        self._numbers: dict[int, _File] = {}
        """What the connection calls them."""
        self._newest: _File | None = None
        self._lost_at: float | None = None
        self._tries = 0

    def items(self) -> Generator[Item, None, None]:
        while True:
            try:
                yield from self._connection()
                return
            except UnreachableError as error:
                yield self._lost(error)
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._tries - 1)) * random.uniform(0.75, 1.25)
            time.sleep(min(pause_s, self._patience_left_s()))

    def _lost(self, error: UnreachableError) -> Word:
        """What to say before asking again. Raises `error` if that will not do, or has been tried for long enough."""
        if not self.request.follow or not self.request.patience_s or not error.may_pass:
            raise error
        if self._lost_at is None:
            self._lost_at, self._tries, self.logs.link_lost = time.monotonic(), 0, True
        if self._patience_left_s() <= 0:
            raise LinkLost(
                f"the link was lost {time.monotonic() - self._lost_at:.0f} s ago and {self._tries} tries did not bring "
                f"it back, the last: {error.message}",
                target=self.run.target.name, run_id=self.run.run_id,
                hint=error.hint or f"specctl logs {self.run.run_id} -f asks again",
            ) from error  # fmt: skip
        self._tries += 1
        again = "" if self._tries == 1 else f" ({ordinal(self._tries)} try)"
        return Word(text=f"link lost: {error.message}; reconnecting{again}...")

    def _patience_left_s(self) -> float:
        assert self._lost_at is not None
        return max(0.0, self._lost_at + self.request.patience_s - time.monotonic())

    def _connection(self) -> Iterator[Item]:
        request, run = self.request, self.run
        resume = [
            {
                "path": one.path, "device": one.device, "inode": one.inode, "restarts": one.restarts,
                "start": one.start, "from": one.wanted,
            }
            for one in self._files.values()
        ]  # fmt: skip
        with self.fleet.agent(run.target).stream(
            "logs", deadline_s=None, idle_s=IDLE_S, run_id=run.run_id, grep=request.grep, last=request.last,
            follow=request.follow, after=request.after, before=request.before, ignore_case=request.ignore_case,
            invert=request.invert, attempt=request.attempt, places=request.places, resume=resume,
            since_at=theirs(request.since_at, run.probe, self.logs.asked_at, self.logs.seen_at),
        ) as frames:  # fmt: skip
            self._numbers = {}
            for frame in frames:
                if self._lost_at is not None:
                    yield self._back()
                yield self._taken(frame)
                if frame.get("final"):
                    return
        raise NoAnswer("the agent ended without its last word", target=run.target.name, run_id=run.run_id)

    def _back(self) -> Word:
        assert self._lost_at is not None
        away_s, self._lost_at, self.logs.link_lost = time.monotonic() - self._lost_at, None, False
        where = "from the beginning"
        if self._newest is not None:
            where = f"at byte {self._newest.wanted:,} of {self._newest.path}"
        return Word(text=f"the link is back after {away_s:.0f} s; resumed {where}")

    def _taken(self, frame: dict[str, Any]) -> Item:
        logs = self.logs
        if "raw" in frame:
            file = self._numbers[frame["id"]]
            logs.matched += frame["matched"]
            logs.shown += frame["raw"].count(b"\n")
            if frame["last"] is not None:
                file.wanted, self._newest = frame["last"] + 1, file
            return Lines(
                log=file.path, data=frame["raw"], at=frame.get("at"), offsets=frame.get("offsets"),
                context=frame.get("context") or [],
            )  # fmt: skip
        for one in frame.get("files", ()):
            file = _File(
                path=one["path"], device=one["device"], inode=one["inode"], restarts=one["restarts"],
                start=one["start"], wanted=one["from"],
            )  # fmt: skip
            self._numbers[one["id"]] = self._files[file.device, file.inode] = file
            if self._newest is None or (self._newest.device, self._newest.inode) == (file.device, file.inode):
                self._newest = file
        logs.matched += frame.get("unshown", 0)
        if "note" in frame:
            return Word(text=frame["note"])
        if "since" in frame:
            return understood(Since, frame["since"], self.run.target)
        if frame.get("final"):
            logs.total, logs.foreign, logs.last_byte_at = frame["total"], frame["foreign"], frame["last_byte_at"]
            logs.repeats, logs.copied = frame["repeats"], frame["copied"]
            logs.probe = understood(Probe, frame.get("probe"), self.run.target)
            logs.verdict = health.judge(logs.probe)
        return None
