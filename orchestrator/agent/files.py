"""Files as the contract has them: replaced whole, appended whole, read leniently.

A reader of a run directory meets files that are being written, were cut by a full disk or a crash, or are missing;
each of these is an answer here, never an exception.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from typing import Any


def write_whole(path: str, data: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Replaces `path` by `data`, in which nobody else may write, whatever the umask: see `whole.replacing`."""
    from orchestrator import whole  # which a look at a run need not load

    whole.write_whole(path, data, mode=mode, durable=durable)


def write_json(path: str, value: Any, *, durable: bool = False, block_bytes: int = 1) -> None:
    """`write_whole`; on a full disk into the room that `reserve` has kept, or that the last value took: with
    `block_bytes`, its size is a multiple of that, so that the next one fits as well."""
    data = json.dumps(value, ensure_ascii=True).encode("ascii")
    data = data.ljust(-(-(len(data) + 1) // block_bytes) * block_bytes - 1) + b"\n"
    try:
        write_whole(path, data, durable=durable)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _write_in_place(path, data):
            raise


def reserve(path: str) -> None:
    """Takes room on the disk for one small file, which must be written when the disk is full."""
    write_whole(f"{path}.reserve", b" " * RESERVE_BYTES)


def _write_in_place(path: str, data: bytes) -> bool:
    for kept in (f"{path}.reserve", path):
        try:
            with open(kept, "r+b") as file:
                room = os.fstat(file.fileno()).st_size
                if room < len(data):
                    continue
                file.write(data[:-1].ljust(room - 1) + b"\n")
                os.fsync(file.fileno())
            os.replace(kept, path)
        except OSError:
            continue
        return True
    return False


def create_json(path: str, value: Any) -> bool:
    """Writes `path` unless it exists, whole or not at all; returns whether it was written."""
    from orchestrator import whole

    aside = f"{path}.{os.getpid()}.tmp"
    write_whole(aside, json.dumps(value, ensure_ascii=True).encode("ascii") + b"\n", durable=True)
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(aside)
    whole.sync_folder(os.path.dirname(path))
    return True


def claim(path: str, who: str) -> bool:
    """Whether `who` is the first to claim `path`; exactly one claimant ever is."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(fd, f"{who}\n".encode())
    except OSError:
        pass  # a full disk: the name alone is the claim
    os.close(fd)
    return True


RESERVE_BYTES = 4096
LARGEST_BYTES = 256 << 20
"""run.json holds the diff of the project, however large that is; other records have limits of their own."""


def read_json(path: str, *, limit_bytes: int = LARGEST_BYTES) -> dict[str, Any] | None:
    """The object in `path`; None when it is missing, or is not one whole JSON object of at most `limit_bytes`.

    A program can put anything there: a fifo or a device is not waited for, and nothing is too deep or too large.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(limit_bytes + 1)
        value = json.loads(data, parse_constant=_refuse) if len(data) <= limit_bytes else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def open_regular(path: str) -> int:
    """The file, opened for reading. Raises `OSError`, also when it is no regular file: opening a fifo would wait."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", path)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


class JsonLines:
    """An append-only file of JSON lines. Whole lines in each write with O_APPEND: two writers never mix within one."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._cut = False

    def append(self, value: Any) -> bool:
        """Whether the line was written whole. A full disk costs lines, never the writer, and never the line after."""
        return self.extend([value])

    def extend(self, values: Iterable[Any]) -> bool:
        """`append` of several lines, in one write."""
        lines = b"".join(json.dumps(value, ensure_ascii=True).encode("ascii") + b"\n" for value in values)
        if not lines:
            return True
        lines = b"\n" * self._cut + lines
        try:
            self._cut = os.write(self._fd, lines) < len(lines)
        except OSError:
            self._cut = True
        return not self._cut


def create_reserved(path: str, value: Any) -> None:
    """`create_json`, from what `reserve` has kept if there is no other room, and gives that back. Raises `OSError` if
    even that fails."""
    try:
        create_json(path, value)
    except OSError:
        kept, data = f"{path}.reserve", json.dumps(value, ensure_ascii=True).encode("ascii")
        with open(kept, "r+b") as file:
            file.write(data[: RESERVE_BYTES - 1].ljust(RESERVE_BYTES - 1) + b"\n")
            os.fsync(file.fileno())
        try:
            os.link(kept, path)
        except FileExistsError:
            pass
        except OSError:  # a second name may cost room, too: on tmpfs it counts as a file
            if os.path.lexists(path):
                raise
            os.rename(kept, path)
    give_back(path)


def give_back(path: str) -> None:
    """The room that `reserve` took is free again."""
    try:
        os.unlink(f"{path}.reserve")
    except OSError:
        pass
