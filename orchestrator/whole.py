"""A file that is replaced whole, and what a file holds, as a hash.

Travels with the agent, which keeps a run's records by it (`agent/files.py`); on the laptop it is for what a verb keeps
or makes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, BinaryIO

BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """What is written becomes `path` unless anything is raised: a reader sees the old content or the new, never a part.
    `durable`: also after a crash of the machine. Raises `OSError`."""
    folder, name = os.path.split(os.fspath(path))
    aside = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)  # of a process that had this number before
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(fd)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    if durable:
        sync_folder(folder or ".")


def sync_folder(folder: str) -> None:
    """What was made or renamed in it is there after a crash of the machine, too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """See `replacing`."""
    with replacing(path, mode=mode, durable=durable) as file:
        file.write(data)


def sha256_of(file: IO[bytes]) -> str:
    """Of all that is left to read of it."""
    import hashlib  # which a look at a run need not wait for

    total = hashlib.sha256()
    while block := file.read(BLOCK_BYTES):
        total.update(block)
    return total.hexdigest()
