"""Bytes of a log in, events out: steps, tok/s, phases, workers and exceptions, at the same cost for any chunking.

Most lines of a log say nothing of these, so a block of whole lines is searched at once and only the lines that may
count are decoded. While a traceback is open every line is looked at, and nothing after its first byte is decided: a new
`Scanner(summary=...)` fed from `summary.offset` reads it again and goes on exactly there.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping

from orchestrator.logscan.clean import Block, clean_lines, join_ends, scrub
from orchestrator.logscan.events import Event
from orchestrator.logscan.grammar import GATE, Grammar
from orchestrator.logscan.progress import Progress, step_event
from orchestrator.logscan.reader import MARK, SHM, Complete, Reader
from orchestrator.logscan.shapes import Shapes
from orchestrator.logscan.templates import FRAME, Row, Template, Templates
from orchestrator.logscan.tracebacks import Tracebacks
from orchestrator.model import LogSummary, OpenFinding, ScanState

LINE_LIMIT = 128 << 10
"""Of a longer line only the head and the tail are read, half of this each."""
FEW, SAMPLES = 4, 4
"""More lines of one form than FEW are read together; of these so many, times the workers, are sampled."""
HINT_BYTES = 64 << 10
"""How far before a traceback a line about shared memory explains it."""


class Scanner:
    """Reads one log. Feed bytes in any chunks; `now` is the time at which they were seen."""

    def __init__(
        self,
        *,
        summary: LogSummary | None = None,
        patterns: Mapping[str, str] | None = None,
        base_offset: int = 0,
        every: bool = False,
        sample: bool = False,
    ) -> None:
        """`base_offset`: where in the file the first byte fed stands (a summary says so itself). `every`: an exception
        that repeats is an event each time. `sample`: of many step lines of one form that are read at once some are
        events: evenly spread ones, and the newest of each worker. The summary counts all of them in any case.

        Raises ValueError, naming it, for a pattern that is no regular expression with one group.
        """
        self._grammar = Grammar(patterns)
        start = summary or LogSummary(offset=base_offset, scan=ScanState(decided_offset=base_offset))
        self._progress = Progress(start, every=every)
        self._tracebacks = Tracebacks()
        self.lines = start.lines
        """So many lines stand before the byte `decided`."""
        self.decided = start.scan.decided_offset
        """Raw offset behind the last whole line that was read."""
        self.dirty = False
        """Whether lines were read that need cleaning; whoever notes that clears it."""
        self._after_cr = start.scan.after_cr
        self._shm_at = start.scan.shm_hint_offset
        self._shapes = Shapes(start.scan.shapes)
        self._templates = Templates()
        self._sample = sample
        self._now = 0.0
        self._offset = start.offset
        """Raw offset of the open line."""
        self._open = bytearray()
        """The open line so far; of a very long one, its head."""
        self._open_tail: bytearray | None = None
        self._open_length = 0

    def feed(self, data: bytes, now: float) -> list[Event]:
        """What `data`, the next bytes of the log, says."""
        self._now = now
        events: list[Event] = []
        if self._after_cr and data:
            self._after_cr = False
            if data[:1] == b"\n":  # the rest of a CR LF whose CR already ended the line
                data = data[1:]
                self._offset += 1
                self.decided = max(self.decided, self._offset)
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut:
            start = self._finish_long_line(data, events) if self._open_tail is not None else 0
            if start < cut:
                raw = bytes(self._open) + data[start:cut]
                self._take(clean_lines(raw, self._offset, line_limit=LINE_LIMIT), self._offset + len(raw), events)
            self._after_cr = cut == len(data) and data.endswith(b"\r")
        self._keep(data[cut:])
        return events

    def finish(self, now: float) -> list[Event]:
        """The end of the log: what its unterminated last line and its open tracebacks say."""
        self._now = now
        events: list[Event] = []
        if self._open_length:
            end = self._offset + self._open_length
            if self._open_tail is not None:
                block = self._long_line(self._open_tail)
            else:
                block = clean_lines(bytes(self._open) + b"\n", self._offset)
            self._take(block, end, events)
        self._tracebacks.settle(cut_off=True)
        self._emit_findings(events)
        return events

    def settle(self, now: float) -> list[Event]:
        """Call it when the log has been silent for a moment: a traceback that has its last line is complete."""
        self._now = now
        events: list[Event] = []
        self._tracebacks.settle(cut_off=False)
        self._emit_findings(events)
        return events

    @property
    def resume_offset(self) -> int:
        """Raw offset of the first byte not yet decided: the open line, or the first open traceback."""
        start = self._tracebacks.start
        return self._offset if start is None else min(start, self._offset)

    def summary(self) -> LogSummary:
        """What has been read so far; `model.to_json` writes it. A traceback that may go on is in `open_findings`."""
        ended = [
            OpenFinding(finding=one.finding, down=one.down, followed=one.followed)
            for reader in self._tracebacks.ended()
            for one in self._complete(reader, cut_off=False)
        ]
        offset = self.resume_offset
        after_cr = self._after_cr and offset == self._offset
        scan = ScanState(
            decided_offset=self.decided, after_cr=after_cr, shm_hint_offset=self._shm_at,
            shapes=list(self._shapes.texts),
        )  # fmt: skip
        return self._progress.summary(offset=offset, lines=self.lines, open_findings=ended, scan=scan)

    # --- lines ------------------------------------------------------------------------------------------------------

    def _keep(self, rest: bytes) -> None:
        """Adds to the open line, keeping only the two ends of a very long one."""
        self._open_length += len(rest)
        if self._open_tail is None:
            self._open += rest
            if len(self._open) <= LINE_LIMIT:
                return
            self._open_tail = self._open[-(LINE_LIMIT // 2) :]
            del self._open[LINE_LIMIT // 2 :]
        else:
            self._open_tail += rest
            if len(self._open_tail) > LINE_LIMIT:
                del self._open_tail[: -(LINE_LIMIT // 2)]

    def _finish_long_line(self, data: bytes, events: list[Event]) -> int:
        """Takes the open very long line, which ends in `data`; returns where the next line starts there."""
        first = min(at for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0)
        end = first + (2 if data[first : first + 2] == b"\r\n" else 1)
        assert self._open_tail is not None
        self._take(self._long_line(self._open_tail + data[:first]), self._offset + self._open_length + end, events)
        return end

    def _long_line(self, tail: bytearray) -> Block:
        """The open line as a block, from its head and the end of `tail`."""
        text = scrub(join_ends(bytes(self._open), bytes(tail[-(LINE_LIMIT // 2) :]))) + b"\n"
        return Block(text, self._offset, index=(array("Q", [0]), array("Q", [self._offset])))

    def _take(self, block: Block, end: int, events: list[Event]) -> None:
        """Reads a block of whole lines that ends at raw offset `end`; it becomes decided."""
        data = block.data
        self.dirty = self.dirty or not block.verbatim
        every_line = bool(self._grammar.patterns)
        replay = self.decided > self._offset
        self._open.clear()
        self._open_tail, self._open_length = None, 0
        self._offset = end
        lowered = b"" if every_line else data.lower()
        if not replay:
            self.lines += data.count(b"\n")
        position = 0
        while position < len(data):
            if not (every_line or replay or self._tracebacks.open):
                if self._templates.known:
                    position = self._alike(block, position, events)
                found = GATE.search(lowered, position)
                if found is None:
                    break
                start = data.rfind(b"\n", position, found.start()) + 1 or position
                if start > position and self._templates.known:
                    position = self._alike(block, start, events)
                    if position > start:
                        continue
                position = start
            stop = data.find(b"\n", position)
            stop = len(data) if stop < 0 else stop
            self._line(block, position, stop, lowered, replay, events)
            position = stop + 1
        self.decided = max(self.decided, end)

    def _alike(self, block: Block, position: int, events: list[Event]) -> int:
        """Reads the lines from `position` on that look like earlier step lines; returns where it stopped."""
        data, known = block.data, self._templates.known
        hit = True
        while hit:
            hit = False
            for template in known:
                end = template.end(data, position)
                if end >= 0:
                    rows = template.rows(data, position, end)
                    if template is FRAME and self._progress.read_frames(rows):
                        pass
                    elif not self._together(template, rows, block, position, events):
                        self._one_by_one(template, rows, block, position, events)
                    position, hit = end, True
                    break
        return position

    def _together(
        self, template: Template, rows: list[Row], block: Block, position: int, events: list[Event]
    ) -> bool:
        """Reads lines of one form that say nothing new; False if they do."""
        if len(rows) < FEW:
            return False
        at_worker = template.columns[-1]
        newest = {row[at_worker] if at_worker is not None else b"": at for at, row in enumerate(rows)}
        if not self._progress.read_alike(rows, template.columns, newest, self._now):
            return False
        self._tell(template, rows, newest, block, position, events)
        return True

    def _one_by_one(
        self, template: Template, rows: list[Row], block: Block, position: int, events: list[Event]
    ) -> None:
        for row in rows:
            events += self._progress.read(template.reading(row), block.raw_offset(position), self._now)
            position = block.data.find(b"\n", position) + 1

    def _tell(
        self, template: Template, rows: list[Row], newest: Mapping[bytes, int], block: Block, position: int,
        events: list[Event],
    ) -> None:  # fmt: skip
        """Events of lines that have been counted in: of all, or a sample."""
        told: Iterable[int] = range(len(rows))
        if self._sample:
            spread = range(0, len(rows), len(rows) // SAMPLES)
            told = {start + index for start in spread for index in range(len(newest)) if start + index < len(rows)}
            told = sorted(told.union(newest.values()))
        number, end = 0, position
        for index in told:
            while number <= index:
                position, end = end, block.data.find(b"\n", end) + 1
                number += 1
            events.append(step_event(template.reading(rows[index]), block.raw_offset(position)))

    def _line(
        self, block: Block, start: int, stop: int, lowered: bytes, replay: bool, events: list[Event]
    ) -> None:
        offset = block.raw_offset(start)
        again = replay and offset < self.decided
        if replay and not again:
            self.lines += 1
        gated = not lowered or GATE.search(lowered, start, stop) is not None
        if not gated and not self._tracebacks.open:
            return
        text = block.data[start:stop].decode("utf-8", "replace")
        if gated and SHM.search(text):
            self._shm_at = offset
        mark = MARK.search(text) if gated else None
        if mark or self._tracebacks.open:
            while fused := self._shapes.find(text) if gated else None:
                # Two threads wrote this line: a whole step line inside pieces of a traceback's.
                if fused.start():
                    self._tracebacks.fragment(text[: fused.start()], offset)
                self._text(fused[0], None, offset, again, events)
                text = text[fused.end() :]
                if not text.strip():
                    self._tracebacks.fragment(text, offset)
                    return
                mark = MARK.search(text)
        self._text(text, mark, offset, again, events, gated=gated)

    def _text(
        self, text: str, mark: re.Match[str] | None, offset: int, again: bool, events: list[Event],
        *, gated: bool = True,
    ) -> None:  # fmt: skip
        """One line of one thread. `again`: its figures have been counted before. `gated`: it may say something."""
        reading = self._grammar.read(text) if gated else None
        if reading is not None and reading.step is not None and reading.worker is not None:
            self._tracebacks.close(reading.worker)
            self._emit_findings(events)
        if reading is not None and not (mark or self._tracebacks.open):
            # A bar is drawn anew in every frame: it would leave no room for the shapes of lines.
            if reading.step is not None and reading.drawn is None and self._shapes.learn(text):
                self._templates.forget()
            if not again and not self._grammar.patterns:
                self._templates.learn(text, reading)
        if (mark or self._tracebacks.open) and self._tracebacks.take(text, offset, figures=reading is not None):
            # Another thread's line may have been cut short by a traceback: what stands before it still counts.
            reading = self._grammar.read(text[: mark.start()]) if mark else None
        self._emit_findings(events)
        if reading is None:
            return
        if reading.step is not None:
            self._tracebacks.note_step(reading.worker)
        if not again:
            events += self._progress.read(reading, offset, self._now)

    # --- findings ---------------------------------------------------------------------------------------------------

    def _emit_findings(self, events: list[Event]) -> None:
        for reader in self._tracebacks.ready():
            for one in self._complete(reader, cut_off=True):
                events += self._progress.find(one.finding, one.down, followed=one.followed, now=self._now)

    def _complete(self, reader: Reader, *, cut_off: bool) -> list[Complete]:
        first_step, shm_at = self._progress.first_step_offset, self._shm_at
        return reader.complete(
            now=self._now, cut_off=cut_off,
            before_first_step=first_step is None or first_step > reader.start,
            shm=shm_at is not None and 0 <= reader.start - shm_at <= HINT_BYTES,
        )  # fmt: skip
