"""`errors`: every exception in this run's logs, grouped by what it is; read out of the logs themselves, whole.

The supervisor's records keep the first few and count the rest. Here the logs are searched again, quickly: only where
one of the words of an exception stands is the scanner let loose, until a step has followed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator.agent import marks, records
from orchestrator.agent.follow import blanked
from orchestrator.agent.lines import Section
from orchestrator.agent.logfiles import Logs, identified, told
from orchestrator.agent.main import Call
from orchestrator.agent.marks import Key
from orchestrator.logscan import Event, FindingEvent, Scanner, StepEvent, WorkerDown, is_clean, scrub
from orchestrator.model import Finding

CHUNK_BYTES = 1 << 20
LEAD_BYTES = 64 << 10
"""So much before an exception is read with it: how step lines look, and what may explain it."""
OVERLAP_BYTES = 200
WORDS = (
    b"Traceback (most recent call last):", b"Exception in thread ", b"Fatal Python error: ", b"terminate called after ",
)  # fmt: skip
SYNTAX = re.compile(rb"^[ \t]*File \"[^\"\n]+\", line \d+[ \t]*$", re.MULTILINE)
GROUPS_LIMIT = 200


def run(call: Call) -> None:
    seen = identified(call)
    logs = Logs(call, seen)
    logs.open()
    spec = records.spec(logs.paths)
    found = Groups()
    exact = {(one.fingerprint, one.offset): one.at for one in told(logs.paths.events, b'"exception"', _Told)}
    copied = logs.copied()
    for section in sorted(logs.sections, key=lambda one: one.modified_at):
        ranges = [] if section.foreign else copied
        for event in events_of(section, spec[0].patterns if spec else {}, logs.beat, ranges):
            found.take(section, event)
    for section in logs.sections:
        key = section.key if section.foreign else None
        places = [place for one in found.groups for place in (one.first, one.last) if place.section is section]
        by = marks.after(logs.index, key, [place.offset for place in places])
        for place in places:
            noted_at = exact.get((place.fingerprint, place.offset))
            place.exact = noted_at is not None
            noted_at = by.get(place.offset) if noted_at is None else noted_at
            place.at = logs.modified_at(section) if noted_at is None else noted_at + seen.clock_set_by_s
    logs.tell_since()
    logs.end(
        groups=[one.frame() for one in found.groups], left_out=found.left_out,
        bytes=sum(section.size - section.start for section in logs.sections),
    )  # fmt: skip


@dataclass(slots=True)
class Place:
    """Where an exception stands, and when it had been written: at that moment, or by then at the latest."""

    section: Section
    offset: int
    fingerprint: str
    at: float | None = None
    exact: bool = False

    def frame(self) -> dict[str, Any]:
        return {"log": self.section.path, "offset": self.offset, "at": self.at, "exact": self.exact}


@dataclass(slots=True)
class Group:
    """All occurrences of one exception."""

    finding: Finding
    """The first."""
    first: Place
    last: Place
    count: int = 0
    workers: dict[str, int] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    """The workers whose end the text says it was."""
    newest_worker: str | None = None
    followed: bool = False
    """A step came after the last of them, in the same log."""

    def frame(self) -> dict[str, Any]:
        finding = self.finding
        return {
            "type": finding.type, "message": finding.message, "traceback": finding.traceback, "hint": finding.hint,
            "fingerprint": finding.fingerprint, "count": self.count, "workers": self.workers,
            "down": sorted(self.down), "followed": self.followed, "first": self.first.frame(),
            "last": self.last.frame(),
        }  # fmt: skip


class Groups:
    """The exceptions found so far, in the order in which each came first."""

    def __init__(self) -> None:
        self._by_fingerprint: dict[str, Group] = {}
        self._waiting: dict[str, Group] = {}
        """Those that no step has followed yet."""
        self._stepped: dict[tuple[Key, str | None], int] = {}
        """Where in a log a worker has stepped last."""
        self.left_out = 0
        """Occurrences of exceptions beyond the first so many different ones."""

    @property
    def groups(self) -> list[Group]:
        return list(self._by_fingerprint.values())

    def take(self, section: Section, event: Event) -> None:
        if isinstance(event, FindingEvent):
            self._find(section, event.finding)
        elif isinstance(event, WorkerDown) and event.finding is not None:
            if group := self._by_fingerprint.get(event.finding.fingerprint):
                group.down.add(event.name)
        elif isinstance(event, StepEvent):
            self._stepped[section.key, event.worker] = event.offset
            for group in list(self._waiting.values()):
                self._settle(group)

    def _find(self, section: Section, finding: Finding) -> None:
        place = Place(section, finding.offset, finding.fingerprint)
        group = self._by_fingerprint.get(finding.fingerprint)
        if group is None:
            if len(self._by_fingerprint) >= GROUPS_LIMIT:
                self.left_out += 1
                return
            group = self._by_fingerprint[finding.fingerprint] = Group(finding, place, place)
        group.count += 1
        group.last, group.followed, group.newest_worker = place, False, finding.worker
        if finding.worker is not None:
            group.workers[finding.worker] = group.workers.get(finding.worker, 0) + 1
        self._waiting[finding.fingerprint] = group
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """Whether steps came after the last of them: another worker's prove nothing. An exception may be known to be
        over only some lines after its last one, so that steps which follow it are heard of first."""
        key, worker = group.last.section.key, group.newest_worker
        if worker is None:
            steps = [offset for (log, _), offset in self._stepped.items() if log == key]
        else:
            steps = [self._stepped.get((key, name), -1) for name in (worker, None)]
        if max(steps, default=-1) > group.last.offset:
            group.followed = True
            del self._waiting[group.finding.fingerprint]


def events_of(
    section: Section, patterns: dict[str, str], beat: Callable[[], None], copied: list[tuple[int, int]]
) -> Iterator[Event]:
    """What the scanner makes of the neighbourhood of every exception of a log, but for what was copied into it."""
    offset, end = section.start, section.size if section.end is None else min(section.end, section.size)
    scanner: Scanner | None = None
    found = stepped = -1
    """Where the last exception and the last step stand."""
    before = b""
    while offset < end and (data := os.pread(section.fd, min(CHUNK_BYTES, end - offset), offset)):
        beat()
        data = blanked(data, offset, copied) if copied else data
        marked = _may_hold(before[-OVERLAP_BYTES:] + data)
        if scanner is None and marked:
            lead = _whole_lines(before[-LEAD_BYTES:])
            scanner = Scanner(patterns=patterns, base_offset=offset - len(lead), every=True)
            scanner.feed(lead, 0.0)
        offset, before = offset + len(data), data
        if scanner is None:
            continue
        for event in scanner.feed(data, 0.0):
            if isinstance(event, FindingEvent):
                found = event.finding.offset
            elif isinstance(event, StepEvent):
                stepped = event.offset
            yield event
        if not marked and stepped >= found:
            yield from scanner.settle(0.0)
            scanner = None
    if scanner is not None:
        yield from scanner.finish(0.0)


def _may_hold(data: bytes) -> bool:
    """Whether an exception may begin in `data`."""
    if not is_clean(data):
        data = scrub(data.replace(b"\r", b"\n"))
    return any(word in data for word in WORDS) or (b'File "' in data and SYNTAX.search(data) is not None)


def _whole_lines(data: bytes) -> bytes:
    cut = max(data.find(b"\n"), data.find(b"\r")) + 1 if len(data) == LEAD_BYTES else 0
    return data[cut:]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """An exception of events.jsonl: the supervisor writes down the 1st, 2nd, 4th, 8th ... time of each."""

    fingerprint: str
    offset: int
    at: float
