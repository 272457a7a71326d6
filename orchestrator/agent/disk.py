"""What a prune needs of the disk: sizes, mounts, locks that are held, and a removal that says what is left."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable
from typing import Any

from orchestrator.agent import proc


def held(lock: str | None) -> bool:
    """Whether somebody holds the lock; without one nobody does."""
    if lock is None:
        return False
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def mounts() -> list[str]:
    """Where something is mounted, as this process sees it."""
    found = []
    for line in proc.read("/proc/self/mountinfo").split(b"\n"):
        fields = line.split(b" ")
        if len(fields) > 4:
            found.append(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), fields[4]))
    return [os.fsdecode(one) for one in found]


def occupied(root: str, seen: set[tuple[int, int]], tick: Callable[[int], None]) -> int:
    """Bytes on the disk; a file of several names counts once, and links are not followed."""
    total, stack = 0, [root]
    while stack:
        path = stack.pop()
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                stack += [f"{path}/{name}" for name in os.listdir(path)]
        except OSError:
            continue
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
        total += status.st_blocks * 512
        tick(0)
    return total


def delete(path: str, tick: Callable[[int], None]) -> str | None:
    """Removes a file, or a folder with all that is in it; why something of it is still there, or None."""
    problems: list[str] = []

    def failed(function: object, place: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            problems.append(f"{place}: {getattr(info[1], 'strerror', None) or info[1]}")

    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return None
        for name in os.listdir(path):
            inner = f"{path}/{name}"
            if os.path.isdir(inner) and not os.path.islink(inner):
                shutil.rmtree(inner, onerror=failed)
                tick(0)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    shutil.rmtree(path, onerror=failed)
    return problems[0] if problems else None
