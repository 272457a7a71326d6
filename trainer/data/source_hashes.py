"""What files hold, as hashes: taken once, and taken again only when a file may have changed.

A hash is kept together with the file's size, inode, and times of change of content (mtime) and of anything (ctime,
which no program can set back), and trusted as long as these are the same and the last change was well before the
hashing began. So the next start knows a huge file without reading it, and one that was changed in place is never taken
for what it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from trainer.config import ConfigError
from trainer.data.source_files import Source
from trainer.data.sources import python_docs
from trainer.files import sha256_of, write_whole

TICK_NS = 2 * 10**9
"""A file that was changed this shortly before it was hashed may change again without its times telling."""


def content_of(root: Path, source: Source) -> list[str]:
    """What `source` holds: its format, and a hash of each file. `root` is where hashes are kept. Raises `ConfigError`
    where it cannot be read."""
    if source.format == "python-docs":
        return [source.format, hash_of(python_docs())]
    try:
        return [source.format, *(_hash_of_file(root / "hashes", file) for file in source.files)]
    except OSError as error:
        raise ConfigError(f"data.paths: {error.filename or source.path}: {error.strerror or error}") from None


def _hash_of_file(known: Path, file: Path) -> str:
    """Of all of its content; from `known`, where it was hashed before and has not changed since."""
    note = known / f"{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]}.json"
    with file.open("rb") as content:
        state = _state(content)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(note.read_bytes())
            if noted["state"] == state:
                return str(noted["sha256"])
        began_ns = time.time_ns()
        digest = sha256_of(content)
        if _state(content) == state and max(state["mtime_ns"], state["ctime_ns"]) < began_ns - TICK_NS:
            with contextlib.suppress(OSError):  # it is hashed again the next time
                known.mkdir(exist_ok=True)
                write_whole(note, json.dumps({"file": str(file), "state": state, "sha256": digest}).encode())
    return digest


def _state(file: IO[bytes]) -> dict[str, int]:
    now = os.fstat(file.fileno())
    return {
        "device": now.st_dev, "inode": now.st_ino, "size": now.st_size, "mtime_ns": now.st_mtime_ns,
        "ctime_ns": now.st_ctime_ns,
    }  # fmt: skip


def hash_of(value: Any) -> str:
    """Of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
