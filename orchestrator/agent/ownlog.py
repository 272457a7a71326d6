"""This attempt's log: where it is now, and whether it is this attempt's.

Its identity is decided here and nowhere else: line 1 carries the run's id and nonce, and the file is the one
(device, inode) that the supervisor opened. A log that was renamed is still the run's, and so is one that was deleted,
as long as a process has it open; a file that has taken its name is not.
"""

from __future__ import annotations

import os

from orchestrator.agent import files, proc
from orchestrator.model import LogFile, Moved, RunPaths, SupervisorRecord


def log_file(paths: RunPaths, attempt: int, record: SupervisorRecord | None, *, same_boot: bool) -> LogFile:
    """Device and inode numbers are a mount's own: after a restart of the container only the header can tell."""
    name = paths.log(attempt)
    path, moved = name, None
    key = (record.log_device, record.log_inode) if record is not None and same_boot else None
    if record is not None and key is not None and _key(name) != key:
        path, moved = whereabouts(name, key, record)
    try:
        fd = files.open_regular(path)
    except OSError as error:
        why = error.strerror
        if isinstance(error, FileNotFoundError):
            why = "it was deleted, or moved away" if record is not None else "nothing has begun yet that would write it"
        return LogFile(path=path, size=0, modified_at=0.0, verified=False, why=why)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        first = file.readline(4096)
    why = None
    if record is None:
        why = "no supervisor has recorded this log"
    elif key is not None and (found.st_dev, found.st_ino) != key:
        why = "the log was replaced by another file"
    elif found.st_size < record.header_bytes:
        why = "the log was truncated"
    elif f" run={paths.run_id} attempt={attempt} nonce={record.nonce} ".encode() not in first:
        why = "the log was emptied or overwritten: its first line is not this attempt's header"
    return LogFile(
        path=path, size=found.st_size, modified_at=found.st_mtime, verified=why is None, why=why, moved=moved,
        header_bytes=record.header_bytes if record else 0,
    )  # fmt: skip


def whereabouts(name: str, key: tuple[int, int], record: SupervisorRecord) -> tuple[str, Moved | None]:
    """Where the file is that was the log `name`, and what became of it; `name` itself if it is nowhere to be found."""
    folder, base = os.path.split(name)
    try:
        beside = sorted(one for one in os.listdir(folder) if one.startswith(base) and one != base)
    except OSError:
        return name, None
    for path in (os.path.join(folder, one) for one in beside):
        if _key(path) == key:
            return path, "renamed"
    for pid, ticks in ((record.pid, record.start_ticks), (record.program_pid, record.program_start_ticks)):
        if pid is None or ticks is None or proc.same(pid, ticks) is None:
            continue
        for fd, path in proc.open_paths(pid):
            held = f"/proc/{pid}/fd/{fd}"
            if _key(held) == key:
                return (path, "renamed") if _key(path) == key else (held, "deleted")
    return name, None


def _key(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
