"""Who has which GPU and who waits for it, as the folder of the claims says: looked at, with nothing taken.

A lock is asked about without being taken, so that whoever looks stands in nobody's way; a name or a ticket counts only
while its lock is held. `claims.py` says what lies in the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from orchestrator.agent import locks
from orchestrator.model import Claimant, Device, GpuClaim, InLine, Misfit, Obstacle, from_json
from orchestrator.record import record

T = TypeVar("T")

HELD, NAMED = 0, 1
"""The bytes of a lock file."""
RECORD_BYTES = 16 << 10
TEXT_CHARS = 200
TICKET = re.compile(r"(\d{12})\.ticket")


@record
class Ticket:
    """A place in line."""

    number: int
    claimant: Claimant
    uuids: list[str]


def lock_path(folder: str, one: Device) -> str:
    return os.path.join(folder, f"{one.uuid.replace('/', '_')}.lock")


def numbers(folder: str) -> list[int]:
    """Of every ticket that lies there, whether somebody still waits with it or not."""
    return sorted(int(match[1]) for match in map(TICKET.fullmatch, os.listdir(folder)) if match)


def line(folder: str) -> list[Ticket]:
    """Those who wait, in order. Raises `OSError` when the folder cannot be read."""
    found = []
    for number in numbers(folder):
        with suppress(OSError), locks.looking(os.path.join(folder, f"{number:012d}.ticket")) as fd:
            ticket = _read(fd, Ticket)
            # Asked last: what was there while it was locked is what its owner has written.
            if locks.is_held(fd) and ticket is not None:
                found.append(dataclasses.replace(ticket, number=number, claimant=_printable(ticket.claimant)))
    return found


def ahead(line: Sequence[Ticket], pool: Sequence[Device], number: int | None) -> list[Ticket]:
    """Those before `number` (None: before a newcomer) who wait for one of these GPUs, too."""
    mine = {one.uuid for one in pool}
    return [one for one in line if (number is None or one.number < number) and not mine.isdisjoint(one.uuids)]


def obstacle(folder: str, one: Device, used: Mapping[str, str], ahead: Sequence[Ticket]) -> Obstacle | None:
    """Why this GPU cannot be had by whoever has these before it in line; None when it can."""
    try:
        with locks.looking(lock_path(folder, one)) as fd:
            # A name counts only while its own lock is held: else it is a predecessor's.
            holder = _read(fd, Claimant) if locks.is_held(fd, NAMED) else None
            holder = holder and _printable(holder)
            if locks.is_held(fd, HELD):
                what = f"held by {_words(holder)}" if holder else "held by somebody who is just taking it"
                return Obstacle(
                    gpu=one.number, what=what, since=holder.since if holder else None,
                    run_id=holder.run_id if holder else None,
                )  # fmt: skip
    except FileNotFoundError:
        pass
    except OSError as error:
        return Obstacle(gpu=one.number, what=f"out of reach: {lock_path(folder, one)}: {error.strerror}")
    if one.uuid in used:
        return Obstacle(gpu=one.number, what=used[one.uuid])
    for ticket in ahead:
        if one.uuid in ticket.uuids:
            who = ticket.claimant
            return Obstacle(gpu=one.number, what=f"free, but {_words(who)} waits for it", run_id=who.run_id)
    return None


def obstacles(folder: str, pool: Sequence[Device], before: Sequence[Ticket], *, deep: bool = True) -> list[Obstacle]:
    """What stands in the way of whoever has these before it in line; `deep`: also who uses what nobody has claimed.
    Raises `OSError`."""
    found = [obstacle(folder, one, {}, before) for one in pool]
    if deep and None in found:
        from orchestrator.agent import devices  # which a look at what is claimed need not pay for

        used = devices.used([one for one, why in zip(pool, found, strict=True) if why is None])
        found = [why or obstacle(folder, one, used, before) for one, why in zip(pool, found, strict=True)]
    return [one for one in found if one is not None]


def lost(claim: GpuClaim, run_id: str) -> list[str]:
    """The numbers of what a run has claimed, and has not locked any more: somebody has removed its files."""
    found = {one.number: obstacle(claim.claims_dir, one, {}, ()) for one in claim.held}
    return [number for number, why in found.items() if why is None or why.run_id != run_id]


def stand(claim: GpuClaim, run_id: str) -> InLine:
    """Where a queued run stands, and what it waits for."""
    try:
        waiting = line(claim.claims_dir)
        own = next((one.number for one in waiting if one.claimant.run_id == run_id), None)
        before = ahead(waiting, claim.pool, own)
        found = obstacles(claim.claims_dir, claim.pool, before)
    except OSError as error:
        return InLine(position=0, problem=f"{claim.claims_dir} cannot be read: {error.strerror}")
    return InLine(position=len(before) + 1, ahead=[one.claimant.run_id for one in before], obstacles=found)


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _printable(who: Claimant) -> Claimant:
    """Anybody may write there, and it is shown on a terminal."""

    def shown(text: str) -> str:
        return "".join(character if character.isprintable() else "?" for character in text[:TEXT_CHARS])

    return Claimant(
        run_id=shown(who.run_id), place=shown(who.place), host=shown(who.host), owner=shown(who.owner),
        boot=shown(who.boot), since=who.since,
    )  # fmt: skip


def _words(who: Claimant) -> str:
    if who.boot == boot_id():
        return who.words
    return f"{who.words}, under another kernel: the folder is shared by machines, and must not be"


def _read(fd: int, cls: type[T]) -> T | None:
    try:
        return from_json(cls, json.loads(os.pread(fd, RECORD_BYTES, 0)))
    except (OSError, ValueError, RecursionError, Misfit):
        return None
