"""What a script of `script.py` printed, as facts by key; with what it was busy when it printed no more. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import field
from typing import Any

from orchestrator import ailments
from orchestrator.ailments import Device, Gpu, Mount
from orchestrator.model import Disk
from orchestrator.record import record

UNLIMITED = 1 << 60
"""cgroup v1 has no word for it, but a number that no machine has."""


@record
class Report:
    """Facts by key, each as often as it was told, in order."""

    facts: dict[str, list[str]] = field(default_factory=dict)
    whole: bool = False
    """It came to its end."""
    busy: str = ""
    """The part that it was at last."""
    broke: str = ""
    """Why it came to no end."""

    @property
    def answered(self) -> bool:
        return "at" in self.facts

    def all(self, key: str) -> list[str]:
        return self.facts.get(key, [])

    def one(self, key: str, default: str = "") -> str:
        """The last that was told."""
        return (self.all(key) or [default])[-1]

    def text(self, key: str) -> str:
        return "\n".join(self.all(key)).strip()

    def number(self, key: str) -> int | None:
        value = self.one(key)
        return int(value) if re.fullmatch(r"-?\d+", value) else None

    def looked_at(self, part: str) -> bool:
        """Whether the part named so was come to, and left behind."""
        parts = self.all("at")
        return any(one == part for one in parts) and (self.whole or parts[-1] != part)

    def mounted(self, path: str) -> str | None:
        """The key of a container's configuration that mounts its volume at `path`: rootfs, mp0, ... None where that is
        no volume, but a folder of the node."""
        for row in self.all("conf"):
            match = re.match(r"(rootfs|mp\d+): ([^,]+)(?:,.*?\bmp=([^,]+))?", row)
            if match and (match[3] or "/") == path and not match[2].startswith("/"):
                return match[1]
        return None

    # --- what several checks read -----------------------------------------------------------------------------------

    @property
    def user(self) -> str:
        return self.one("user") or self.one("login") or "the user"

    @property
    def groups(self) -> list[str]:
        return self.one("groups").split()

    def program(self, name: str) -> str | None:
        """Where it is."""
        rows = dict(row.partition(" ")[::2] for row in self.all("program"))
        return rows.get(name) or None

    @property
    def gpus(self) -> list[Gpu]:
        return ailments.gpus(self.text("smi")) if self.number("smi-code") == 0 else []

    @property
    def module(self) -> str | None:
        return ailments.kernel_module(self.text("module"))

    @property
    def devices(self) -> dict[str, Device]:
        """The GPUs' device files that are there, by path."""
        opens = dict(row.partition(" ")[::2] for row in self.all("opens"))
        found = {}
        for row in self.all("device"):
            if match := re.match(r"(.)([rwxsStT-]{9})\S*\s+\d+\s+(\S+)\s+(\S+)\s.*\s(/dev/\S+)$", row):
                kind, letters, owner, group, path = match.groups()
                bits = "".join("0" if letter in "-ST" else "1" for letter in letters)
                found[path] = Device(
                    path=path, character=kind == "c", owner=owner, group=group, mode=int(bits, 2),
                    refusal=opens.get(path) or None,
                )  # fmt: skip
        return found

    @property
    def torch(self) -> dict[str, Any] | None:
        """What torch said of itself."""
        for row in reversed(self.all("torch")):
            if row.startswith("specctl-torch {"):
                try:
                    return dict(json.loads(row.partition(" ")[2]))
                except ValueError:
                    return None
        return None

    def limit(self, title: str) -> int | None:
        """A soft limit of /proc/self/limits; None: unlimited, or not told."""
        return ailments.soft_limit(self.text("limits"), title)

    def memory_bytes(self, name: str) -> int | None:
        """A figure of /proc/meminfo."""
        match = re.search(rf"^{name}:\s+(\d+) kB", "\n".join(self.all("meminfo")), re.MULTILINE)
        return int(match[1]) << 10 if match else None

    def cgroup(self, *names: str) -> tuple[int, str] | None:
        """(the least limit under one of these names, the folder it is in); None: no limit."""
        limits = []
        for row in self.all("cgroup"):
            folder, _, rest = row.rpartition(" ") if row.count(" ") == 2 else ("", "", "")
            place, _, name = folder.partition(" ")
            if name in names and rest.isdigit() and int(rest) < UNLIMITED:
                limits.append((int(rest), place))
        return min(limits, default=None)

    def in_cgroup(self, place: str, *names: str) -> int | None:
        """What a cgroup uses."""
        for row in self.all("cgroup"):
            parts = row.split(" ")
            if len(parts) == 3 and parts[0] == place and parts[1] in names and parts[2].isdigit():
                return int(parts[2])
        return None

    def place(self, key: str) -> Place | None:
        """A folder that was looked at; None: it was not."""
        found = next((row for row in self.all("place") if row.split(" ")[0] == key), None)
        if found is None:
            return None
        _, state, path = found.split(" ", 2)
        mount = ailments.mount_of("\n".join(self.all("mount")), path)
        blocks, inodes = self._df("blocks", key), self._df("inodes", key)
        disk = None
        if blocks is not None:
            total, free = blocks
            disk = Disk(
                mount=mount.at, total_bytes=total << 10, free_bytes=free << 10,
                free_inodes=inodes[1] if inodes and inodes[0] else None, read_only=mount.read_only,
            )  # fmt: skip
        return Place(path=path, is_directory="d" in state, writable="w" in state, mount=mount, disk=disk)

    def _df(self, kind: str, key: str) -> tuple[int, int] | None:
        """(in all, available)"""
        for row in self.all(kind):
            name, _, text = row.partition(" ")
            match = re.search(r"\s(\d+)\s+(\d+)\s+(\d+)\s+(?:\d+%|-)\s+/", text)
            if name == key and match:
                return int(match[1]), int(match[3])
        return None


@record
class Place:
    """A folder, or what stands in its place."""

    path: str
    is_directory: bool
    writable: bool
    """For the run's user."""
    mount: Mount
    disk: Disk | None


def read(text: str, token: str, *, broke: str = "") -> Report:
    """The facts among whatever else was printed. `broke` says why no more came, if the end is not among them."""
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(f"{token} "):
            key, _, value = line[len(token) + 1 :].partition(" ")
            facts.setdefault(key, []).append(value.rstrip("\r"))
    whole = "end" in facts
    return Report(
        facts=facts, whole=whole, busy=(facts.get("at") or [""])[-1],
        broke="" if whole else broke or "the answer ended in the middle",
    )  # fmt: skip
