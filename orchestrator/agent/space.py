"""How much room there is where something lies: what `No space left on device` leaves out."""

from __future__ import annotations

import errno
import os

from orchestrator.agent import proc
from orchestrator.ailments import Mount, mount_of
from orchestrator.model import Disk

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def disk_of(path: str) -> Disk | None:
    """The file system of `path`, or of the folder where it would be made; None if that cannot be asked."""
    while not os.path.exists(path) and path not in ("", "/"):
        path = os.path.dirname(path)
    try:
        there = os.statvfs(path)
        where = mount(path)
    except OSError:
        return None
    return Disk(
        mount=where.at, free_bytes=there.f_bavail * there.f_frsize, total_bytes=there.f_blocks * there.f_frsize,
        free_inodes=there.f_favail if there.f_files else None,
        read_only=bool(there.f_flag & os.ST_RDONLY) or where.read_only,
    )  # fmt: skip


def mount(path: str) -> Mount:
    return mount_of(proc.read("/proc/self/mountinfo").decode("utf-8", "surrogateescape"), os.path.realpath(path))


def problem(path: str | None, error: OSError) -> str | None:
    """What is the matter with the disk of `path`, if that is what `error` is about."""
    text = str(error)  # shutil collects errors of many files into the text of one
    about = error.errno in NO_ROOM or any(os.strerror(number) in text for number in NO_ROOM)
    disk = disk_of(path) if path and about else None
    return disk.words if disk else None
