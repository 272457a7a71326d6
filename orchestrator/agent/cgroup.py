"""A cgroup a run: where the kernel lets one be made, no process of the run can leave it by forgetting who it is.

A program may empty its environment, leave its session and its parent and close its output; while its supervisor lives
it stays a descendant, and after that nothing else would tell whose it is. The run's cgroup is a child of the
supervisor's own, without controllers: it limits nothing and counts nothing. Where there is none (a version 1 hierarchy
only, a user who may not, a read-only mount) the other evidence has to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

PREFIX = "specctl-"


def make(name: str) -> str | None:
    """A new cgroup below this process's own, for the program; None where that cannot be."""
    own = own_folder()
    if own is None:
        return None
    path = os.path.join(own, PREFIX + name)
    try:
        os.mkdir(path)
    except OSError:
        return None
    return path


def enter(path: str | None) -> None:
    """Moves this process there; what it starts from now on stays there, too."""
    if path is None:
        return
    try:
        fd = os.open(os.path.join(path, "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, b"0")
    except OSError:
        pass
    finally:
        os.close(fd)


def members(path: str) -> Iterator[int]:
    """The pids in it and in what the program itself has made below it, but not in another run's."""
    try:
        with open(os.path.join(path, "cgroup.procs"), "rb") as file:
            pids = file.read().split()
        below = [entry.path for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith(PREFIX)]
    except OSError:
        return
    yield from map(int, pids)
    for one in below:
        yield from members(one)


def remove(path: str | None) -> None:
    """Only an empty one can be removed; a program that made others below it leaves them to the container's end."""
    try:
        if path is not None:
            os.rmdir(path)
    except OSError:
        pass


def limits(path: str | None, limit: str, used: str) -> list[tuple[int, int]]:
    """(a limit of this name, what is used of it), as `pids.max` and `pids.current`, of the cgroup there and of those
    around it; of a version 2 hierarchy."""
    found = []
    while path is not None and os.path.exists(os.path.join(path, "cgroup.procs")):
        most, now = (_number(os.path.join(path, name)) for name in (limit, used))
        if most is not None:
            found.append((most, now or 0))
        path = os.path.dirname(path)
    return found


def _number(path: str) -> int | None:
    try:
        with open(path, "rb") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # `max` is no limit


def own_folder() -> str | None:
    """The directory of this process's cgroup in the version 2 hierarchy."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            name = next(line[3:].rstrip("\n") for line in file if line.startswith("0::"))
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split() for line in file if " - cgroup2 " in line]
    except (OSError, StopIteration):
        return None
    for fields in mounts:
        root, mount = fields[3], fields[4]
        inside = name[len(root.rstrip("/")) :] if name.startswith(root.rstrip("/")) else name
        path = os.path.normpath(mount + "/" + inside)
        try:
            with open(os.path.join(path, "cgroup.procs"), "rb") as file:
                if str(os.getpid()).encode() in file.read().split():
                    return path
        except OSError:
            continue
    return None
