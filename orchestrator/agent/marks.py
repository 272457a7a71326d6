"""The marks of a run's index: when which byte of a log had been written, read from the newest mark backwards.

A mark says that everything before its offset had been written by its time. So what was written since a time begins at
the last mark up to that time, or a little later: the marks are as precise as the supervisor wrote them, and no more.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.agent import files
from orchestrator.model import Misfit, from_json

CHUNK_BYTES = 64 << 10
MARK_BYTES = 4096
INDEX_LIMIT_BYTES = 64 << 20
LINE = re.compile(
    rb'^\{"time": [^,]+, "offset": (?P<offset>\d{1,18}), "lines": (?P<lines>\d{1,18}), "clean": (?P<clean>true|false)'
    rb'(?:, "log": \[(?P<device>\d{1,20}), (?P<inode>\d{1,20})\])?\}$', re.MULTILINE,
)  # fmt: skip
"""A mark as the supervisor writes it; of a long run there are more of them than are worth the parsing."""

Key = tuple[int, int]
"""(device, inode)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A line of the index. `lines` lines stand before the byte `offset`, at which one begins."""

    time: float
    offset: int
    lines: int
    log: list[int] | None = None
    """Device and inode of a log of the program's; None: the run's own."""


def since(index: str, log: Key | None, at: float) -> Mark | None:
    """The last mark of the log up to the time `at`; None when what is in it now was all written after `at`."""
    smallest: int | None = None
    for mark in backwards(index, log):
        if mark.time <= at:
            # A log that began again after that mark holds nothing older than `at`.
            return mark if smallest is None or mark.offset <= smallest else None
        smallest = mark.offset if smallest is None else min(smallest, mark.offset)
    return None


def before(index: str, log: Key | None, offset: int) -> Mark | None:
    """The last mark of the log up to the byte `offset`."""
    return next((mark for mark in backwards(index, log) if mark.offset <= offset), None)


def after(index: str, log: Key | None, offsets: list[int]) -> dict[int, float]:
    """For each of these bytes the time of the first mark beyond it: by then it had been written."""
    found: dict[int, float] = {}
    wanted = sorted(offsets, reverse=True)
    later: float | None = None
    for mark in backwards(index, log):
        while wanted and wanted[0] >= mark.offset:
            if later is not None:
                found[wanted[0]] = later
            wanted.pop(0)
        if not wanted:
            break
        later = mark.time
    if later is not None:
        found.update(dict.fromkeys(wanted, later))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A part of a log, whole lines: up to which byte, how many lines, and whether they are as `logs` shows them."""

    end: int
    lines: int
    clean: bool


def stretches(index: str, log: Key | None, start: int, lines: int | None, limit: int) -> list[Stretch]:
    """What the marks say of a log from the byte `start` on, up to `limit` at most. `lines`: how many stand before it,
    if that is known. Neighbours of one kind are one. Empty when there is nothing that can be believed."""
    result: list[Stretch] = []
    known = start
    for found in LINE.finditer(_content(index)):
        if (None if found["device"] is None else (int(found["device"]), int(found["inode"]))) != log:
            continue
        end, count = int(found["offset"]), int(found["lines"])
        if end < known and result:
            return []  # the log has begun again
        if end <= known:
            lines = count if end == known else lines
            continue
        if end > limit:
            break
        more = -1 if lines is None else count - lines
        clean = found["clean"] == b"true" and more >= 0
        known, lines = end, count
        if result and result[-1].clean == clean:
            more += result.pop().lines
        result.append(Stretch(end=end, lines=more, clean=clean))
    return result


def _content(path: str) -> bytes:
    try:
        with os.fdopen(files.open_regular(path), "rb") as file:
            return file.read(INDEX_LIMIT_BYTES)
    except OSError:
        return b""


def backwards(index: str, log: Key | None) -> Iterator[Mark]:
    """The marks of one log, the newest first. A line that is none is passed over: a program may write there."""
    for line in _lines_backwards(index):
        try:
            mark = from_json(Mark, json.loads(line))
        except (Misfit, ValueError, RecursionError):
            continue
        if (None if mark.log is None else tuple(mark.log)) == log:
            yield mark


def _lines_backwards(path: str) -> Iterator[bytes]:
    try:
        fd = files.open_regular(path)
    except OSError:
        return
    with os.fdopen(fd, "rb"):
        end, rest = os.fstat(fd).st_size, b""
        while end > 0:
            start = max(0, end - CHUNK_BYTES)
            chunk = os.pread(fd, end - start, start) + rest
            first, *lines = chunk.split(b"\n")
            yield from (line for line in reversed(lines) if 0 < len(line) < MARK_BYTES)
            rest, end = first[:MARK_BYTES], start
        if rest:
            yield rest
