"""Claims of GPUs: a lock of the kernel for each device, and a line of those who wait, in one folder.

    DIR/GPU-3f2a....lock     byte 0 is locked by the supervisor that has the GPU, byte 1 once its name is in the file
    DIR/000000000007.ticket  locked by a supervisor that waits; says for which GPUs. The least number is first in line
    DIR/turn.lock            locked for a moment by whoever takes GPUs or a place in line

Nothing here has to be cleaned up: a lock goes with its process, however that ends, and a name or a ticket without its
lock is nobody's. A run gets all that it asks for at once or nothing, so that no two can wait for each other; whoever
comes later gets none of the GPUs for which somebody before it waits, so that nobody waits for ever. Containers that
mount the same folder share its locks, for they share the kernel (docs/gpu-claims.md); where they share none, a
neighbour is seen by the memory it uses (`devices.used`), and by that alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from orchestrator.agent import locks
from orchestrator.model import Claimant, Device, GpuClaim, InLine, Misfit, Obstacle, from_json, to_json
from orchestrator.record import record

T = TypeVar("T")

PLACES = ("/run/lock", "/tmp")
"""Where a container keeps its claims by itself: the first of these in which everybody may make a folder."""
NAME = "specctl-gpus"
HELD, NAMED = 0, 1
TURN_S = 5.0
"""How long the others may take with their turn: it is a matter of milliseconds, unless one was stopped amid it."""
LOOK_S, TOUCH_S = 5.0, 600.0
"""How often a holder looks whether its locks are where others look for them, and touches them, for programs that clean
up by age."""
RECORD_BYTES = 16 << 10
TICKET = re.compile(r"(\d{12})\.ticket")
FORGOTTEN = re.compile(r"\.[a-z0-9-]+\.tmp")


@record
class Ticket:
    """A place in line."""

    number: int
    claimant: Claimant
    uuids: list[str]


def folder_of(claims_dir: str | None) -> str:
    """The folder of the claims, which is there and can be used. Raises `locks.Unusable`."""
    if claims_dir is not None:
        locks.check(claims_dir, make=False)
        return claims_dir
    folder = os.path.join(next(filter(_open_to_all, PLACES), PLACES[-1]), NAME)
    locks.check(folder, make=True)
    return folder


def _open_to_all(folder: str) -> bool:
    try:
        return os.stat(folder).st_mode & 0o1007 == 0o1007
    except OSError:
        return False


class Claims:
    """The folder as one claimant uses it; what it takes it has until `release`, or its end."""

    def __init__(self, folder: str, pool: Sequence[Device], count: int, claimant: Claimant) -> None:
        self.folder, self.pool, self.count, self.claimant = folder, pool, count, claimant
        self.held: dict[str, int] = {}
        """UUID -> the open file that has its lock."""
        self.number: int | None = None
        """Its place in line."""
        self._ticket: int | None = None
        self._since = claimant.since
        """When it asked last: since then it has what it has."""
        self._looked_at = self._touched_at = time.monotonic()

    def take(self, used: Mapping[str, str], *, wait: bool) -> list[Obstacle]:
        """Takes what is asked for, all or nothing. Returns nothing when it has it, or else what stands in its way; with
        `wait` it then has a place in line. `used`: UUID -> who uses it without a claim. Raises `OSError`."""
        with self._turn() as mine:
            if not mine:
                return [Obstacle(gpu=one.number, what=f"out of reach: {self._turn_path} is not let go of")
                        for one in self.pool]  # fmt: skip
            tidy(self.folder)
            if not self.in_line:
                self._leave()  # somebody has cleaned up: at the end of the line is better than nowhere
            before = ahead(line(self.folder), self.pool, self.number)
            obstacles = {one.uuid: obstacle(self.folder, one, used, before) for one in self.pool}
            free = [one for one in self.pool if obstacles[one.uuid] is None]
            self._since = time.time()
            if len(free) >= self.count and self._lock(free[: self.count]):
                self._leave()
                return []
            if wait and self._ticket is None:
                self._queue()
            return [one for one in obstacles.values() if one is not None] or [
                Obstacle(gpu=one.number, what="just taken by somebody") for one in self.pool
            ]

    @property
    def in_line(self) -> bool:
        """It has a place in line, and its ticket is where it counts."""
        return self._ticket is not None and locks.stands(self._ticket, self._path(self.number or 0))

    def keep(self) -> None:
        """To be called now and then: whoever cleans up must not take a claim for something old, and one whose file has
        been removed is made anew, unless another has been quicker."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        gone = [
            one for one in self.pool
            if one.uuid in self.held and not locks.stands(self.held[one.uuid], lock_path(self.folder, one))
        ]  # fmt: skip
        with suppress(OSError):
            for one in gone:
                with self._turn() as mine:
                    if mine and (fd := self._lock_one(one)) is not None:
                        os.close(self.held[one.uuid])
                        self.held[one.uuid] = fd
        if now - self._touched_at > TOUCH_S:
            self._touched_at = now
            for fd in (*self.held.values(), *([self._ticket] if self._ticket is not None else [])):
                with suppress(OSError):
                    os.utime(fd)

    def release(self) -> None:
        self._leave()
        for fd in self.held.values():
            os.close(fd)
        self.held = {}

    # --- with the turn ----------------------------------------------------------------------------------------------

    @property
    def _turn_path(self) -> str:
        return os.path.join(self.folder, "turn.lock")

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether it is this claimant's turn: one's at a time."""
        give_up_at = time.monotonic() + TURN_S
        while True:
            fd = locks.open_shared(self._turn_path)
            if locks.take(fd) and locks.stands(fd, self._turn_path):
                break
            os.close(fd)
            if time.monotonic() > give_up_at:
                yield False
                return
            time.sleep(0.01)
        try:
            yield True
        finally:
            os.close(fd)

    def _lock(self, gpus: Sequence[Device]) -> bool:
        taken: dict[str, int] = {}
        try:
            for one in gpus:
                if (fd := self._lock_one(one)) is None:
                    return False
                taken[one.uuid] = fd
            self.held, taken = taken, {}
        finally:
            for fd in taken.values():
                os.close(fd)
        return True

    def _lock_one(self, one: Device) -> int | None:
        """The open file with its lock, and the name in it."""
        path = lock_path(self.folder, one)
        fd = locks.open_shared(path)
        try:
            if locks.take(fd, HELD) and locks.stands(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, _text(to_json(dataclasses.replace(self.claimant, since=self._since))), 0)
                if locks.take(fd, NAMED):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _queue(self) -> None:
        """Takes the last place in line. Its ticket is whole and locked before it has a name that counts."""
        aside = os.path.join(self.folder, f".{self.claimant.run_id}-{os.urandom(4).hex()}.tmp")
        fd = locks.open_shared(aside)
        number = max(numbers(self.folder), default=0) + 1
        try:
            locks.take(fd)
            ticket = Ticket(number=number, claimant=self.claimant, uuids=[one.uuid for one in self.pool])
            os.pwrite(fd, _text(to_json(ticket)), 0)
            os.rename(aside, self._path(number))
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(aside)
            raise
        self._ticket, self.number = fd, number

    def _leave(self) -> None:
        if self._ticket is not None:
            path = self._path(self.number or 0)
            if locks.stands(self._ticket, path):
                with suppress(OSError):
                    os.unlink(path)
            os.close(self._ticket)
            self._ticket = self.number = None

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, f"{number:012d}.ticket")


# --- looking, which takes nothing and keeps nobody waiting -----------------------------------------------------------


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
                found.append(dataclasses.replace(ticket, number=number))
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


def tidy(folder: str) -> None:
    """Removes what the dead have left in line; only with the turn. What is another user's stays, and counts for
    nothing."""
    for name in os.listdir(folder):
        if TICKET.fullmatch(name) or FORGOTTEN.fullmatch(name):
            path = os.path.join(folder, name)
            with suppress(OSError), locks.looking(path) as fd:
                if not locks.is_held(fd):
                    os.unlink(path)


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _words(who: Claimant) -> str:
    if who.boot == boot_id():
        return who.words
    return f"{who.words}, under another kernel: the folder is shared by machines, and must not be"


def _text(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode("ascii") + b"\n"


def _read(fd: int, cls: type[T]) -> T | None:
    try:
        return from_json(cls, json.loads(os.pread(fd, RECORD_BYTES, 0)))
    except (OSError, ValueError, RecursionError, Misfit):
        return None

