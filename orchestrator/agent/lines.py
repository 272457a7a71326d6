"""Lines of log files as `logs` reads them: cleaned, whole, in large pieces, each with its place in the raw file.

`Section` is one file of a run, from the byte on that is this run's. It notices when what it has read is no longer
there: a log that was emptied is to be read from its beginning again, and said to be.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from orchestrator.logscan.clean import Block, Cleaner

READ_BYTES = 256 << 10
PROOF_BYTES = 256
"""So many of the bytes read last show, when a file is written again, that it was only added to."""
REREAD_BYTES = 16 << 20
"""A longer file whose last bytes were changed is one that is written within: it is read on at its end."""


@dataclass(slots=True)
class Lines:
    """Whole lines of one file, each ending in LF."""

    data: bytes
    count: int
    at: int | None = None
    """Raw offset of the first byte, where the lines stand together in the raw file as they are here."""
    offsets: list[int] | None = None
    """Else the raw offset of each line; None too, where nobody has asked."""
    context: list[int] = field(default_factory=list)
    """Which of them are only context of a match."""

    @classmethod
    def of(cls, block: Block) -> Lines:
        data = block.data if block.data.endswith(b"\n") else block.data + b"\n"
        offsets = None if block.verbatim else block.index[1].tolist()
        return cls(data, data.count(b"\n"), block.offset if offsets is None else None, offsets)

    @property
    def matched(self) -> int:
        return self.count - len(self.context)

    @property
    def last(self) -> int | None:
        """Raw offset of the last line."""
        if self.offsets is not None:
            return self.offsets[-1]
        return None if self.at is None else self.at + self.data.rfind(b"\n", 0, len(self.data) - 1) + 1

    @property
    def first(self) -> int | None:
        return self.at if self.offsets is None else self.offsets[0]

    def without(self, number: int) -> Lines:
        """All but the first `number` of them."""
        if number <= 0:
            return self
        position = 0
        for _ in range(number):
            position = self.data.find(b"\n", position) + 1
        return Lines(
            self.data[position:], self.count - number, None if self.at is None else self.at + position,
            None if self.offsets is None else self.offsets[number:],
            [index - number for index in self.context if index >= number],
        )  # fmt: skip

    def from_offset(self, offset: int) -> Lines:
        """Those that begin at the raw offset or later."""
        if self.offsets is not None:
            return self.without(bisect_left(self.offsets, offset))
        if self.at is None or self.at >= offset:
            return self
        # The line that begins at or after `offset` follows the first line break that ends there or later.
        cut = self.data.find(b"\n", offset - self.at - 1) + 1
        return self.without(self.data.count(b"\n", 0, cut) if cut else self.count)


class Section:
    """One log file of the run, from the byte `base` on that is this run's (to the byte `end`, if the rest is not)."""

    def __init__(
        self, path: str, base: int, *, log: str | None = None, end: int | None = None, restarts: int = 0
    ) -> None:
        """`log`: the name under which the program knows a log of its own; None: the run's log. Raises `OSError`."""
        self.path, self.log, self.foreign, self.end, self.restarts = path, log, log is not None, end, restarts
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        self.key = (found.st_dev, found.st_ino)
        self.base = self.start = self.wanted = base
        """`start`: where it is read and counted from; `wanted`: what begins before it has been shown already."""
        self._head = b"" if self.foreign else os.pread(self.fd, base, 0)
        self._seen, self._proof = (-1, -1), b""
        self.lines = 0
        self._open_line = False
        self._parts: list[Block] = []
        """A very long line, so far: the cleaner hands it out in pieces."""
        self.number: int | None = None
        """What it is called in frames."""
        self.mark_at: float | None = None
        """The time of the mark it is read from."""
        self._restart(base)

    def _restart(self, offset: int) -> None:
        self.offset, self._proof, self._parts = offset, b"", []
        self._cleaner = Cleaner(base_offset=offset)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def modified_at(self) -> float:
        return os.fstat(self.fd).st_mtime

    @property
    def has_own_bytes(self) -> bool:
        """Whether it holds bytes of this run's, and of nobody else since."""
        return self.size > self.base and self.end is None

    def skip_to(self, offset: int, lines: int) -> None:
        """Start in the middle: at `offset` a line begins, and `lines` of those that count stand before it."""
        if os.pread(self.fd, 2, max(0, offset - 1)) == b"\r\n":
            offset += 1  # the line break that ended the line before is not over yet
        self.lines = lines
        self._restart(offset)

    def read(self, limit: int | None = None) -> Iterator[Block]:
        """Cleaned blocks of what is there now (up to the byte `limit`) and has not been read."""
        while data := os.pread(self.fd, self._room(limit), self.offset):
            self.offset += len(data)
            self._proof = (self._proof + data[-PROOF_BYTES:])[-PROOF_BYTES:]
            yield from self._count(self._cleaner.feed(data))

    def pass_over(self, end: int, lines: int) -> tuple[int, int] | None:
        """Takes what stands up to `end`, `lines` whole lines, as read by somebody else; returns from where to where.

        None, and nothing is taken, where no line ends just there, or begins here.
        """
        start = self.offset
        if self._parts or self._cleaner.offset != start or os.pread(self.fd, 1, end - 1) != b"\n":
            return None
        before = os.pread(self.fd, 2, max(0, start - 1))
        if before == b"\r\n":
            start += 1  # the line break that ended the line before is not over yet
        elif start and before[:1] not in (b"\r", b"\n"):
            return None
        self.lines += lines
        self._restart(end)
        self._proof = os.pread(self.fd, PROOF_BYTES, end - PROOF_BYTES) if end > PROOF_BYTES else b""
        return start, end

    def _room(self, limit: int | None) -> int:
        ends = [end - self.offset for end in (self.end, limit) if end is not None]
        return max(0, min([READ_BYTES, *ends]))

    def finish(self) -> Iterator[Block]:
        """The open last line."""
        yield from self._count(self._cleaner.finish())
        self.lines += self._open_line
        self._open_line = False

    def _count(self, blocks: Iterable[Block]) -> Iterator[Block]:
        for block in blocks:
            self.lines += block.data.count(b"\n")
            self._open_line = not block.data.endswith(b"\n")
            yield block

    def whole(self, blocks: Iterable[Block], *, over: bool) -> Iterator[Lines]:
        """The lines of these blocks; `over`: no more will come of the last one."""
        for block in blocks:
            if self._parts:
                cut = block.data.find(b"\n") + 1
                self._parts.append(block if not cut else block.part(0, cut))
                if not cut:
                    continue
                yield self._joined()
                block = block.part(cut, len(block.data))
            cut = block.data.rfind(b"\n") + 1
            if cut < len(block.data):
                self._parts = [block.part(cut, len(block.data))]
                block = block.part(0, cut)
            if block.data:
                yield Lines.of(block)
        if over and self._parts:
            yield self._joined()

    def _joined(self) -> Lines:
        parts, self._parts = self._parts, []
        data = b"".join(part.data for part in parts)
        return Lines(data if data.endswith(b"\n") else data + b"\n", 1, None, [parts[0].offset])

    @property
    def position(self) -> int:
        """Raw offset of the open line: all before it has been handed out."""
        return self._parts[0].offset if self._parts else self._cleaner.offset

    def lost(self) -> tuple[str, int] | None:
        """How the file lost what had been read of it, if it did, and from which byte on it is to be read now."""
        found = os.fstat(self.fd)
        seen, self._seen = self._seen, (found.st_size, found.st_mtime_ns)
        if seen == self._seen or self.end is not None:
            return None
        shorter = found.st_size < self.offset
        if self.foreign:
            proof = self._proof if found.st_size <= REREAD_BYTES else b""
            if shorter or os.pread(self.fd, len(proof), self.offset - len(proof)) != proof:
                return f"was emptied when {self.offset:,} bytes of it had been read", 0
        elif os.pread(self.fd, len(self._head), 0) != self._head:
            return f"was emptied when {self.offset:,} bytes of it had been read, and its header is gone", 0
        elif shorter:
            return f"was cut from {self.offset:,} bytes to {found.st_size:,}", found.st_size
        return None

    def begin_again(self, offset: int) -> None:
        self.base = min(self.base, offset)
        self.start = self.wanted = offset
        self._head = self._head if offset else b""
        self._restart(offset)
