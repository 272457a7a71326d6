"""The content of files on its way: `Outgoing` reads and cuts, `Incoming` writes and verifies. Used by both sides.

What already lies where a file goes is claimed first, as so many bytes with this hash: an older copy, or the part of one
that a broken transfer left. The sender hashes as many bytes of its own, and sends what comes after them, or all. Each
file grows under another name, is hashed on both sides as it passes, and is renamed into place only if the hashes agree.

Events, in the order of a file: [begin, i, size, have], [data, n] (n raw bytes), [zero, n] (a hole), [end, sha256];
or [same, i], or [bad, i, why]; many small files share one frame.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orchestrator.agent.files import open_regular
from orchestrator.agent.tree import MARKER, Entry, at, part_of

BLOCK = 256 << 10
ZEROS = bytes(BLOCK)
SYNCED = 1 << 20
"""Files from this size on are synced to the disk before they get their name."""
EVENTS = 512
FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What the next file would meet, too."""


class Busy(Exception):
    """Somebody else writes the same file in the same way right now. `path` is the file's place."""

    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.path = path


class NoRoom(OSError):
    """Nothing more can be written. `kept` is the size of the part that stays, `path` where it is."""

    def __init__(self, error: OSError, path: bytes, kept: int) -> None:
        super().__init__(error.errno, error.strerror, os.fsdecode(path))
        self.kept = kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What the receiver has of a file: its first `have` bytes. `part`: in a part of its own, not under its name."""

    have: int
    sha256: str
    part: bool

    def wire(self) -> list[Any]:
        return [self.have, self.sha256, self.part]


class Outgoing:
    """Reads files for whoever sends them. `tick` is told of every block that is only compared."""

    def __init__(
        self, root: bytes, entries: Sequence[Entry], claims: dict[int, Claim], *, tick: Callable[[int], None],
        living: bool = False,
    ) -> None:  # fmt: skip
        """`living`: a file may grow or be replaced by another one meanwhile; it is then sent as it was found."""
        self._root, self._entries, self._claims, self._tick, self._living = root, entries, claims, tick, living
        self._kept: dict[int, Any] = {}
        """Hash states of the claims that are true."""
        self.sent = 0

    def check(self, index: int) -> bool:
        """Whether the claim of a file is true. Costs a look at as many bytes."""
        claim, one = self._claims[index], self._entries[index]
        digest = hashlib.sha256()
        try:
            with os.fdopen(open_regular(os.fsdecode(at(self._root, one.path))), "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                size = _size(one, found) if self._living else found.st_size
                whole = claim.have <= size and _hash(file.fileno(), claim.have, digest, self._tick)
                if whole and digest.hexdigest() == claim.sha256:
                    self._kept[index] = digest
        except OSError:
            pass  # said when it is to be sent
        if index not in self._kept:
            del self._claims[index]
        return index in self._kept

    def frames(self) -> Iterator[tuple[list[list[Any]], bytes]]:
        """Events and the raw bytes they speak of. A checkpoint's marker comes after everything else."""
        events: list[list[Any]] = []
        raw = bytearray()
        order = sorted(range(len(self._entries)), key=lambda i: self._entries[i].path.endswith(f"/{MARKER}"))
        for index in order:
            if self._entries[index].kind != "file":
                continue
            for event, block in self._file(index):
                events.append(event)
                raw += block
                if len(raw) >= BLOCK or len(events) >= EVENTS:
                    yield events, bytes(raw)
                    events, raw = [], bytearray()
        if events:
            yield events, bytes(raw)

    def _file(self, index: int) -> Iterator[tuple[list[Any], bytes]]:
        one = self._entries[index]
        if index in self._claims and index not in self._kept:
            self.check(index)
        claim = self._claims.get(index)
        try:
            file = os.fdopen(open_regular(os.fsdecode(at(self._root, one.path))), "rb", buffering=0)
        except OSError as error:
            yield ["bad", index, error.strerror or str(error)], b""
            return
        with file:
            found = os.fstat(file.fileno())
            size = one.size
            if self._living:
                size = _size(one, found)
            elif _version(found) != (one.size, one.mtime_ns, one.inode):
                yield ["bad", index, "it has changed since it was listed"], b""
                return
            if claim is not None and claim.have == size and not claim.part:
                yield ["same", index], b""
                return
            have = claim.have if claim is not None and claim.have <= size else 0
            digest = self._kept[index] if have else hashlib.sha256()
            yield ["begin", index, size, have], b""
            file.seek(have)
            left = size - have
            while left:
                try:
                    block = file.read(min(BLOCK, left))
                except OSError as error:
                    yield ["bad", index, error.strerror or str(error)], b""
                    return
                if not block:
                    yield ["bad", index, f"it was cut short while it was read, {left:,} bytes before its end"], b""
                    return
                left -= len(block)
                digest.update(block)
                self.sent += len(block)
                if block == ZEROS:
                    yield ["zero", len(block)], b""
                else:
                    yield ["data", len(block)], block
            after = os.fstat(file.fileno())
            grown = self._living and after.st_size > size
            if _version(after) != _version(found) and not grown:
                yield ["bad", index, "it was changed while it was read"], b""
                return
            yield ["end", digest.hexdigest()], b""


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ino


def _size(one: Entry, found: os.stat_result) -> int:
    """How much of a file of a living run is sent: what was listed, unless it is another file by now, or cut."""
    return min(one.size, found.st_size) if found.st_ino == one.inode else found.st_size


def _hash(fd: int, count: int, digest: Any, tick: Callable[[int], None]) -> bool:
    """Feeds the first `count` bytes to `digest`; whether there were as many."""
    at = 0
    while at < count:
        block = os.pread(fd, min(BLOCK, count - at), at)
        if not block:
            return False
        digest.update(block)
        at += len(block)
        tick(len(block))
    return True


class Incoming:
    """Writes what comes below `root`. Nothing is ever removed there, and no file is touched before its successor is
    whole. `tick` is told of every block that is only compared."""

    def __init__(self, root: bytes, entries: Sequence[Entry], *, tick: Callable[[int], None]) -> None:
        self._root, self._entries, self._tick = root, entries, tick
        self._made: list[Entry] = []
        self._blocked: list[str] = []
        self._file: _Growing | None = None
        self.files = self.same = 0
        self.written = 0
        """Bytes of files that came."""
        self.resumed = 0
        """Bytes that were there already, of files that were not whole."""
        self.failed: list[tuple[str, str]] = []
        self.hashes: dict[str, str] = {}

    @property
    def done(self) -> tuple[int, int]:
        """How many files are there, and how many bytes have come."""
        return self.files + self.same, self.written

    def conflicts(self) -> list[tuple[str, str]]:
        """What stands in the way, before anything is written: a folder where a file should be, and the reverse."""
        found = []
        blocked: list[str] = []
        for one in self._entries:
            if any(one.path.startswith(f"{above}/") for above in blocked):
                continue
            kind = self._kind(one)
            if kind is not None and (kind == "dir") != (one.kind == "dir"):
                names = {"dir": "a folder", "file": "a file", "link": "a link", "other": "a device, socket or pipe"}
                found.append((one.path, f"is {names[kind]} there and {names[one.kind]} here"))
                blocked.append(one.path)
            elif kind == "other":
                found.append((one.path, "is a device, socket or pipe there"))
        return found

    def _kind(self, one: Entry) -> str | None:
        path = at(self._root, one.path)
        try:
            found = os.lstat(path) if one.path or one.kind != "dir" else os.stat(path)
        except OSError:
            return None
        kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link"))
        return next((name for test, name in kinds if test(found.st_mode)), "other")

    def claim(self, index: int) -> Claim | None:
        """What there is of a file already."""
        one = self._entries[index]
        path = at(self._root, one.path)
        for place, part in ((part_of(path), True), (path, False)):
            try:
                with os.fdopen(open_regular(os.fsdecode(place)), "rb", buffering=0) as file:
                    have = os.fstat(file.fileno()).st_size
                    digest = hashlib.sha256()
                    worth = have == one.size or (have and (part or have >= SYNCED))
                    if worth and have <= one.size and _hash(file.fileno(), have, digest, self._tick):
                        return Claim(have=have, sha256=digest.hexdigest(), part=part)
            except OSError:
                continue
        return None

    def folders(self) -> None:
        """Makes the folders, and those above them."""
        os.makedirs(os.path.dirname(self._root) or b".", exist_ok=True)
        for one in self._entries:
            if one.kind != "dir":
                continue
            path = at(self._root, one.path)
            try:
                os.mkdir(path)
                os.chmod(path, one.mode | 0o700)  # so that it can be filled, and looks right if this is broken off
                self._made.append(one)
            except FileExistsError:
                found = os.lstat(path) if one.path else os.stat(path)
                if not stat.S_ISDIR(found.st_mode):
                    self._fail(one, "is no folder there")
            except OSError as error:
                self._fail(one, error.strerror or str(error), error)

    def accept(self, events: Sequence[list[Any]], raw: bytes) -> None:
        """One frame. Raises `NoRoom` and `Busy`; what is wrong with one file only lands in `failed`."""
        used = 0
        for name, *values in events:
            if name == "begin":
                index, size, have = values
                self._file = _Growing(self, self._entries[index], size, have)
            elif name == "bad":
                self._drop()
                self._fail(self._entries[values[0]], values[1])
            elif name == "same":
                self._attributes(self._entries[values[0]])
                self.same += 1
            elif self._file is not None:
                if name == "data":
                    block = raw[used : used + values[0]]
                    used += values[0]
                    self._file.add(block, hole=False)
                elif name == "zero":
                    self._file.add(ZEROS[: values[0]], hole=True)
                elif name == "end":
                    self._file.end(values[0])
                    self._file = None

    def finish(self) -> None:
        """Links, and what folders look like: their times change with everything that is put into them."""
        for one in self._entries:
            if one.kind != "link":
                continue
            path = at(self._root, one.path)
            try:
                wanted = one.link.encode("utf-8", "surrogateescape")
                if os.path.islink(path) and os.readlink(path) == wanted:
                    self.same += 1
                    continue
                aside = part_of(path) + b".%d" % os.getpid()
                os.symlink(wanted, aside)
                try:
                    os.replace(aside, path)
                except OSError:
                    os.unlink(aside)
                    raise
                self.files += 1
            except OSError as error:
                self._fail(one, error.strerror or str(error), error)
        for one in reversed(self._made):
            self._attributes(one)

    def close(self) -> None:
        """Lets go of a file that has not come whole; its part stays."""
        self._drop()

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _attributes(self, one: Entry) -> None:
        path = at(self._root, one.path)
        try:
            if stat.S_IMODE(os.stat(path).st_mode) != one.mode:
                os.chmod(path, one.mode)
            os.utime(path, ns=(one.mtime_ns, one.mtime_ns))
        except OSError as error:
            self._fail(one, f"its mode or time cannot be set: {error.strerror}")

    def _fail(self, one: Entry, why: str, error: OSError | None = None) -> None:
        if error is not None and error.errno in FATAL:
            raise NoRoom(error, at(self._root, one.path), 0) from error
        self.failed.append((one.path, why))


class _Growing:
    """One file that is coming. What goes wrong with it alone is noted, and the rest of its bytes passed over."""

    def __init__(self, parcel: Incoming, one: Entry, size: int, have: int) -> None:
        self._parcel, self._one, self._size = parcel, one, size
        self._path = at(parcel._root, one.path)
        self._digest = hashlib.sha256()
        self._fd: int | None = None
        self._at = have
        self._small = have == 0 and size <= BLOCK
        """So small that a part of it is not worth keeping: it is written at once, under a name nobody else uses."""
        self._content = bytearray()
        self._aside = part_of(self._path) + (b".%d" % os.getpid() if self._small else b"")
        self._broken = False
        with self._one_file():
            if not self._small:
                self._open(have)

    def _open(self, have: int) -> None:
        self._fd = os.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Busy(self._path) from None
        if have and os.fstat(self._fd).st_size < have:
            self._copy(have)
        os.ftruncate(self._fd, have)
        if not _hash(self._fd, have, self._digest, self._parcel._tick):
            raise OSError(errno.EIO, "what was there of it has gone")
        self._parcel.resumed += have
        os.lseek(self._fd, have, os.SEEK_SET)

    def _copy(self, have: int) -> None:
        """The claim was of an older copy under the file's own name, which is left as it is."""
        assert self._fd is not None
        with os.fdopen(open_regular(os.fsdecode(self._path)), "rb", buffering=0) as old:
            done = 0
            while done < have and (block := os.pread(old.fileno(), min(BLOCK, have - done), done)):
                done += os.pwrite(self._fd, block, done)
                self._parcel._tick(len(block))

    def add(self, block: bytes, *, hole: bool) -> None:
        self._parcel.written += len(block)
        self._at += len(block)
        if self._broken:
            return
        self._digest.update(block)
        if self._small:
            self._content += block
            return
        with self._one_file():
            assert self._fd is not None
            if hole:
                os.ftruncate(self._fd, self._at)
                os.lseek(self._fd, self._at, os.SEEK_SET)
            else:
                _write(self._fd, block)

    def end(self, sha256: str) -> None:
        if self._broken:
            self.close()
            return
        found = self._digest.hexdigest()
        if found != sha256 or self._at != self._size:
            self._parcel._fail(self._one, f"it arrived damaged: its sha256 is {found} here and was {sha256}")
            self._remove()
            return
        with self._one_file():
            self._place()
            self._parcel.files += 1
            self._parcel.hashes[self._one.path] = sha256
        self.close()

    def _place(self) -> None:
        if self._small:
            self._fd = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            _write(self._fd, self._content)
        assert self._fd is not None
        os.fchmod(self._fd, self._one.mode)
        os.utime(self._fd, ns=(self._one.mtime_ns, self._one.mtime_ns))
        if self._size >= SYNCED:
            os.fsync(self._fd)
        os.replace(self._aside, self._path)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _remove(self) -> None:
        self.close()
        try:
            os.unlink(self._aside)
        except OSError:
            pass

    @contextmanager
    def _one_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        """Notes why this file does not come; raises `NoRoom` when no other one would either."""
        self._broken = True
        kept = 0
        if self._fd is not None:
            kept = os.fstat(self._fd).st_size
        if self._small or not kept:
            self._remove()
            kept = 0
        self.close()
        if error.errno in FATAL:
            raise NoRoom(error, self._path, kept) from error
        self._parcel._fail(self._one, error.strerror or str(error))


def _write(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
