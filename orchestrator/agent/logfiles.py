"""The files that hold a run's lines: which they are, from which byte on they are this run's, and since when.

`logs` shows them and `errors` searches them; identity is decided here for both.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.agent import files, marks
from orchestrator.agent.foreign import locate
from orchestrator.agent.lines import Section
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.probe import probe
from orchestrator.agent.repeats import Repeat
from orchestrator.model import EarlierFile, ForeignLog, Misfit, Probe, from_json, to_json

T = TypeVar("T")

HEARTBEAT_S = 2.0
CLEAN_BYTES = 8 << 20
"""Less is not worth a search of its own."""
BEGINS_S = 10.0
"""How long a supervisor may take from its claim to its record."""
HEADER_BYTES = 4096
TICK_S = 0.02
"""A file's time is the kernel's last tick, so that a file may have been written after it."""

Key = tuple[int, int]
"""(device, inode)."""


def identified(call: Call) -> Probe:
    """The run that is asked for, as it is now. Raises `Refusal` when there is none, or no such attempt."""
    run_id, attempt = str(call.request["run_id"]), call.request.get("attempt")
    seen = probe(call, [run_id], time.time())
    if not seen:
        raise Refusal("notfound", f"there is no run {run_id} in {call.paths.workdir}")
    if attempt is not None and attempt != seen[0].attempt:
        newest = seen[0].attempt
        there = "its only one is attempt 1" if newest == 1 else f"its newest is attempt {newest}"
        raise Refusal("notfound", f"{run_id} has no attempt {attempt} to show: {there}", "leave --attempt out")
    return seen[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanStretch:
    """Bytes of a log that are `lines` whole lines as they are shown."""

    start: int
    end: int
    lines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copied:
    """A stretch of lines that the program has copied into the run's log, where they are older than the run."""

    start: int
    end: int


def told(events: str, word: bytes, cls: type[T]) -> Iterator[T]:
    """The lines of events.jsonl that hold `word` and are a `cls`: a program may write there, too."""
    try:
        with os.fdopen(files.open_regular(events), "rb") as file:
            for line in file:
                if word in line:
                    try:
                        yield from_json(cls, json.loads(line))
                    except (Misfit, ValueError, RecursionError):
                        continue
    except OSError:
        pass


class Logs:
    """The files that hold a run's lines, as far as they can be shown to be this run's."""

    def __init__(self, call: Call, seen: Probe) -> None:
        self.call, self.seen = call, seen
        self.paths = call.paths.run(seen.run_id)
        self.index = self.paths.index(seen.attempt)
        self.since: float | None = call.request.get("since_at")
        self.shown: dict[Key, dict[str, Any]] = {}
        """What the laptop has already, by file; taken out as the files are found."""
        self.sections: list[Section] = []
        self.repeats: list[Repeat] = []
        """Logs that are not shown, since they only repeat the run's own."""
        self.gone: set[Key] = set()
        """Files that held lines of this run and are nowhere any more."""
        self.follow = False
        self.spoke_at = time.monotonic()

    def open(self) -> None:
        """The run's own log and those that its program writes. Raises `Refusal` for a log that may be another's."""
        log = self.seen.log
        if not log.verified:
            seen = self.seen.closed is None and _has_no_lines(log.path)
            if seen and self._not_begun() and not (self.follow and self._may_begin()):
                return  # nothing was written, and nobody will
            raise Refusal(
                "identity",
                f"{log.path} cannot be shown as this run's log: {log.why}",
                "specctl status tells what is known of the run",
            )
        self.sections.append(Section(log.path, log.header_bytes))
        self.open_foreign(self.seen.foreign_logs)
        for section in [*self.sections, *(repeat.section for repeat in self.repeats)]:
            self.begin(section)

    def _not_begun(self) -> bool:
        """Whether it is on record that the run never started, or nothing is that it did."""
        if self.seen.exit is not None:
            return self.seen.exit.never_started is not None
        return not self.seen.program_seen and not os.path.lexists(self.paths.supervisor)

    def _may_begin(self) -> bool:
        """Whether a supervisor may be about to make its log."""
        try:
            claimed_at = os.stat(self.paths.claim).st_mtime
        except OSError:
            claimed_at = self.seen.created_at
        return self.seen.exit is None and self.seen.observed_at - claimed_at < BEGINS_S

    def open_foreign(self, logs: Iterable[ForeignLog]) -> list[Section]:
        """Each log of the program's, and what it was rotated from, wherever these files are now: those that are new."""
        known = {section.key: section for section in [*self.sections, *(one.section for one in self.repeats)]}
        new = []
        for log in logs:
            all_of_it = [*log.earlier, EarlierFile(device=log.device, inode=log.inode, base=log.base)]
            for one in all_of_it:
                key, newest = (one.device, one.inode), one is all_of_it[-1]
                if key in known:
                    if newest and known[key].foreign:
                        known[key].end = log.until
                    continue
                path = locate(log.path, key, one.born)
                if path is None:
                    self.gone.add(key)
                    continue
                try:
                    section = Section(
                        path, one.base, log=log.path, end=log.until if newest else None,
                        restarts=log.restarts if newest else 0,
                    )  # fmt: skip
                except OSError:
                    continue
                if section.key == key and section.size >= one.base:
                    known[key] = section
                    if not self._repeats(section, log):
                        new.append(section)
                else:
                    os.close(section.fd)  # the name belongs to another file by now: not this run's
        self.sections += new
        return new

    def _repeats(self, section: Section, log: ForeignLog) -> bool:
        """Whether it is set aside: one that says nothing but what the run's own log says, too."""
        if log.restarts or log.earlier or section.key in self.shown:
            return False
        repeat = Repeat(section, self.sections[0], self.beat)
        if (section.size > section.base or self.follow) and repeat.holds(over=not self.follow):
            self.repeats.append(repeat)
            return True
        return False

    def begin(self, section: Section) -> None:
        """Lets a section begin where it is to be shown from."""
        if self.since is None:
            return
        set_by_s = self.seen.clock_set_by_s
        if self.modified_at(section) < self.since - TICK_S:
            section.skip_to(section.size, 0)
        else:
            mark = marks.since(self.index, section.key if section.foreign else None, self.since - set_by_s)
            if mark is None or not section.base < mark.offset <= section.size:
                return
            section.skip_to(mark.offset, 0)
            section.mark_at = mark.time + set_by_s
        section.start = section.wanted = section.offset

    def modified_at(self, section: Section) -> float:
        """When it was last written: what its own time says may be by a clock that has been set since."""
        if self.seen.clock_set_by_s:
            if not section.foreign:
                return self.seen.log.modified_at
            for log in self.seen.foreign_logs:
                if (log.device, log.inode) == section.key and log.modified_at is not None:
                    return log.modified_at
        return section.modified_at

    def mark_before(self, section: Section, offset: int) -> tuple[int, int] | None:
        """(byte, lines of the run's before it) of the last mark up to a byte."""
        if section.foreign and section.restarts:
            return None  # its marks count the lines of the files before it, too
        mark = marks.before(self.index, section.key if section.foreign else None, offset)
        if mark is None or mark.offset <= section.base:
            return None
        header = not section.foreign  # a line of the file, and none of the run's
        return mark.offset, mark.lines - header

    def clean_stretches(self, section: Section, limit: int) -> list[CleanStretch]:
        """The long parts of what is to be read of a section that the supervisor has seen to need no cleaning."""
        end = limit if section.end is None else min(limit, section.end)
        if (section.foreign and section.restarts) or end - section.offset < CLEAN_BYTES:
            return []
        lines = None
        if section.offset == section.base:
            lines = 0 if section.foreign else 1  # the header
        log, start, result = section.key if section.foreign else None, section.offset, []
        for one in marks.stretches(self.index, log, start, lines, end):
            if one.clean and one.end - start >= CLEAN_BYTES:
                result.append(CleanStretch(start=start, end=one.end, lines=one.lines))
            start = one.end
        return result

    def copied(self) -> list[tuple[int, int]]:
        """From where to where lines stand in the run's log that are older than it, as its supervisor has seen."""
        return [(one.start, one.end) for one in told(self.paths.events, b'"lines_copied"', _Copied)]

    # --- frames -----------------------------------------------------------------------------------------------------

    def emit(self, frame: dict[str, Any], *raw: bytes) -> None:
        self.call.emit(frame, *raw)
        self.spoke_at = time.monotonic()

    def beat(self) -> None:
        """Says now and then that somebody is here, and finds out whether anybody still listens."""
        if time.monotonic() - self.spoke_at >= HEARTBEAT_S:
            self.emit({})

    def note(self, text: str) -> None:
        self.emit({"note": text})

    def tell_since(self) -> None:
        """From when on there are lines: marks are not every line's."""
        if self.since is not None:
            found = [
                {"path": one.path, "mark_at": one.mark_at, "quiet": one.start >= one.size and one.start > one.base}
                for one in self.sections
            ]
            self.emit({"since": {"at": self.since, "files": found}})

    def end(self, **fields: Any) -> None:
        """The last frame."""
        self.seen = last = probe(self.call, [self.seen.run_id], time.time())[0]
        self.call.emit({
            "final": True, "probe": to_json(last), "foreign": [to_json(log) for log in last.foreign_logs],
            "repeats": [repeat.section.path for repeat in self.repeats], "gone": len(self.gone),
            "copied": sum(end - start for start, end in self.copied()),
            "last_byte_at": max((self.modified_at(one) for one in self.sections if one.has_own_bytes), default=None),
            **fields,
        })  # fmt: skip


def _has_no_lines(path: str) -> bool:
    """Whether there is no log, or at most its header, which a full disk may have cut."""
    try:
        with os.fdopen(files.open_regular(path), "rb") as file:
            return not file.read(HEADER_BYTES).partition(b"\n")[2]
    except FileNotFoundError:
        return True
    except OSError:
        return False
