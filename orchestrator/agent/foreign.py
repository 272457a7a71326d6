"""Logs a program writes by itself: which files they are, and from which byte on they are this run's.

A start script that names its own log file is how an old traceback once passed for a new one. So the sizes of the files
a program may write are noted *before* it starts; a log that is found open later is followed from there, and what was in
it before is counted and never shown.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat as stat_module
from collections.abc import Iterator

from orchestrator.agent import proc
from orchestrator.model import ForeignLog, Process

LOG_NAME = re.compile(r"\.(log|out|err)(\.\d+)?$|(^|/)(nohup\.out|log\.txt|logs?\.jsonl|std(out|err)\.txt)$")
PATH_IN_TEXT = re.compile(rb"(?:~|\.{0,2})/[^\s'\"`;|&<>(){}\[\]$,:=\x00]+|[\w.-]+\.(?:log|out|err|txt)\b")
SNAPSHOT_LIMIT = 20_000
NEARBY_LIMIT, NEARBY_DEPTH = 5_000, 3
SCRIPT_LIMIT = 256 * 1024

Snapshot = dict[tuple[int, int], int]
"""(device, inode) -> size before the program started."""


def snapshot(cwd: str, argv: list[str], environ: dict[str, str]) -> Snapshot:
    """Sizes of the files that the program may turn out to write.

    Those under `cwd`; those named by the arguments, by the environment, or inside the scripts among the arguments (a
    bare name is tried in each folder that is named there); and what is named like a log near the user's home.
    """
    sizes: Snapshot = {}
    for folder, _, names in os.walk(cwd):
        for name in names:
            _note(sizes, os.path.join(folder, name))
        if len(sizes) > SNAPSHOT_LIMIT:
            break
    for path in _logs_near(environ.get("HOME") or "/"):
        _note(sizes, path)
    texts = [word.encode("utf-8", "surrogateescape") + b"\n" + _script(cwd, word) for word in argv]
    texts += [value.encode("utf-8", "surrogateescape") for name, value in environ.items() if name != "PATH"]
    found = {os.path.expanduser(os.fsdecode(path)) for text in texts for path in PATH_IN_TEXT.findall(text)}
    folders = {cwd, *filter(os.path.isdir, found), *map(os.path.dirname, found)}
    for path in found | set(argv):
        for folder in folders if "/" not in path else [cwd]:
            _note(sizes, os.path.join(cwd, folder, path))
    return sizes


def _logs_near(root: str) -> Iterator[str]:
    """Files named like logs in `root` and a few levels below it, as far as that is quick to find out."""
    looked_at = 0
    for folder, folders, names in os.walk(root):
        depth = folder[len(root) :].count(os.sep)
        folders[:] = [name for name in folders if not name.startswith(".") and depth < NEARBY_DEPTH - 1]
        looked_at += len(names)
        if looked_at > NEARBY_LIMIT:
            return
        yield from (os.path.join(folder, name) for name in names if LOG_NAME.search(name))


def _script(cwd: str, word: str) -> bytes:
    path = os.path.join(cwd, os.path.expanduser(word))
    try:
        if not stat_module.S_ISREG(os.stat(path).st_mode) or os.path.getsize(path) > SCRIPT_LIMIT:
            return b""
        with open(path, "rb") as file:
            return file.read(SCRIPT_LIMIT)
    except (OSError, ValueError):
        return b""


def _note(sizes: Snapshot, path: str) -> None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return
    if stat_module.S_ISREG(found.st_mode):
        sizes[(found.st_dev, found.st_ino)] = found.st_size


def find(
    tree: list[Process], *, before: Snapshot, known: set[tuple[int, int]], run_root: str, started_at: float
) -> list[ForeignLog]:
    """Logs that processes of the run hold open for writing and that are not in `known` (which grows by them).

    A log is a regular file outside the run directory that is some process's stdout or stderr, or is named like a log.
    """
    result = []
    for process in tree:
        for fd, path in proc.open_paths(process.pid):
            # The program's own working copy lies inside the run directory, and its logs are of interest.
            inside = path.startswith(run_root + "/") and not path.startswith(run_root + "/code/")
            if not path.startswith("/") or inside or path.endswith(" (deleted)"):
                continue
            if fd not in (1, 2) and not LOG_NAME.search(path):
                continue
            flags = _flags(process.pid, fd)
            if flags is None or flags & os.O_ACCMODE == os.O_RDONLY:
                continue
            try:
                found = os.stat(path)
            except OSError:
                continue
            key = (found.st_dev, found.st_ino)
            if key in known or not stat_module.S_ISREG(found.st_mode):
                continue
            known.add(key)
            result.append(_describe(path, found, appending=bool(flags & os.O_APPEND), before=before, since=started_at))
    return result


def _describe(path: str, found: os.stat_result, *, appending: bool, before: Snapshot, since: float) -> ForeignLog:
    key = (found.st_dev, found.st_ino)
    old = before.get(key)
    born = birth_time(path)
    if old is None and born is not None and born >= since - 0.01:
        old = 0  # it did not exist before this run
    base, truncated, exact = found.st_size, False, False
    if old is not None:
        truncated = found.st_size < old
        base, exact = (0 if truncated else old), True
    if not appending:
        # Whoever opens without O_APPEND starts writing at byte 0: nothing in the file is from before.
        truncated, base, exact = bool(old), 0, True
    return ForeignLog(
        path=path, base=base, before=old if old is not None else (found.st_size if appending else 0),
        truncated=truncated, exact=exact, device=found.st_dev, inode=found.st_ino, size=found.st_size,
    )  # fmt: skip


def _flags(pid: int, fd: int) -> int | None:
    for line in proc.read(f"/proc/{pid}/fdinfo/{fd}").splitlines():
        if line.startswith(b"flags:"):
            return int(line.split()[1], 8)
    return None


def birth_time(path: str) -> float | None:
    """When the file was created (statx), or None where the file system does not say; Python's os.stat does not."""
    buffer = ctypes.create_string_buffer(256)
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    at_fdcwd, statx_btime = -100, 0x800
    if statx(at_fdcwd, os.fsencode(path), 0, statx_btime, buffer) != 0:
        return None
    if not int.from_bytes(buffer.raw[0:4], "little") & statx_btime:
        return None
    seconds = int.from_bytes(buffer.raw[80:88], "little", signed=True)
    return seconds + int.from_bytes(buffer.raw[88:92], "little") / 1e9
