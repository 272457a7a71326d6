"""Cleans log bytes as they stream: colour codes, NULs, backspaces, carriage returns and bad UTF-8.

`Cleaner` serves `specctl logs`, which pipes cleaned lines to grep and has to say where a match stands in the file;
`clean_lines` serves the scanner. Bytes that need nothing are passed through after a few searches at memory speed.
Line breaks are LF, CR LF, and a lone CR (a progress bar's frames are lines). Offsets are raw byte offsets in the file.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate

PIECE_BYTES = 1 << 20
"""A line longer than this leaves the cleaner in pieces, so that memory stays bounded."""
GIVE_UP_BYTES = 4 << 20
WINDOW_BYTES = 4096
"""Longer than any escape sequence that ESCAPE drops whole."""

# CSI; OSC, DCS and the like up to their terminator, never across a line; charset and other two-byte escapes. It begins
# with a literal, so that what lies between escapes is passed over at memory speed.
ESCAPE = re.compile(
    rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]?|[\]PX^_][^\x07\x1b\r\n]{0,2048}(?:\x07|\x1b\\)|[ -/]{1,8}[0-~]?|[0-~])?"
)
DROPPED = b"\0\b"


def is_clean(data: bytes) -> bool:
    """Whether `data` holds nothing that cleaning would change (a line's own LF aside)."""
    if b"\x1b" in data or b"\r" in data or b"\0" in data or b"\b" in data:
        return False
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def scrub(data: bytes) -> bytes:
    """`data` with bad UTF-8 repaired and escapes, NULs and backspaces dropped; line breaks are left alone."""
    if not data.isascii():
        # Repaired before escapes go: a dropped escape must not join two halves into a character that was never there.
        try:
            data.decode()
        except UnicodeDecodeError:
            data = data.decode("utf-8", "replace").encode()
    if b"\x1b" in data:
        data = ESCAPE.sub(b"", data)
    # After the escapes, not before: a NUL ends one that it stands in.
    return data.translate(None, DROPPED) if b"\0" in data or b"\b" in data else data


class Block:
    """Cleaned bytes and where their lines stand in the file.

    `data` is whole lines, each ending in LF, except where a very long line leaves in pieces and at the end of a file.
    """

    __slots__ = ("_index", "_raw", "data", "offset")

    def __init__(
        self, data: bytes, offset: int, raw: bytes | None = None, index: tuple[array[int], array[int]] | None = None
    ) -> None:
        """`offset`: where the first byte stands in the file. `raw`: what stands there, the same lines as `data`; or
        `index`, what came of it; neither: `data` is the file's own bytes."""
        self.data, self.offset, self._raw, self._index = data, offset, raw, index

    @property
    def verbatim(self) -> bool:
        """Whether `data` is the file's own bytes: positions in it and offsets in the file run alike."""
        return self._raw is None and self._index is None

    @property
    def index(self) -> tuple[array[int], array[int]]:
        """Where each line starts: positions in `data`, and offsets in the file. Made when it is asked for."""
        if self._index is None:
            raw = self.data if self._raw is None else self._raw
            offsets = _starts(raw, self.offset)
            offsets.pop()
            self._index, self._raw = (_starts(self.data, 0)[: len(offsets)], offsets), None
        return self._index

    def raw_offset(self, position: int) -> int:
        """Raw offset of the line start that stands at `position` of `data` (of the line around it, when cleaned)."""
        if self.verbatim:
            return self.offset + position
        positions, offsets = self.index
        return offsets[max(0, bisect_right(positions, position) - 1)]

    def part(self, start: int, stop: int) -> Block:
        """The lines, or the pieces of lines, from `start` to `stop` of `data`."""
        if self.verbatim:
            return Block(self.data[start:stop], self.offset + start)
        positions, offsets = self.index
        first, last = bisect_left(positions, start), bisect_left(positions, stop)
        moved = array("Q", (position - start for position in positions[first:last]))
        return Block(self.data[start:stop], self.raw_offset(start), index=(moved, offsets[first:last]))


def _starts(data: bytes, first: int) -> array[int]:
    """Where each line starts, and where the last one ends."""
    return array("Q", accumulate(map(len, data.splitlines(True)), initial=first))


def clean_lines(raw: bytes, offset: int, *, line_limit: int | None = None) -> Block:
    """`raw`, whole lines that start at `offset` of the file, as a cleaned block.

    A line longer than `line_limit` keeps only its head and tail, half the limit each.
    """
    long = line_limit is not None and _has_long_line(raw, line_limit)
    if not long and is_clean(raw):
        return Block(raw, offset)
    data = raw
    if long and line_limit is not None:
        data = b"".join(_shortened(line, line_limit) for line in raw.splitlines(True))
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return Block(scrub(data), offset, raw)


def _shortened(line: bytes, limit: int) -> bytes:
    text = line.rstrip(b"\r\n")
    return shorten(text, limit) + line[len(text) :] if len(text) > limit else line


def shorten(line: bytes, limit: int) -> bytes:
    """Head and tail of a long line. The words at the cut go: half a number would be read as another number."""
    return join_ends(line[: limit // 2], line[-(limit // 2) :])


def join_ends(head: bytes, tail: bytes) -> bytes:
    """The two ends of a line whose middle is left out, as one line."""
    word = re.search(rb"[\w.,+-]*$", head[-256:])
    head = head[: len(head) - (len(word[0]) if word else 0)]
    word = re.match(rb"[\w.,+/-]*", tail[:256])
    return head + b" ... " + tail[word.end() if word else 0 :]


def _has_long_line(data: bytes, limit: int) -> bool:
    start = 0
    while len(data) - start > limit:
        stop = start + limit + 1
        end = max(data.rfind(b"\n", start, stop), data.rfind(b"\r", start, stop))
        if end < 0:
            return True
        start = end + 1
    return False


class Cleaner:
    """Feed raw bytes in any chunks, get cleaned blocks; joined, they are the same for any chunking."""

    def __init__(self, *, base_offset: int = 0) -> None:
        self._open = bytearray()
        self._offset = base_offset
        """Raw offset of the first byte of `_open`."""
        self._after_cr = False

    @property
    def offset(self) -> int:
        """Raw offset of the open line, or of what has not been handed out of it."""
        return self._offset

    def feed(self, data: bytes) -> list[Block]:
        if not data:
            return []
        if self._after_cr:
            self._after_cr = False
            if data[:1] == b"\n":  # the rest of a CR LF whose CR already ended the line
                data = data[1:]
                self._offset += 1
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        blocks = []
        if cut:
            self._after_cr = cut == len(data) and data.endswith(b"\r")
            blocks.append(self._emit(bytes(self._open) + data[:cut]))
            self._open = bytearray(data[cut:])
        else:
            self._open += data
        if len(self._open) > PIECE_BYTES:
            cut = _safe_cut(self._open)
            if cut:
                blocks.append(self._emit(bytes(self._open[:cut])))
                del self._open[:cut]
        return blocks

    def finish(self) -> list[Block]:
        """The open last line, if there is one; it gets no LF that the file does not have."""
        raw, self._open = bytes(self._open), bytearray()
        return [self._emit(raw)] if raw else []

    def _emit(self, raw: bytes) -> Block:
        block = clean_lines(raw, self._offset)
        self._offset += len(raw)
        return block


def _safe_cut(line: bytearray) -> int:
    """Where an unfinished line can be cut without cutting an escape or a character; 0: not yet."""
    window = len(line) - WINDOW_BYTES
    if line.find(b"\x1b", window) < 0:
        # Every escape that began earlier is over. A character starts at any byte that does not continue one.
        cut = len(line) - 1
        while cut > window and 0x80 <= line[cut] < 0xC0:
            cut -= 1
        return cut
    # A CSI never stands inside another escape.
    cut = line.rfind(b"\x1b[")
    return cut if cut > 0 else (len(line) if len(line) > GIVE_UP_BYTES else 0)


class OffsetMap:
    """Cleaned offsets to raw ones, over many blocks, for matches that come back in increasing order.

    `add` every block that was passed on; `raw` answers for a line start (what `grep -b` prints) and forgets what lies
    before it. A stretch of clean text costs one entry, however long it is.
    """

    def __init__(self) -> None:
        self._cleaned = array("Q")
        self._raw = array("Q")
        self._length = 0
        self._first = 0

    def add(self, block: Block) -> None:
        if block.verbatim:
            self._point(self._length, block.offset)
        else:
            for position, offset in zip(*block.index, strict=True):
                self._point(self._length + position, offset)
        self._length += len(block.data)

    def raw(self, cleaned_offset: int) -> int:
        """Raw offset of the line that starts at `cleaned_offset` of everything added so far."""
        self._first = max(0, bisect_right(self._cleaned, cleaned_offset, self._first) - 1)
        found = self._raw[self._first] + cleaned_offset - self._cleaned[self._first]
        if self._first > 65536:
            del self._cleaned[: self._first], self._raw[: self._first]
            self._first = 0
        return found

    def _point(self, cleaned: int, raw: int) -> None:
        if self._cleaned and self._raw[-1] - self._cleaned[-1] == raw - cleaned:
            return
        self._cleaned.append(cleaned)
        self._raw.append(raw)
