"""`logs`: lines of this run's logs, and of nothing else. Identity first, then cleaning, then grep, then frames.

Frames: `files` (a log, and from which byte on it is shown), then `id` and, raw, whole lines of that log; `last` is the
raw offset of the newest of them. With these a laptop whose link was lost asks again (`resume`) and gets the line after.
`note` is for people; an empty frame says that the link lives. `logs_follow.py` goes on where this ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from orchestrator.agent.lines import Lines, Section
from orchestrator.agent.logfiles import Logs, identified
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.search import Pattern, Search
from orchestrator.agent.search_file import search_file
from orchestrator.logscan.clean import Block
from orchestrator.model import Probe

TAIL_BYTES = 16 << 20
"""The last lines of a log are looked for in its last so many bytes, and in all of it if that holds too few."""
SECTIONS_LIMIT = 128
CONTEXT_BYTES = 4096
"""So long a line is taken to be, when lines after a match that was shown may still be owed."""


def run(call: Call) -> None:
    reader = Reader(call, identified(call))
    reader.show()
    if reader.follow:
        from orchestrator.agent.logs_follow import Follow

        Follow(reader).run()
    reader.end(total=reader.closed_lines + sum(section.lines for section in reader.sections))


class Reader(Logs):
    """Answers one `logs` request."""

    def __init__(self, call: Call, seen: Probe) -> None:
        super().__init__(call, seen)
        request = call.request
        self.last: int | None = request.get("last")
        self.follow = bool(request.get("follow"))
        self.places = bool(request.get("places"))
        """Whether the place of every line is asked for."""
        self.shown = {(one["device"], one["inode"]): one for one in request.get("resume") or ()}
        self.resumed = bool(self.shown)
        self.pattern: Pattern | None = None
        if request.get("grep") is None:
            if any(request.get(name) for name in ("ignore_case", "invert", "before", "after")):
                raise Refusal("usage", "-i, -v, -A, -B and -C say how --grep searches", "add --grep, or leave them out")
        else:
            self.pattern = Pattern(
                expression=request["grep"], ignore_case=bool(request.get("ignore_case")),
                invert=bool(request.get("invert")), before=int(request.get("before") or 0),
                after=int(request.get("after") or 0),
            )  # fmt: skip
            self.pattern.check()
        self.numbered = self.closed_lines = 0
        """How many sections have a number; the lines of those that are closed."""

    # --- what is there already --------------------------------------------------------------------------------------

    def show(self) -> None:
        self.open()
        if not self.resumed:
            self.tell_since()
        # What was written last comes last, so that the end of what is shown is the end of what there is.
        by_age = sorted(self.sections, key=lambda section: section.modified_at)
        if self.last is not None and not self.resumed:
            self._show_tail(by_age, self.last)
        else:
            for section in by_age:
                self.announce([section])
                for lines in self.lines_of(section):
                    self.send(section, lines)
        if self.follow:
            for section in self.sections:
                section.wanted = section.position
            self.announce(self.sections)

    def _show_tail(self, sections: list[Section], limit: int) -> None:
        tail = Tail(limit)
        for section in sections:
            start = section.offset
            self._skip(section)
            skipped = section.offset != start
            for lines in self.lines_of(section):
                tail.add(section, lines)
            if skipped and tail.count < limit:  # its end held too few lines: all of it, then
                tail.forget(section)
                section.skip_to(start, 0)
                for lines in self.lines_of(section):
                    tail.add(section, lines)
        tail.trim()
        for section in sections:
            first = next((lines.first for one, lines in tail.held if one is section), None)
            section.wanted = section.position if first is None else first
        self.announce(sections)
        for section, lines in tail.held:
            self.send(section, lines)
        if self.pattern is not None:
            self.emit({"unshown": tail.matched - sum(lines.matched for _, lines in tail.held)})
        elif not limit:  # of no line at all, how many there are
            self.emit({"unshown": sum(section.lines for section in sections)})

    def _skip(self, section: Section) -> None:
        """For the last lines of a large log, start near its end: the supervisor's marks say at which line."""
        if self.pattern is None and self.since is None:
            mark = self.mark_before(section, section.size - TAIL_BYTES)
            if mark is not None:
                section.skip_to(*mark)

    def lines_of(self, section: Section) -> Iterator[Lines]:
        """The lines that are there now, or those that match."""
        limit = section.size
        if self.pattern is None:
            found = section.whole(self._blocks(section, limit), over=not self.follow)
        else:
            found = self._search(self.pattern, section, limit)
        for lines in found:
            lines = lines.from_offset(section.wanted)
            if lines.count:
                yield lines

    def _search(self, pattern: Pattern, section: Section, limit: int) -> Iterator[Lines]:
        places = self.places or self.follow
        for stretch in self.clean_stretches(section, limit) if not pattern.context else ():
            yield from self._search_blocks(pattern, section.read(stretch.start), places)
            part = section.pass_over(stretch.end, stretch.lines)
            if part is not None:
                yield from search_file(pattern, section.fd, *part, places=places, beat=self.beat)
        yield from self._search_blocks(pattern, self._blocks(section, limit), places)

    def _search_blocks(self, pattern: Pattern, blocks: Iterable[Block], places: bool) -> Iterator[Lines]:
        search: Search | None = None
        for block in blocks:
            search = search or Search(pattern, places=places)
            search.feed(block)
            yield from search.found()
            self.beat()
        if search is not None:
            yield from search.finish()

    def _blocks(self, section: Section, limit: int) -> Iterator[Block]:
        """A log that grows faster than it is read has an end all the same: where it ended when reading began."""
        for block in section.read(limit):
            yield block
            self.beat()
        if not self.follow:  # a line that may still grow is not shown in two halves
            yield from section.finish()

    # --- what the laptop has already --------------------------------------------------------------------------------

    def begin(self, section: Section) -> None:
        had = self.shown.pop(section.key, None)
        if had is None:
            super().begin(section)
            return
        if section.foreign and section.restarts > int(had["restarts"]):
            self.note(f"{section.path} was emptied while the link was lost: from its beginning again")
            return
        wanted, start = int(had["from"]), int(had["start"])
        if wanted > section.size:
            self.note(f"{section.path} was cut to {section.size:,} bytes while the link was lost")
            wanted = section.size
        section.start = start
        owed = 1 + (self.pattern.after if self.pattern is not None else 0)
        mark = self.mark_before(section, wanted - owed * CONTEXT_BYTES)
        before = self.mark_before(section, start)
        if mark is not None and mark[0] > start:
            section.skip_to(mark[0], mark[1] - (before[1] if before is not None else 0))
        else:
            section.skip_to(start, 0)
        section.wanted = wanted

    def open(self) -> None:
        super().open()
        for gone in self.shown.values():
            self.note(f"{gone['path']} is gone: what was written to it beyond byte {gone['from']:,} is lost")
        self.shown.clear()

    # --- frames -----------------------------------------------------------------------------------------------------

    def announce(self, sections: Iterable[Section]) -> None:
        files = []
        for section in sections:
            if section.number is None:
                self.numbered += 1
                section.number = self.numbered
            files.append({
                "id": section.number, "path": section.path, "device": section.key[0], "inode": section.key[1],
                "restarts": section.restarts, "start": section.start, "from": section.wanted,
            })  # fmt: skip
        self.emit({"files": files})

    def send(self, section: Section, lines: Lines) -> None:
        frame: dict[str, Any] = {"id": section.number, "last": lines.last, "matched": lines.matched}
        if self.places:
            frame.update(at=lines.at, offsets=lines.offsets, context=lines.context)
        # What is UTF-8 comes out of this as it is, and ASCII, of which logs are made, need not go through it.
        self.emit(frame, lines.data if lines.data.isascii() else lines.data.decode("utf-8", "replace").encode())


class Tail:
    """The last lines of what is added."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: deque[tuple[Section, Lines]] = deque()
        self.count = self.matched = 0

    def add(self, section: Section, lines: Lines) -> None:
        self.matched += lines.matched
        self.count += lines.count
        self.held.append((section, lines))
        while self.held and self.count - self.held[0][1].count >= self.limit:
            self.count -= self.held.popleft()[1].count

    def forget(self, section: Section) -> None:
        self.held = deque((one, lines) for one, lines in self.held if one is not section)
        self.count = sum(lines.count for _, lines in self.held)

    def trim(self) -> None:
        """Only now to the line: until then whole pieces were dropped."""
        if self.held and self.count > self.limit:
            section, lines = self.held.popleft()
            self.held.appendleft((section, lines.without(self.count - self.limit)))
            self.count = self.limit
