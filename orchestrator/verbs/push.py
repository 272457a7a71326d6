"""`push`: a file or folder of this machine to a place of a target, resumable, and verified by hash on both sides.

First the target says where it will lie and what of it is there already (a hash a file); then one stream brings the
rest. What a broken transfer left is gone on from, after its hash has been compared.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from orchestrator import frames
from orchestrator.agent.parcel import Claim, Outgoing
from orchestrator.agent.tree import Entry, Tree, base_name, decoded, shown, walk
from orchestrator.errors import ConfigError, PreflightError, SpecctlError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.remote import Agent, understood

IDLE_S = 300.0
"""A file that is synced to a slow disk may take its time."""
LISTED = 1000
"""Entries in one frame."""
AGAIN = "the same command again goes on where this one ended"

E = TypeVar("E", bound=SpecctlError)


class Watcher(Protocol):
    """Who is told how a transfer comes along."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def begin(self, doing: str, files: int, size: int) -> None:
        """So many files and bytes are to be compared or sent."""

    def at(self, files: int | None, size: int) -> None:
        """So many of them are done."""


@dataclass(kw_only=True, slots=True)
class Result:
    """What was done. `failed` and `left_out` are (path, why)."""

    target: Target
    source: str
    destination: str
    files: int = 0
    """Files and links that were written."""
    same: int = 0
    """Those that were there already, with the same content."""
    sent_bytes: int = 0
    resumed_bytes: int = 0
    """Bytes that an earlier transfer had left there, and that were not sent again."""
    total_files: int = 0
    total_bytes: int = 0
    took_s: float = 0.0
    failed: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    sha256: str | None = None
    """Of a single file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    root: str
    there: bool
    free: int
    disk: str
    """Which disk has so much room, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrived:
    files: int
    same: int
    written: int
    resumed: int


def run(fleet: Fleet, name: str, source: Path, destination: str, watcher: Watcher) -> Result:
    """Raises when nothing could be sent or the link was lost; what failed of single files is in the `Result`."""
    began = time.monotonic()
    target = fleet.inventory.resolve(name)
    if not destination:
        raise ConfigError("DST is empty", hint="name a place on the target: /data/NAME, ~/NAME, or NAME in its workdir")
    if destination.startswith(f"{name}:"):
        raise ConfigError(
            f"DST {destination}: the target is named once, before SRC", target=name,
            hint=f"specctl push {name} SRC {shlex.quote(destination.removeprefix(f'{name}:') or 'DST')}",
        )  # fmt: skip
    root, tree = read(source)
    agent = fleet.agent(target)
    names = {one.path.partition("/")[0] for one in tree.entries}
    answer = agent.call(
        "receive", ask="place", dst=decoded(os.fsencode(destination)), name=base_name(root),
        kind=tree.entries[0].kind, names=sorted(names),
    )  # fmt: skip
    place = understood(_Place, answer, target)
    result = Result(
        target=target, source=str(source), destination=place.root, total_files=tree.files, total_bytes=tree.bytes,
        failed=list(tree.unreadable), left_out=tree.left_out,
    )  # fmt: skip
    watcher.note(f"{shown(str(source))} to {target.name}:{shown(place.root)}")
    parcel = secrets.token_hex(8)
    claims: dict[int, Claim] = {}
    if place.there:
        claims = _claims(agent, parcel, place, tree, watcher)
    compared = _Compared(watcher)
    outgoing = Outgoing(root, tree.entries, claims, tick=compared.tick)
    compared.begin(f"comparing with {target.name}", len(claims), sum(claim.have for claim in claims.values()))
    have = sum(claims[index].have for index in list(claims) if outgoing.check(index))
    if tree.bytes - have > place.free:
        raise PreflightError(
            f"{shown(place.root)} has too little room: {tree.bytes - have:,} bytes are to be sent, and {place.disk}",
            target=target.name, hint="make room there, or push to another disk",
        )  # fmt: skip

    def payload() -> Iterator[bytes]:
        yield from listing(parcel, tree.entries)
        for events, raw in outgoing.frames():
            yield frames.encode(parcel, {"events": events}, raw)
        yield frames.encode(parcel, {"end": True})

    watcher.begin("sending", tree.files, tree.bytes - have)
    final: dict[str, Any] = {}
    try:
        with agent.stream(
            "receive", payload=payload(), deadline_s=None, idle_s=IDLE_S, root=place.root, parcel=parcel
        ) as answers:
            for final in answers:
                heard(final, watcher)
    except UnreachableError as error:
        raise resumable(error) from error
    arrived = understood(_Arrived, final, target)
    result.files, result.same = arrived.files, arrived.same
    result.sent_bytes, result.resumed_bytes = arrived.written, arrived.resumed
    result.failed += [(str(path), str(why)) for path, why in final["failed"]]
    result.sha256 = next(iter(final["sha256"].values()), None) if tree.entries[0].kind == "file" else None
    if result.sha256 is None and tree.entries[0].kind == "file" and result.same and claims:
        result.sha256 = claims[0].sha256
    result.took_s = time.monotonic() - began
    return result


def read(source: Path) -> tuple[bytes, Tree]:
    """The bytes of its name, and what is in it. Raises `ConfigError`."""
    root = os.fsencode(source.expanduser())
    try:
        tree = walk(root)
    except OSError as error:
        raise ConfigError(f"{shown(str(source))}: {(error.strerror or str(error)).lower()}") from error
    if not tree.entries:
        raise ConfigError(f"{shown(str(source))}: is neither a file nor a folder")
    if tree.entries[0].kind == "file" and not os.access(root, os.R_OK):
        raise ConfigError(f"{shown(str(source))}: permission denied")
    return root, tree


def listing(parcel: str, entries: Sequence[Entry], claims: dict[int, Claim] | None = None) -> Iterator[bytes]:
    """The list of what is sent or wanted, as the agent reads it."""
    known = claims or {}
    for start in range(0, max(1, len(entries)), LISTED):
        part = range(start, min(start + LISTED, len(entries)))
        yield frames.encode(parcel, {
            "entries": [entries[index].wire() for index in part], "more": start + LISTED < len(entries),
            "claims": [[index, *known[index].wire()] for index in part if index in known],
        })  # fmt: skip


def heard(frame: dict[str, Any], watcher: Watcher) -> None:
    """Passes on what the agent says of its progress."""
    if "waiting" in frame:
        watcher.note(f"waiting {frame['waiting']}")
    elif "done" in frame:
        watcher.at(*frame["done"])


def resumable(error: E) -> E:
    """`error`, which broke a transfer in the middle, with what to do about it."""
    return type(error)(error.message, target=error.target, run_id=error.run_id, hint=AGAIN)


def refuse(conflicts: Sequence[Sequence[str]], root: str, target: Target | None) -> None:
    """Raises when something stands in the way: nothing is ever removed for a transfer."""
    if conflicts:
        listed = "; ".join(f"{shown(f'{root}/{path}' if path else root)} {why}" for path, why in conflicts[:5])
        more = f"; and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
        raise PreflightError(
            f"{listed}{more}", target=target.name if target else None, hint="move it away, or choose another place",
        )  # fmt: skip


def _claims(agent: Agent, parcel: str, place: _Place, tree: Tree, watcher: Watcher) -> dict[int, Claim]:
    watcher.begin(f"comparing on {agent.target.name}", tree.files, tree.bytes)
    final: dict[str, Any] = {}
    with agent.stream(
        "receive", payload=listing(parcel, tree.entries), deadline_s=None, idle_s=IDLE_S, ask="claims",
        root=place.root, parcel=parcel,
    ) as answers:  # fmt: skip
        for final in answers:
            if "compared" in final:
                watcher.at(None, final["compared"])
    refuse(final["conflicts"], place.root, agent.target)
    return {index: Claim(have=have, sha256=sha256, part=part) for index, have, sha256, part in final["claims"]}


class _Compared:
    """Counts what is compared here."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._bytes = watcher, 0

    def begin(self, doing: str, files: int, size: int) -> None:
        if files:
            self._watcher.begin(doing, files, size)

    def tick(self, count: int) -> None:
        self._bytes += count
        self._watcher.at(None, self._bytes)
