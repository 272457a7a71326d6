"""`grep -E` over a part of a log that needs no cleaning: the kernel hands grep the file's own bytes.

Several greps search one piece each, the next ones ahead of the one whose lines are read, so that this is no slower than
a grep of the file itself. At most two at once: they run beside somebody's training.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from orchestrator.agent.lines import Lines
from orchestrator.agent.search import CHUNK_BYTES, OUTPUT, Pattern, environ
from orchestrator.logscan.clean import is_clean, scrub

PIECE_BYTES = 256 << 20
AT_ONCE = min(2, len(os.sched_getaffinity(0)))
SEND_BYTES = 8 << 20
PIPE_BYTES = 1 << 20
"""A pipe has 64 KiB by itself, and each end would wait for the other after every so many bytes."""
LINE_BYTES = 1 << 20
"""A piece ends with a line that is no longer than this; else the next piece is part of it."""
BEAT_S = 1.0
MOMENT_S = 0.003


def search_file(
    pattern: Pattern, fd: int, start: int, end: int, *, places: bool, beat: Callable[[], None]
) -> Iterator[Lines]:
    """The lines between two bytes of a file that match; `beat` is called now and then while there are none."""
    pieces, running = _pieces(fd, start, end), deque[_Piece]()
    while True:
        while len(running) < AT_ONCE and (piece := next(pieces, None)) is not None:
            running.append(_Piece(pattern, fd, *piece, places=places))
        if not running:
            return
        yield from running.popleft().found(beat)


def _pieces(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        stop = start + PIECE_BYTES
        while stop < end and (found := os.pread(fd, LINE_BYTES, stop - 1).find(b"\n")) < 0:
            stop += PIECE_BYTES
        stop = stop + found if stop < end else end
        yield start, stop
        start = stop


class _Piece:
    """One grep."""

    def __init__(self, pattern: Pattern, fd: int, start: int, end: int, *, places: bool) -> None:
        self._fd, self._start, self._end, self._places = fd, start, end, places
        self._process = subprocess.Popen(
            pattern.argv(places=places, follow=False), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ(),
            bufsize=0,
        )  # fmt: skip
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(OSError):  # of this many pages a user has no more: it goes on, in smaller steps
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()

    def _feed(self) -> None:
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            at = self._start
            while at < self._end:
                sent = os.sendfile(pipe.fileno(), self._fd, at, min(SEND_BYTES, self._end - at))
                if not sent:
                    return  # the file has become shorter
                at += sent

    def found(self, beat: Callable[[], None]) -> Iterator[Lines]:
        assert self._process.stdout is not None
        rest = bytearray()
        with self._process.stdout as pipe:
            while True:
                while not select.select([pipe], [], [], BEAT_S)[0]:
                    beat()
                chunk = self._read(pipe.fileno())
                cut = chunk.rfind(b"\n") + 1
                if cut:
                    yield self._lines(b"".join((rest, memoryview(chunk)[:cut])))
                    rest.clear()
                rest += memoryview(chunk)[cut:]
                if not chunk:
                    break
        if rest:
            yield self._lines(bytes(rest) + b"\n")
        self._feeder.join()
        self._process.wait()

    def _read(self, fd: int) -> bytes:
        """A chunk, which what is read in pieces of 4 KiB, as grep writes them, is given a moment to become."""
        chunk = os.read(fd, CHUNK_BYTES)
        if chunk and len(chunk) < CHUNK_BYTES // 2:
            time.sleep(MOMENT_S)
            if select.select([fd], [], [], 0)[0]:
                chunk += os.read(fd, CHUNK_BYTES)
        return chunk

    def _lines(self, data: bytes) -> Lines:
        if not is_clean(data):
            data = scrub(data.replace(b"\r", b""))  # the index is a file of the run's own directory: not to be trusted
        if not self._places:
            return Lines(data, data.count(b"\n"))
        hits = OUTPUT.findall(data)
        offsets = [self._start + int(place) for place, _, _ in hits]
        return Lines(b"".join([text for _, _, text in hits]), len(hits), None, offsets)
