"""What is to be sent: a file, or everything under a folder, as a list of entries. Both sides of a transfer use it.

Names are bytes on a disk and may be anything; on the wire they are UTF-8 with surrogates for what is none, whatever
the locale of either side says.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

PART = b".specctl-part-"
"""How the name of a file begins that has not arrived whole."""
MARKER = "COMPLETE.json"
"""What says that a checkpoint is whole."""

Kind = Literal["file", "dir", "link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file, folder or link. `path` is relative to what is sent, and empty for that itself."""

    path: str
    kind: Kind
    size: int = 0
    mode: int = 0
    mtime_ns: int = 0
    inode: int = 0
    link: str = ""

    def wire(self) -> list[Any]:
        return [self.path, self.kind, self.size, self.mode, self.mtime_ns, self.inode, self.link]


def entry(wire: Any) -> Entry:
    """An entry as the other side sent it. Raises `ValueError`, also for a path that would lead out of the folder."""
    path, kind, size, mode, mtime_ns, inode, link = wire
    numbers = (size, mode, mtime_ns, inode)
    if not isinstance(path, str) or not isinstance(link, str) or any(type(number) is not int for number in numbers):
        raise ValueError(f"no entry: {wire!r}")
    parts = path.split("/") if path else []
    if kind not in ("file", "dir", "link") or "\0" in path or size < 0 or {"", ".", ".."} & set(parts):
        raise ValueError(f"no entry: {wire!r}")
    return Entry(
        path=path, kind=kind, size=size, mode=mode & 0o777, mtime_ns=mtime_ns, inode=inode, link=link
    )  # fmt: skip


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def shown(name: str) -> str:
    """A name for people: one line, and quoted where it would not be seen as it is."""
    return name if name.isprintable() and name.strip() == name else ascii(encoded(name))[1:]


def at(root: bytes, path: str) -> bytes:
    return os.path.join(root, encoded(path)) if path else root


def part_of(path: bytes) -> bytes:
    """Where the file `path` grows until it is whole: beside it, since only there a rename puts it in its place."""
    folder, name = os.path.split(path)
    return os.path.join(folder, PART + hashlib.sha256(name).hexdigest()[:16].encode("ascii"))


def base_name(root: bytes) -> str:
    return decoded(os.path.basename(os.path.abspath(root)) or b"root")


def room(root: bytes) -> tuple[bytes, int]:
    """The folder in which `root` is or would be made, and how many bytes are free there."""
    above = root if os.path.isdir(root) else os.path.dirname(os.path.abspath(root))
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    found = os.statvfs(above)
    return above, found.f_bavail * found.f_frsize


def entry_of(path: str, found: os.stat_result, link: str = "") -> Entry | None:
    """None for what is neither file, folder nor link."""
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link"))
    kind = next((name for test, name in kinds if test(found.st_mode)), None)
    if kind is None:
        return None
    return Entry(
        path=path, kind=cast(Kind, kind), size=found.st_size if kind == "file" else 0, mode=found.st_mode & 0o777,
        mtime_ns=found.st_mtime_ns, inode=found.st_ino, link=link,
    )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Tree:
    """What was found. A folder comes before what is in it."""

    entries: list[Entry] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Devices, sockets and the like, which cannot be sent: path and what it is."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(one.size for one in self.entries)

    @property
    def files(self) -> int:
        return sum(one.kind == "file" for one in self.entries)


def walk(root: bytes, *, only: Iterable[str] = ("",)) -> Tree:
    """Everything of `root` that lies at or under the paths `only`. A link as `root` is followed, no other one is.

    Raises `OSError` when `root` itself cannot be looked at.
    """
    os.stat(root)
    tree = Tree()
    seen: set[str] = set()
    for path in only:
        parts = path.split("/") if path else []
        for above in ("/".join(parts[:upto]) for upto in range(len(parts))):
            if above not in seen:
                seen.add(above)
                _add(tree, root, above)
        if _add(tree, root, path):
            _under(tree, root, path)
    return tree


def _add(tree: Tree, root: bytes, path: str) -> bool:
    """Whether it is a folder that was added."""
    place = at(root, path)
    try:
        found = os.lstat(place) if path else os.stat(place)
        link = decoded(os.readlink(place)) if stat.S_ISLNK(found.st_mode) else ""
    except FileNotFoundError:
        return False  # it has gone meanwhile, as files of a living run do
    except OSError as error:
        tree.unreadable.append((path, error.strerror or str(error)))
        return False
    one = entry_of(path, found, link)
    if one is None:
        tree.left_out.append((path, "no file, folder or link"))
        return False
    tree.entries.append(one)
    return one.kind == "dir"


def _under(tree: Tree, root: bytes, path: str) -> None:
    """Adds what is in a folder. A stack, not a recursion: folders may be deeper than Python's own stack."""
    stack = [path]
    while stack:
        folder = stack.pop()
        try:
            names = sorted(os.listdir(at(root, folder)))
        except FileNotFoundError:
            continue
        except OSError as error:
            tree.unreadable.append((folder, error.strerror or str(error)))
            continue
        lead = f"{folder}/" if folder else ""
        inner = [lead + decoded(name) for name in names if not name.startswith(PART)]
        stack += [one for one in inner if _add(tree, root, one)]
