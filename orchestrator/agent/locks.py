"""Locks of the kernel on files in a folder that users, and containers of one node, share.

They are open file description locks (`F_OFD_SETLK`): one belongs to an open file, goes with the last process that has
it, and can be asked about without being taken. All who share the folder must share the kernel: a file system whose
locks another machine may hold is refused. A folder that anybody may write in is no place to follow links, so that
nothing here does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.agent import space

FLOCK = struct.Struct("hhqqi4x")
"""struct flock on a 64-bit machine: type, whence, start, length, pid."""
SHARED_MODE = 0o666
"""Ids are shifted from container to container, so that whoever shares the folder is nobody in particular."""
REMOTE = ("nfs", "cifs", "smb", "9p", "virtiofs", "fuse", "ceph", "lustre", "gfs2", "ocfs2", "afs", "beegfs", "gpfs")
"""How the kinds of file systems begin whose files another kernel may lock, or whose locks are nobody's."""


class Unusable(Exception):
    """The folder cannot hold claims; says why, and what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def check(folder: str, *, make: bool) -> None:
    """Raises `Unusable` when locks in `folder` would not be seen by all who share it, or it cannot be written; with
    `make` it is made if it is not there."""
    if make and not os.path.lexists(folder):
        try:
            with _for_everybody():
                os.mkdir(folder, 0o1777)  # sticky, so that nobody removes another's files
        except FileExistsError:
            pass
        except OSError as error:
            raise Unusable(f"{folder} cannot be made: {error.strerror}", "name a folder as `claims_dir:`") from error
    try:
        found = os.lstat(folder) if make else os.stat(folder)
    except OSError as error:
        raise Unusable(
            f"{folder}: {error.strerror}", "mount it into the container, or correct `claims_dir:` (docs/gpu-claims.md)"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise Unusable(f"{folder} is no folder", "remove it, or name another as `claims_dir:`")
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise Unusable(
            f"{folder} is on a file system that is mounted read-only",
            f"mount -o remount,rw {folder}, or name another folder as `claims_dir:`",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Unusable(
            f"{folder} cannot be written by this user (mode {stat.S_IMODE(found.st_mode):04o})",
            f"chmod 1777 {folder}, on the node if it is mounted from there",
        )
    kind = space.mount(folder).kind
    if is_remote(kind):
        raise Unusable(
            f"{folder} is on {kind}, where other machines' locks count too, or none",
            "a GPU is one machine's: take a folder on a disk of the node for `claims_dir:` (docs/gpu-claims.md)",
        )


def is_remote(kind: str) -> bool:
    """Whether another machine may mount a file system of this kind, too."""
    return kind.startswith(REMOTE)


@contextmanager
def _for_everybody() -> Iterator[None]:
    """What is made inside it has its whole mode at once: nobody meets it closed."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def open_shared(path: str) -> int:
    """The regular file `path`, made if it is not there, for everybody to read, write and lock. Raises `OSError`."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            # Without O_CREAT first: fs.protected_regular refuses that for another's file in a sticky folder.
            fd = os.open(path, flags)
        except FileNotFoundError:
            try:
                with _for_everybody():
                    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, SHARED_MODE)
            except FileExistsError:
                continue
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)


@contextmanager
def looking(path: str) -> Iterator[int]:
    """The regular file `path`, to be read and asked about. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        yield fd
    finally:
        os.close(fd)


def take(fd: int, byte: int = 0) -> bool:
    """Whether the lock on this byte could be had, which it then is until the file is closed everywhere."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_held(fd: int, byte: int = 0) -> bool:
    """Whether another open file has the lock on this byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def stands(fd: int, path: str) -> bool:
    """Whether the open file is still the one under that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False
