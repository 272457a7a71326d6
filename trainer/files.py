"""Files that are there whole, or not at all; that they are on the disk; and what they hold, as a hash."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

HASHED_BYTES = 1 << 20


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, locked: bool = False) -> Iterator[BinaryIO]:
    """What is written becomes `path` unless anything is raised: who reads sees the old content or the new, never a
    part. `durable`: also after a crash of the machine. `locked`: nobody else can be at it, so that what a process that
    was killed has left is written over. Raises `OSError`."""
    aside = path.with_name(f".{path.name}.partial" if locked else f".{path.name}.{os.getpid()}.partial")
    try:
        with aside.open("wb") as file:
            yield file
            if durable:
                _sync(file)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_whole(path: Path, data: bytes, *, durable: bool = False, locked: bool = False) -> None:
    """See `replacing`."""
    with replacing(path, durable=durable, locked=locked) as file:
        file.write(data)


def write_synced(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and sync, in a folder that nobody looks into yet; returns the size and hash of what was meant, which
    `describe` finds out of what is there."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        _sync(file)
    return {"bytes": size, "sha256": digest.hexdigest()}


def describe(path: Path) -> dict[str, Any]:
    """Its size in bytes and its hash. Raises `OSError`."""
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256_of(file)}


def sha256_of(file: IO[bytes]) -> str:
    """Of all that is left to read of it."""
    digest = hashlib.sha256()
    while chunk := file.read(HASHED_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """What was made or renamed in it is there after a crash of the machine, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
