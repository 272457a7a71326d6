"""One training at a time in one directory: a lock that ends with its process, however that ends.

Two that write checkpoints and records into the same place would take each other's for their own. The lock is the
process's own: what it starts does not keep it, and a second look from the same process is no second training.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from trainer.config import ConfigError

NAME = "trainer.lock"


def hold(directory: Path, *, complain: Callable[[str], None]) -> int | None:
    """Lock `directory`, which is there, until the descriptor that is returned is closed. Raises `ConfigError` while
    another process holds it. A file system that knows no locks is told of, and None returned."""
    path = directory / NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        complain(f"{path} cannot be made ({error.strerror}): nothing keeps a second training out of this directory")
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # both are EACCES or EAGAIN
        holder = os.read(descriptor, 20).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(
            f"another training (process {holder or 'unknown'}) is writing to {directory}; stop that one, or choose"
            " another output_dir"
        ) from None
    except OSError as error:
        os.close(descriptor)
        complain(f"{path} cannot be locked ({error.strerror}): nothing keeps a second training out of this directory")
        return None
    with contextlib.suppress(OSError):  # a full disk: then whose lock it is cannot be told
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
