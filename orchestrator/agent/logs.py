"""`logs`: lines of this run's logs, and of nothing else. Identity first, then cleaning, then grep, then frames."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from orchestrator.agent import records
from orchestrator.agent.foreign import locate
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.probe import probe
from orchestrator.agent.search import Hit, Pattern, Search
from orchestrator.logscan.clean import Block, Cleaner
from orchestrator.model import EarlierFile, ForeignLog, Probe, to_json

READ_BYTES = 1 << 20
FRAME_BYTES = 256 << 10
TAIL_BYTES = 16 << 20
"""The last lines of a log are looked for in its last so many bytes, and in all of it if that holds too few."""
SECTIONS_LIMIT = 128
HEARTBEAT_S = 2.0
POLL_S = 0.1
LOOK_S = 0.5


def run(call: Call) -> None:
    run_id = str(call.request["run_id"])
    seen = probe(call, [run_id], time.time())
    if not seen:
        raise Refusal("notfound", f"there is no run {run_id} in {call.paths.workdir}")
    attempt = call.request.get("attempt")
    if attempt is not None and attempt != seen[0].attempt:
        raise Refusal("notfound", f"{run_id} has no attempt {attempt}; its newest is {seen[0].attempt}")
    Reader(call, seen[0]).run()


class Section:
    """One log file of the run, from the byte on that is this run's (to the byte `end`, if the rest is not)."""

    def __init__(self, path: str, base: int, *, foreign: bool = False, end: int | None = None) -> None:
        """Raises `OSError` without the file."""
        self.path, self.foreign, self.end = path, foreign, end
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        self.key = (found.st_dev, found.st_ino)
        self.base = self.offset = base
        self.cleaner = Cleaner(base_offset=base)
        self.lines = 0
        self.open_line = False
        self.parts: list[Block] = []
        """A very long line, so far: the cleaner hands it out in pieces."""
        self.search: Search | None = None

    @property
    def last_byte_at(self) -> float | None:
        """When the file last grew by a byte of this run's; None if it holds none, or others' too."""
        found = os.fstat(self.fd)
        return found.st_mtime if found.st_size > self.base and self.end is None else None

    def skip_to(self, offset: int, lines: int) -> None:
        """Start in the middle: at `offset` a line begins, and `lines` lines stand before it."""
        self.offset, self.lines, self.parts = offset, lines, []
        self.cleaner = Cleaner(base_offset=offset)

    def read(self) -> Iterator[Block]:
        """Cleaned blocks of what is there now and has not been read; all of it, when the file was emptied meanwhile."""
        if self.foreign and self.end is None and os.fstat(self.fd).st_size < self.offset:
            yield from self.finish()
            self.base = self.offset = 0
            self.cleaner = Cleaner()
        while data := os.pread(self.fd, self._room(), self.offset):
            self.offset += len(data)
            yield from self._count(self.cleaner.feed(data))

    def _room(self) -> int:
        return READ_BYTES if self.end is None else max(0, min(READ_BYTES, self.end - self.offset))

    def hits(self, blocks: Iterable[Block], *, over: bool) -> Iterator[Hit]:
        """Every line of these blocks, whole; `over`: no more will come of the last one."""
        for block in blocks:
            position = 0
            for line in block.data.splitlines(True):
                part = Block(line, block.raw_offset(position))
                position += len(line)
                self.parts.append(part)
                if line.endswith(b"\n"):
                    yield self._whole()
        if over and self.parts:
            yield self._whole()

    def _whole(self) -> Hit:
        parts, self.parts = self.parts, []
        return Hit(parts[0].offset, b"".join(part.data for part in parts).rstrip(b"\n"), True)

    def finish(self) -> Iterator[Block]:
        """The open last line."""
        yield from self._count(self.cleaner.finish())
        self.lines += self.open_line
        self.open_line = False

    def _count(self, blocks: Iterable[Block]) -> Iterator[Block]:
        for block in blocks:
            self.lines += block.data.count(b"\n")
            self.open_line = not block.data.endswith(b"\n")
            yield block


class Reader:
    """Answers one `logs` request."""

    def __init__(self, call: Call, seen: Probe) -> None:
        request = call.request
        self.call, self.seen = call, seen
        self.paths = call.paths.run(seen.run_id)
        self.last: int | None = request.get("last")
        self.follow = bool(request.get("follow"))
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
        self.sections: list[Section] = []
        self.lines_before = 0
        """Lines of sections that are closed."""
        self.matched = 0
        self.batch: list[dict[str, Any]] = []
        self.batch_bytes = 0
        self.spoke_at = time.monotonic()

    def run(self) -> None:
        self._open()
        held: deque[tuple[Section, Hit]] | None = deque(maxlen=self.last) if self.last is not None else None
        for section in self._read_sections(held):
            for hit in self._initial(section):
                self.matched += hit.match
                if held is None:
                    self._send(section, hit)
                else:
                    held.append((section, hit))
        for section, hit in held or ():
            self._send(section, hit)
        if self.last is not None and self.pattern is None:
            # What was asked for; of no line at all, how many there are.
            self.matched = len(held or ()) if self.last else sum(section.lines for section in self.sections)
        self._flush()
        if self.follow:
            self._follow()
        last = probe(self.call, [self.seen.run_id], time.time())[0]
        self.call.emit({
            "final": True, "probe": to_json(last), "matched": self.matched,
            "total": self.lines_before + sum(section.lines for section in self.sections),
            "last_byte_at": max(filter(None, (section.last_byte_at for section in self.sections)), default=None),
            "foreign": [to_json(log) for log in last.foreign_logs],
        })  # fmt: skip

    def _read_sections(self, held: deque[tuple[Section, Hit]] | None) -> Iterator[Section]:
        """Each section, from where it is worth reading; again from its start when its end held too few lines."""
        for section in self.sections:
            start = section.offset
            self._skip(section)
            skipped = section.offset != start
            yield section
            if skipped and held is not None and len(held) < (self.last or 0):
                section.skip_to(start, 0)
                held.clear()
                yield section

    # --- which files ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        log = self.seen.log
        if not log.verified:
            ended = self.seen.exit
            if ended is not None and ended.never_started is not None and not os.path.exists(log.path):
                return  # there is no log, and there never was
            raise Refusal(
                "identity",
                f"{log.path} cannot be shown as this run's log: {log.why}",
                "specctl status tells what is known of the run",
            )
        self.sections.append(Section(log.path, log.header_bytes))
        self._open_foreign(self.seen.foreign_logs)

    def _open_foreign(self, logs: Iterable[ForeignLog]) -> None:
        """Each log of the program's, and what it was rotated from, wherever these files are now."""
        known = {section.key for section in self.sections}
        for log in logs:
            files = [*log.earlier, EarlierFile(device=log.device, inode=log.inode, base=log.base)]
            for one in files:
                key, base, end = (one.device, one.inode), one.base, log.until if one is files[-1] else None
                path = locate(log.path, key, one.born) if key not in known else None
                if path is None:
                    continue  # gone, or known already
                try:
                    section = Section(path, base, foreign=True, end=end)
                except OSError:
                    continue
                if section.key == key and os.fstat(section.fd).st_size >= base:
                    self.sections.append(section)
                    known.add(key)
                else:
                    os.close(section.fd)  # the name belongs to another file by now: not this run's
            for section in self.sections:
                if section.key == (log.device, log.inode) and section.foreign:
                    section.end = log.until
        while len(self.sections) > SECTIONS_LIMIT:  # a log that is rotated while it is followed
            oldest = self.sections.pop(1)
            self.lines_before += oldest.lines
            os.close(oldest.fd)

    def _skip(self, section: Section) -> None:
        """For the last lines of a large log, start near its end: the supervisor's index says at which line."""
        if self.last is None or self.pattern is not None or section.foreign:
            return
        far_enough = os.fstat(section.fd).st_size - TAIL_BYTES
        mark = records.last_mark(self.paths.index(self.seen.attempt), before=far_enough)
        if mark is not None and mark[0] > section.offset:
            # The header is a line of the file, and none of the run's.
            section.skip_to(mark[0], mark[1] - 1)

    # --- what is there already --------------------------------------------------------------------------------------

    def _initial(self, section: Section) -> Iterator[Hit]:
        if self.pattern is None:
            yield from section.hits(self._blocks(section), over=not self.follow)
            return
        search = Search(self.pattern)
        for block in self._blocks(section):
            search.feed(block)
            yield from search.hits()
        yield from search.finish()

    def _blocks(self, section: Section) -> Iterator[Block]:
        yield from section.read()
        if not self.follow:  # a line that may still grow is not shown in two halves
            yield from section.finish()

    # --- what is to come --------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        looked_at = 0.0
        while True:
            over = False
            if time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                over = self._is_over()
                logs = [one.foreign for one in records.followed(self.paths, self.seen.nonce) if one.foreign]
                self._open_foreign(logs)
            for section in self.sections:
                self._advance(section, over)
            self._flush()
            if over:
                return
            if time.monotonic() - self.spoke_at >= HEARTBEAT_S:
                self._emit({})
            time.sleep(POLL_S)

    def _advance(self, section: Section, over: bool) -> None:
        blocks = list(section.read())
        if over:
            blocks += section.finish()
        if self.pattern is None:
            for hit in section.hits(blocks, over=over):
                self.matched += 1
                self._send(section, hit)
            return
        if section.search is None:
            section.search = Search(self.pattern, follow=True)
        for block in blocks:
            section.search.feed(block)
        if blocks:
            section.search.flush()
        for hit in section.search.finish() if over else section.search.hits():
            self.matched += hit.match
            self._send(section, hit)

    def _is_over(self) -> bool:
        """Nothing will be written any more: an end is on record, or nothing of the run is alive to write one."""
        if records.exit_record(self.paths) is not None:
            return True
        seen = probe(self.call, [self.seen.run_id], time.time())[0]
        return seen.exit is not None or (not seen.supervisor_alive and not seen.tree)

    # --- frames -----------------------------------------------------------------------------------------------------

    def _send(self, section: Section, hit: Hit) -> None:
        text = hit.text.decode("utf-8", "replace")
        self.batch.append({"file": section.path, "offset": hit.offset, "line": text, "match": hit.match})
        self.batch_bytes += len(text)
        if self.batch_bytes > FRAME_BYTES or len(self.batch) >= 2000:
            self._flush()

    def _flush(self) -> None:
        if self.batch:
            self._emit({"lines": self.batch})
            self.batch, self.batch_bytes = [], 0

    def _emit(self, frame: dict[str, Any]) -> None:
        self.call.emit(frame)
        self.spoke_at = time.monotonic()
