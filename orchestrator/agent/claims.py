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

from orchestrator.agent import claimed, locks
from orchestrator.agent.claimed import HELD, NAMED, TICKET, Ticket
from orchestrator.model import Claimant, Device, Obstacle, to_json

PLACES = ("/run/lock", "/tmp")
"""Where a container keeps its claims by itself: the first of these in which everybody may make a folder."""
NAME = "specctl-gpus"
TURN_S = 5.0
"""How long the others may take with their turn: it is a matter of milliseconds, unless one was stopped amid it."""
LOOK_S, TOUCH_S = 5.0, 600.0
"""How often a holder looks whether its locks are where others look for them, and touches them, for programs that clean
up by age."""
FORGOTTEN = re.compile(r"\.[a-z0-9-]+\.tmp")


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
            before = claimed.ahead(claimed.line(self.folder), self.pool, self.number)
            obstacles = {one.uuid: claimed.obstacle(self.folder, one, used, before) for one in self.pool}
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
            if one.uuid in self.held and not locks.stands(self.held[one.uuid], claimed.lock_path(self.folder, one))
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
        path = claimed.lock_path(self.folder, one)
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
        number = max(claimed.numbers(self.folder), default=0) + 1
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


def tidy(folder: str) -> None:
    """Removes what the dead have left in line; only with the turn. What is another user's stays, and counts for
    nothing."""
    for name in os.listdir(folder):
        if TICKET.fullmatch(name) or FORGOTTEN.fullmatch(name):
            path = os.path.join(folder, name)
            with suppress(OSError), locks.looking(path) as fd:
                if not locks.is_held(fd):
                    os.unlink(path)


def _text(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode("ascii") + b"\n"
