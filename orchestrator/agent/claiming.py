"""How a run comes by its GPUs: asked about before anything is sent, claimed by its supervisor before it starts.

The supervisor writes down what it asks for and gets (gpus.json), waits in line if it is to, and tells the program its
GPUs by UUID. It lets go of them by ending.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from contextlib import suppress

from orchestrator.agent import claimed, claims, devices, files, gpu, locks, records, system
from orchestrator.agent.clock import Clock
from orchestrator.agent.journal import Journal
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.pane import Pane
from orchestrator.model import (
    Claimant,
    Device,
    GpuClaim,
    GpuWish,
    Obstacle,
    RunPaths,
    RunSpec,
    from_json,
    to_json,
    told,
)
from orchestrator.model.gpus import listed

POLL_S = 0.5
RECHECK_S = 5.0
"""How often nvidia-smi is asked whether who uses a GPU without a claim still does."""
OTHERS = "--queue waits in line, --gpus chooses others (none: for a program that uses none), --no-claim shares it"


class NotGranted(Exception):
    """The run does not get its GPUs, and why; `stopped`: somebody has stopped it while it waited."""

    def __init__(self, why: str, *, stopped: bool = False) -> None:
        super().__init__(why)
        self.why, self.stopped = why, stopped


def preflight(call: Call) -> tuple[list[str], bool]:
    """(what there is to say of the claim that a launch is about to make, whether it makes one). Request: `wish`, and
    `visible`, the value of CUDA_VISIBLE_DEVICES that the launch sets. Raises `Refusal` when it would not be granted."""
    if call.request.get("wish") is None:
        return [], False
    wish = from_json(GpuWish, call.request["wish"])
    environ = system.base_environ(scrub=bool(call.request.get("scrub")))
    if (visible := call.request.get("visible")) is not None:
        environ[devices.VISIBLE] = str(visible)
    pool = wanted(wish, environ)
    if not pool:
        return [], False
    folder, count = folder_of(wish), wish.count or len(pool)
    found = claimed.obstacles(folder, pool, claimed.ahead(claimed.line(folder), pool, None))
    what = _wish(pool, count)
    if len(pool) - len(found) >= count:
        return [], True
    if wish.queue:
        return [f"{what}: it will wait in line; {told(found, time.time())}"], True
    raise Refusal("preflight", f"{what} cannot be claimed: {told(found, time.time())}", OTHERS)


def wanted(wish: GpuWish, environ: Mapping[str, str]) -> list[Device]:
    """The devices that the wish is about; none where there are none, or none that can be named. Raises `Refusal`."""
    known = devices.there()
    if not known and not wish.must:
        return []
    if not known:
        why = gpu.ask().why or "nvidia-smi -L lists no GPU there"
        raise Refusal(
            "preflight", f"{why}, so that none can be claimed",
            "look with nvidia-smi -L there, or launch without --gpus and --queue",
        )  # fmt: skip
    pool = devices.pool(wish, environ, known)
    if not pool and wish.must:
        raise Refusal(
            "preflight", f"{devices.VISIBLE}={environ.get(devices.VISIBLE, '')!r} of its environment hides every GPU",
            "name them with --gpus 0,1, or take the variable out of the environment",
        )  # fmt: skip
    return pool


def folder_of(wish: GpuWish) -> str:
    try:
        return claims.folder_of(wish.claims_dir)
    except locks.Unusable as error:
        hint = f"{error.hint}; or --no-claim"
        raise Refusal("preflight", f"GPUs cannot be claimed: {error.message}", hint) from error


def _wish(pool: list[Device], count: int) -> str:
    numbers = listed([one.number for one in pool])
    return numbers if count == len(pool) else f"{count} of {numbers}"


class Claiming:
    """The supervisor's claim, from its wish to its end."""

    def __init__(self, paths: RunPaths, spec: RunSpec, journal: Journal, clock: Clock, pane: Pane) -> None:
        self.paths, self.spec, self.journal, self.clock, self.pane = paths, spec, journal, clock, pane
        self.claims: claims.Claims | None = None
        self._said = ""

    def settle(self, environ: dict[str, str]) -> None:
        """Comes back with what was asked for, however long that takes; `environ` then names it. Raises `NotGranted`."""
        wish = self.spec.wish
        if wish is None:
            return
        # This process has a plain PATH, and nvidia-smi is to be found where the program would find it.
        os.environ["PATH"] = environ.get("PATH", os.defpath)
        try:
            if not (pool := wanted(wish, environ)):
                return
            folder = folder_of(wish)
        except Refusal as refusal:
            raise NotGranted(f"{refusal.message} ({refusal.hint})") from refusal
        claim = GpuClaim(
            nonce=self.spec.nonce, claims_dir=folder, pool=pool, count=wish.count or len(pool),
            asked_at=self.clock.now(),
        )  # fmt: skip
        self.claims = claims.Claims(folder, pool, claim.count, Claimant(
            run_id=self.spec.run_id, place=wish.place, host=os.uname().nodename, owner=self.spec.owner,
            boot=claimed.boot_id(), since=time.time(),
        ))  # fmt: skip
        try:
            claim = self._wait(claim, self.claims) if wish.queue else self._at_once(claim, self.claims)
        except BaseException:
            self.claims.release()
            raise
        held = [one for one in pool if one.uuid in self.claims.held]
        self._write(dataclasses.replace(claim, granted_at=self.clock.now(), held=held))
        environ[devices.VISIBLE] = devices.visible(held)

    def keep(self) -> None:
        if self.claims is not None:
            self.claims.keep()

    def _at_once(self, claim: GpuClaim, mine: claims.Claims) -> GpuClaim:
        try:
            if obstacles := mine.take(devices.used(claim.pool), wait=False):
                raise NotGranted(f"{claim.wish} cannot be claimed: {told(obstacles, time.time())} ({OTHERS})")
        except OSError as error:
            raise NotGranted(f"{claim.wish} cannot be claimed: {claim.claims_dir}: {error.strerror}") from error
        return claim

    def _wait(self, claim: GpuClaim, mine: claims.Claims) -> GpuClaim:
        used: dict[str, str] = {}
        asked_at: float | None = None
        while True:
            try:
                obstacles = self._look(claim, mine)
                free = claim.count <= len(claim.pool) - len(obstacles)
                due = asked_at is None or time.monotonic() - asked_at > RECHECK_S
                if free and due:
                    used, asked_at = devices.used(claim.pool), time.monotonic()
                if not mine.in_line or (free and due):
                    obstacles = mine.take(used, wait=True)
                    if not obstacles:
                        break
                elif free:
                    obstacles = []  # somebody uses what nobody has claimed: nothing new is known of it
            except OSError as error:  # the folder is not there just now: it is waited for as well
                obstacles = [Obstacle(gpu=claim.pool[0].number, what=f"out of reach: {error.strerror}")]
            if claim.queued_at is None:
                claim = dataclasses.replace(claim, queued_at=self.clock.now())
                self._write(claim)
                self.journal.event("queued", gpus=claim.wish, behind=told(obstacles, time.time()))
            if obstacles:
                self._say(claim, obstacles)
            self._heed(claim)
            mine.keep()
            time.sleep(POLL_S)
        if claim.queued_at is not None:
            waited_s = round(self.clock.now() - claim.queued_at, 1)
            self.journal.event("dequeued", gpus=listed(sorted(
                one.number for one in claim.pool if one.uuid in mine.held
            )), waited_s=waited_s)  # fmt: skip
        return claim

    @staticmethod
    def _look(claim: GpuClaim, mine: claims.Claims) -> list[Obstacle]:
        before = claimed.ahead(claimed.line(claim.claims_dir), claim.pool, mine.number)
        return claimed.obstacles(claim.claims_dir, claim.pool, before, deep=False)

    def _heed(self, claim: GpuClaim) -> None:
        """Raises `NotGranted` when somebody has stopped the run, or has removed it."""
        if (stop := records.stop_request(self.paths)) is not None:
            waited = self.clock.now() - (claim.queued_at or claim.asked_at)
            raise NotGranted(
                f"stopped by {stop.by or 'somebody'} while it waited in line for {claim.wish}, after {waited:.0f} s",
                stopped=True,
            )
        if not os.path.isdir(self.paths.root):
            raise NotGranted("its run directory was removed while it waited in line")

    def _say(self, claim: GpuClaim, obstacles: list[Obstacle]) -> None:
        text = "; ".join(dict.fromkeys(f"GPU {one.gpu} {one.what}" for one in obstacles))
        if text != self._said:
            self._said = text
            self.pane.say(f"specctl: in line for {claim.wish}: {text}")

    def _write(self, claim: GpuClaim) -> None:
        with suppress(OSError):  # a full disk: the lock is the claim, and a ticket the place in line
            files.write_json(self.paths.gpus, to_json(claim))
