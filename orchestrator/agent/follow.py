"""Reading a log as it grows, the run's own or one of the program's, into events and a summary of constant size."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from orchestrator.agent.foreign import birth_time
from orchestrator.logscan import Event, Scanner
from orchestrator.model import EarlierFile, FollowedLog, ForeignLog, LogSummary

READ_BYTES = 1 << 20
FOLLOWED_LIMIT = 64
"""So many logs of the program's are followed at once."""
SETTLE_S = 0.5
"""Silence after which a traceback that has its last line is taken to be over."""
HEAD_BYTES = 4096
PROOF_BYTES = 256
"""So many of the bytes read last show, when a file is written again, that it was only added to."""
REREAD_BYTES = 16 << 20
"""A file that is longer, and whose last bytes were changed, is one that is written within: it is read on at its end."""
EARLIER = 16
"""So many files that a log was rotated from are remembered, to be shown by `logs`."""
COPIED_LIMIT = 1000


class Follower:
    """One log and what has been read out of it.

    The run's own log is one file from its first byte to its last. A log of the program's may be emptied or replaced
    under its name: it is then read from its beginning again, and its figures go on.
    """

    def __init__(
        self,
        path: str,
        *,
        foreign: ForeignLog | None = None,
        summary: LogSummary | None = None,
        patterns: Mapping[str, str] | None = None,
        grew_at: float | None = None,
        copies: Callable[[set[bytes]], set[bytes]] | None = None,
    ) -> None:
        """`copies`: asked, of lines just read, which of them are copies of another log's old ones; these say nothing.

        Raises `OSError` when there is no such file, and when it is not the one that `foreign` means.
        """
        self.path, self.foreign, self._patterns, self._copies = path, foreign, patterns, copies
        base = foreign.base if foreign else 0
        self.scanner = Scanner(summary=summary, patterns=patterns, base_offset=base, sample=True)
        self.offset = max(base, self.scanner.resume_offset)
        self.lost: str | None = None
        """Why reading ended early, or None."""
        self._waiting = b""
        """An open line whose end decides whether it is a copy."""
        self.copied: list[tuple[int, int]] = []
        """From where to where copies stand; whoever writes that down clears it."""
        self._copied_last: deque[tuple[int, int]] = deque(maxlen=COPIED_LIMIT)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if foreign is not None and (found.st_dev, found.st_ino) != (foreign.device, foreign.inode):
            os.close(self._fd)
            raise FileNotFoundError(2, "replaced by another file", path)
        self._head = b"" if foreign is not None else os.pread(self._fd, HEAD_BYTES, 0).partition(b"\n")[0]
        """The first line of the run's own log, which says whose it is."""
        self._proof: bytes | None = None
        self._seen = (-1, -1)
        self._heard_at = max((summary.step_at or 0.0, summary.phase_at or 0.0)) if summary else 0.0
        """When there was nothing more to read: what is read next was written later."""
        self._grew_at, self._settled = grew_at or 0.0, True
        self._clean = self._state()
        self.begun_again = False
        """Set when the log begins again; whoever says so clears it."""

    def advance(self, now: float, *, budget_bytes: int = 8 * READ_BYTES) -> list[Event]:
        """The events of what has been written since the last call, reading at most about `budget_bytes`.

        They happened when the file was last written, which may be long before `now` when nobody had read it since.
        """
        events: list[Event] = []
        if self.lost is not None or self.shared:
            return events
        found = os.fstat(self._fd)
        at = min(now, max(found.st_mtime, self._heard_at))
        if (found.st_size, found.st_mtime_ns) != self._seen and self._rewritten(found.st_size):
            if self.foreign is None:
                self.lost = f"emptied or overwritten when {self.offset} bytes of it had been read"
                return events
            events += self.scanner.finish(at)
            self._begin_again(
                dataclasses.replace(
                    self.foreign, base=0, truncated=self.foreign.before > 0, restarts=self.foreign.restarts + 1
                )
            )
        self._seen = (found.st_size, found.st_mtime_ns)
        while budget_bytes > 0:
            data = os.pread(self._fd, READ_BYTES, self.offset)
            if not data:
                self._heard_at = now
                if not self._settled and now - self._grew_at >= SETTLE_S:
                    self._settled = True
                    events += self.scanner.settle(at)
                break
            self._grew_at, self._settled = at, False
            self.offset += len(data)
            budget_bytes -= len(data)
            self._proof = ((self._proof or b"") + data[-PROOF_BYTES:])[-PROOF_BYTES:]
            events += self.scanner.feed(self._without_copies(data), at)
        return events

    def finish(self, now: float) -> list[Event]:
        """The rest, and what an end of the log makes certain: the open last line, an open traceback."""
        events = self.advance(now, budget_bytes=1 << 62)
        if self.shared:
            return events
        at = min(now, max(os.fstat(self._fd).st_mtime, self._heard_at))
        rest, self._waiting = self._waiting, b""
        return events + self.scanner.feed(self._blank(rest, self.offset - len(rest)), at) + self.scanner.finish(at)

    @property
    def behind(self) -> bool:
        """Whether there is more to read now."""
        return self.lost is None and not self.shared and os.fstat(self._fd).st_size > self.offset

    @property
    def written_at_ns(self) -> int:
        return os.fstat(self._fd).st_mtime_ns

    def end(self, limit_bytes: int) -> tuple[bytes, bool]:
        """The last bytes of what has been read and is this run's, copied lines blanked out; and whether they begin
        where a line does."""
        if self.lost is not None or self.shared:
            return b"", True
        first = self.foreign.base if self.foreign else len(self._head) + 1
        start, end = max(first, self.offset - limit_bytes), self.offset
        if self._waiting and self._copies is not None and self._copies({self._waiting.rstrip(b"\r\n")}):
            end -= len(self._waiting)
        data = os.pread(self._fd, max(0, end - start), start)
        return blanked(data, start, self._copied_last), start == first

    def followed(self) -> FollowedLog:
        grew_at = self._grew_at or None
        if self.foreign is None:
            return FollowedLog(summary=self.scanner.summary(), grew_at=grew_at)
        found = os.fstat(self._fd)
        foreign = dataclasses.replace(self.foreign, size=found.st_size, modified_at=found.st_mtime)
        summary = self._clean[0] if self.shared else self.scanner.summary()
        return FollowedLog(summary=summary, foreign=foreign, grew_at=grew_at)

    def close(self) -> None:
        os.close(self._fd)

    # --- a log that is not the run's alone --------------------------------------------------------------------------

    @property
    def key(self) -> tuple[int, int]:
        """(device, inode) of a log of the program's."""
        assert self.foreign is not None
        return self.foreign.device, self.foreign.inode

    @property
    def shared(self) -> bool:
        return self.foreign is not None and self.foreign.shared is not None

    def note_unshared(self) -> None:
        """Nobody else writes the file: what has been read so far is this run's."""
        self._clean = self._state()

    def share(self, by: str) -> None:
        """Somebody else writes it: from where it was last seen to be the run's alone, it says nothing any more."""
        assert self.foreign is not None
        self.foreign = dataclasses.replace(self.foreign, shared=by, until=self._clean[1])

    def _state(self) -> tuple[LogSummary, int]:
        return self.scanner.summary(), self.offset

    # --- a log that begins again ------------------------------------------------------------------------------------

    def rotate(self, foreign: ForeignLog, now: float) -> list[Event]:
        """Reads the file to its end and goes on with the one that has taken its name. Raises `OSError` without it."""
        assert self.foreign is not None
        fd = os.open(foreign.path, os.O_RDONLY | os.O_CLOEXEC)
        events = self.finish(now)
        gone = EarlierFile(
            device=self.foreign.device, inode=self.foreign.inode, base=self.foreign.base,
            born=birth_time(f"/proc/self/fd/{self._fd}"),
        )  # fmt: skip
        os.close(self._fd)
        self._fd = fd
        # An inode number that comes again is another file: the one that had it has been deleted.
        new = (foreign.device, foreign.inode)
        earlier = [one for one in [*self.foreign.earlier, gone] if (one.device, one.inode) != new]
        self._begin_again(
            dataclasses.replace(
                foreign, before=self.foreign.before, truncated=self.foreign.truncated, exact=self.foreign.exact,
                restarts=self.foreign.restarts + 1, earlier=earlier[-EARLIER:],
            )
        )  # fmt: skip
        return events

    def _begin_again(self, foreign: ForeignLog) -> None:
        self.foreign, self.offset, self._waiting, self._proof = foreign, foreign.base, b"", None
        self.begun_again = True
        summary = self.scanner.summary()
        stepped = summary.scan.first_step_offset is not None
        scan = dataclasses.replace(
            summary.scan, decided_offset=foreign.base, after_cr=False, shm_hint_offset=None,
            first_step_offset=foreign.base if stepped else None,
        )  # fmt: skip
        summary = dataclasses.replace(summary, offset=foreign.base, open_findings=[], scan=scan)
        self.scanner = Scanner(summary=summary, patterns=self._patterns, base_offset=foreign.base, sample=True)
        self._clean = self._state()

    def _rewritten(self, size: int) -> bool:
        """Whether the file was emptied: it is shorter than what was read, or its last bytes are no longer there."""
        if size < self.offset or os.pread(self._fd, len(self._head), 0) != self._head:
            return True
        if not self._proof or self.foreign is None or size > REREAD_BYTES:
            return False
        return os.pread(self._fd, len(self._proof), self.offset - len(self._proof)) != self._proof

    # --- a log that another one is copied into ----------------------------------------------------------------------

    def _without_copies(self, data: bytes) -> bytes:
        if self._copies is None:
            return data
        data = self._waiting + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut and len(data) >= READ_BYTES:
            cut = len(data)
        self._waiting = data[cut:]
        return self._blank(data[:cut], self.offset - len(data))

    def _blank(self, data: bytes, offset: int) -> bytes:
        """`data`, which stands at `offset`, without the copied lines."""
        if self._copies is None or not data:
            return data
        lines = data.splitlines(True)
        copied = self._copies({line.rstrip(b"\r\n") for line in lines})
        if not copied:
            return data
        ranges: list[tuple[int, int]] = []
        at = offset
        for line in lines:
            if line.rstrip(b"\r\n") in copied:
                start = ranges.pop()[0] if ranges and ranges[-1][1] == at else at
                ranges.append((start, at + len(line)))
            at += len(line)
        self.copied += ranges
        self._copied_last += ranges
        self.scanner.dirty = True  # what is blanked out here stands in the file as it was
        return blanked(data, offset, ranges)


def blanked(data: bytes, offset: int, ranges: Iterable[tuple[int, int]]) -> bytes:
    """`data`, which stands at `offset`, with what lies in `ranges` overwritten by spaces: where the rest stands, and
    how many lines there are, stays as it is."""
    result = bytearray(data)
    for start, end in ranges:
        start, end = max(0, start - offset), min(len(data), end - offset)
        if start < end:
            result[start:end] = re.sub(rb"[^\r\n]", b" ", data[start:end])
    return bytes(result)
