"""Logs a program writes by itself: which files they are, and from which byte on they are this run's.

A start script that names its own log file is how an old traceback once passed for a new one. So the files a program may
write are noted *before* it starts, with their sizes and last bytes; a log that is found later is followed from there,
and what was in it before is counted and never shown. `watch` keeps what is found; `sharing` asks who else writes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat as stat_module
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from orchestrator.agent import proc
from orchestrator.model import ForeignLog, Process

LOG_NAME = re.compile(r"\.(log|out|err)(\.\d+)?$|(^|/)(nohup\.out|log\.txt|logs?\.jsonl|std(out|err)\.txt)$")
PATH_IN_TEXT = re.compile(rb"(?:~|\.{0,2})/[^\s'\"`;|&<>(){}\[\]$,:=\x00]+|[\w.-]+\.(?:log|out|err|txt)\b")
SNAPSHOT_LIMIT = 20_000
NEARBY_LIMIT, NEARBY_DEPTH = 5_000, 3
SCRIPT_LIMIT = 256 * 1024
NAMED_LIMIT = 200
"""How many of the logs that a program names are asked for their size again and again."""
TAIL_BYTES = 4096
"""So many last bytes of an old file show whether it was emptied and has grown again."""
TEXT_BYTES, TEXT_TOTAL_BYTES = 64 << 10, 2 << 20
"""So many of an old log are kept, to know its lines again where `tail -f` copies them into the run's own log."""

Key = tuple[int, int]
"""(device, inode)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Old:
    """A file as it was before the program started. `text` is the end of it, or nothing if there was no room."""

    path: str
    size: int
    text: bytes = b""

    def stands_in(self, path: str) -> bool:
        """Whether the old bytes are still where they were, as far as the size and the kept text can tell."""
        tail = self.text[-TAIL_BYTES:]
        try:
            with open(path, "rb") as file:
                file.seek(self.size - len(tail))
                return file.read(len(tail)) == tail and os.fstat(file.fileno()).st_size >= self.size
        except OSError:
            return False


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """The files that a program may turn out to write, as they were before it started."""

    old: dict[Key, Old] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    """Paths the program names at which there was nothing."""
    named: list[str] = field(default_factory=list)
    """Logs the program names, or that lie in its own working copy: one of these may be written in the blink of an eye
    (`echo >> log`), and no look at open files would ever see it."""
    text_bytes: int = 0

    def note(self, path: str) -> None:
        try:
            found = os.stat(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                self.absent.add(path)
                with contextlib.suppress(OSError):  # of links that nobody can read /proc has some
                    self.absent.add(os.path.realpath(path))
            return
        except ValueError:
            return
        key = (found.st_dev, found.st_ino)
        if not stat_module.S_ISREG(found.st_mode) or key in self.old:
            return
        text = b""
        if found.st_size and LOG_NAME.search(path):
            text = end_of(path, TEXT_BYTES if self.text_bytes < TEXT_TOTAL_BYTES else TAIL_BYTES, size=found.st_size)
            self.text_bytes += len(text)
        self.old[key] = Old(path=path, size=found.st_size, text=text)

    def name(self, path: str) -> None:
        if LOG_NAME.search(path) and path not in self.named and len(self.named) < NAMED_LIMIT:
            self.named.append(path)


def snapshot(cwd: str, argv: list[str], environ: dict[str, str]) -> Snapshot:
    """What the program may turn out to write.

    The files named by the arguments, by the environment, or inside the scripts among the arguments (a bare name is
    tried in each folder that is named there); those under `cwd`; and what is named like a log near the user's home.
    """
    found = Snapshot()
    texts = [word.encode("utf-8", "surrogateescape") + b"\n" + _script(cwd, word) for word in argv]
    texts += [value.encode("utf-8", "surrogateescape") for name, value in environ.items() if name != "PATH"]
    paths = {os.path.expanduser(os.fsdecode(path)) for text in texts for path in PATH_IN_TEXT.findall(text)}
    folders = {cwd, *filter(os.path.isdir, paths), *map(os.path.dirname, paths)}
    for path in sorted(paths | set(argv)):
        for folder in sorted(folders) if "/" not in path else [cwd]:
            whole = os.path.normpath(os.path.join(cwd, folder, path))
            found.note(whole)
            found.name(whole)
    for folder, _, names in os.walk(cwd):
        for name in names:
            found.note(os.path.join(folder, name))
            found.name(os.path.join(folder, name))
        if len(found.old) > SNAPSHOT_LIMIT:
            break
    for path in _logs_near(environ.get("HOME") or "/"):
        found.note(path)
    return found


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


def end_of(path: str, length: int = TEXT_BYTES, *, size: int | None = None) -> bytes:
    """The last bytes of the file, or of its first `size` bytes."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            file.seek(max(0, size - length))
            return file.read(min(size, length))
    except OSError:
        return b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A file that a process of the run holds open."""

    path: str
    key: Key
    writing: bool
    deleted: bool


def held(tree: Iterable[Process], run_root: str) -> list[Held]:
    """The regular files that processes of the run hold open and that may be logs: some process's stdout or stderr, or
    named like a log; the run's own records are none."""
    result = []
    for process in tree:
        for fd, path in proc.open_paths(process.pid):
            if not path.startswith("/"):
                continue
            # The program's own working copy lies inside the run directory, and its logs are of interest.
            inside = path.startswith(run_root + "/") and not path.startswith(run_root + "/code/")
            deleted = path.endswith(" (deleted)")
            name = path.removesuffix(" (deleted)")
            if inside or not (fd in (1, 2) or LOG_NAME.search(name)):
                continue
            flags = flags_of(process.pid, fd)
            try:
                found = os.stat(f"/proc/{process.pid}/fd/{fd}")
            except OSError:
                continue
            if flags is None or not stat_module.S_ISREG(found.st_mode):
                continue
            writing = flags & os.O_ACCMODE != os.O_RDONLY
            result.append(Held(path=name, key=(found.st_dev, found.st_ino), writing=writing, deleted=deleted))
    return result


def grown(paths: Iterable[str], before: Snapshot, known: set[Key]) -> list[str]:
    """Those of `paths` that are not in `known` and have grown, or been made, since the program started."""
    result = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            continue
        key = (found.st_dev, found.st_ino)
        if key in known or not stat_module.S_ISREG(found.st_mode) or not found.st_size:
            continue
        old = before.old.get(key)
        if found.st_size != old.size if old is not None else path in before.absent:
            result.append(path)
    return result


def describe(path: str, before: Snapshot, since: float) -> ForeignLog | None:
    """The log at `path`, and where this run's bytes begin: by evidence, never by how it was opened. It goes by one name
    whichever way it was found: the one that links lead to, as an open file of a process has.

    Old bytes that are no longer where they were have been overwritten; else this run's come after them. Of a file that
    nobody noted beforehand all that is there already is taken to be old, unless it is younger than the run.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    old = before.old.get((found.st_dev, found.st_ino))
    size, truncated, exact = found.st_size, False, True
    if old is not None:
        size = old.size
        truncated = size > 0 and not old.stands_in(path)
    elif path in before.absent or ((born := birth_time(path)) is not None and born >= since - 0.01):
        size = 0
    else:
        exact = size == 0
    return ForeignLog(
        path=os.path.realpath(path), base=0 if truncated else size, before=size, truncated=truncated, exact=exact,
        device=found.st_dev, inode=found.st_ino, size=found.st_size, modified_at=found.st_mtime,
    )  # fmt: skip


def locate(path: str, key: Key, born: float | None = None) -> str | None:
    """Where the file that was once at `path` is now: there, or beside it under a longer name, as rotated logs are."""
    folder, name = os.path.split(path)
    try:
        names = [name, *sorted(one for one in os.listdir(folder) if one.startswith(name) and one != name)[:1000]]
    except OSError:
        return None
    for one in names:
        try:
            found = os.stat(os.path.join(folder, one))
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == key and born in (None, birth_time(os.path.join(folder, one))):
            return os.path.join(folder, one)
    return None


def flags_of(pid: int, fd: int) -> int | None:
    for line in proc.read(f"/proc/{pid}/fdinfo/{fd}").splitlines():
        if line.startswith(b"flags:"):
            return int(line.split()[1], 8)
    return None


def birth_time(path: str) -> float | None:
    """When the file was created (statx), or None where the file system does not say; Python's os.stat does not."""
    import ctypes  # a probe of a run without such logs needs none

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
