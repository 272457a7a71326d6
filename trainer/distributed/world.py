"""The processes of one training: how they meet, what they tell each other, and how one knows that another has failed.

Figures and gradients travel over NCCL between GPUs, over gloo elsewhere. The store that torchrun keeps for all of them
outlives each: a process that fails notes it there, by which the others know that what then breaks at their own end is
not their failure. For one that was killed, another of its machine does (`neighbours.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainer.config import ConfigError
from trainer.distributed import neighbours
from trainer.distributed.neighbours import Gone
from trainer.distributed.ranks import Ranks
from trainer.kept import changed

T = TypeVar("T")
FAILED, PID, LEFT = "trainer/failed", "trainer/pid", "trainer/left"
PATIENCE_S = 2.0
"""For the kernel's word that the process has gone whose connection has just broken."""


class World:
    """Made by `join`; of one thread at a time, but for `tell_failure` and `failure_elsewhere`."""

    def __init__(self, ranks: Ranks, store: Any) -> None:
        # A connection of its own: one that waits on the store for another process holds up nobody here.
        self.ranks, self._store = ranks, store.clone()
        self._told = False
        self._lost = threading.Event()

    # --- the same for all ---

    def from_leader(self, make: Callable[[], T]) -> T:
        """What `make` returns in the process that leads, or the `ConfigError` that it raises there."""
        found: list[Any] = [None, None]
        if self.ranks.leads:
            try:
                found[0] = make()
            except ConfigError as error:
                found[1] = str(error)
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        if found[1] is not None:
            raise ConfigError(found[1])
        value: T = found[0]
        return value

    def from_all(self, own: T) -> list[T]:
        """By process."""
        everybody: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(everybody, own)
        return everybody

    def see_that_all_have(self, facts: dict[str, Any]) -> None:
        """Raises `ConfigError`, in all processes, where those of one are not the leader's."""
        everybody = self.from_all(facts)
        for rank, own in enumerate(everybody):
            if others := changed(everybody[0], own):
                raise ConfigError(
                    f"process {rank} has not the same {', '.join(others)} as process 0; give all machines the same"
                    " configuration, target and data"
                )

    # --- who has failed ---

    def tell_failure(self, worker: str) -> None:
        """The others are to end, for this worker's reason."""
        self._told = True
        with contextlib.suppress(RuntimeError):  # who keeps the store has gone, and takes the others along
            self._tell(worker)

    def _tell(self, worker: str) -> bool:
        first: bool = self._store.add(f"{FAILED}/count", 1) == 1
        if first:
            self._store.set(FAILED, worker)
        return first

    def failure_elsewhere(self, error: BaseException | None = None) -> str | None:
        """The worker for whose reason everybody is to end, if this process has not told of one itself. `error` is what
        has just broken here; who broke it may not be known yet."""
        found = self._failure_elsewhere()
        if found is None and isinstance(error, RuntimeError) and not self._told:  # such as torch raises
            self._lost.wait(PATIENCE_S)
            found = self._failure_elsewhere()
        return found

    def _failure_elsewhere(self) -> str | None:
        if self._told:
            return None
        try:
            return self._store.get(FAILED).decode() if self._store.check([FAILED]) else None
        except RuntimeError:
            return None

    def watch(self, note: Callable[[Gone, bool], None]) -> None:
        """Whether others of this machine end badly, without having told of it; `note` that, and whether this process is
        the first to."""
        begin = self.ranks.rank - self.ranks.local_rank
        others = [rank for rank in range(begin, begin + self.ranks.local_size) if rank != self.ranks.rank]

        def bad_end(gone: Gone) -> bool:
            with contextlib.suppress(RuntimeError):
                if self._store.check([f"{LEFT}/{gone.rank}"]):
                    return False
                first = not self._told and self._failure_elsewhere() is None and self._tell(str(gone))
                if first or self._failure_elsewhere() == str(gone):
                    note(gone, first)
            self._lost.set()
            return True

        neighbours.watch({rank: int(self._store.get(f"{PID}/{rank}")) for rank in others}, bad_end)

    def leave(self) -> None:
        """After a good end; where others hang, this would hang too."""
        with contextlib.suppress(RuntimeError):  # who keeps the store may have gone long before, and nobody asks then
            self._store.set(f"{LEFT}/{self.ranks.rank}", "")
        dist.destroy_process_group()


def join(ranks: Ranks, device: torch.device) -> World:
    """This process as one of all; waits until all are there. NVLink's multicast stays off, unless the environment says
    `NCCL_NVLS_ENABLE` itself."""
    # That is not everywhere allowed, and NCCL does not find out by itself.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    store, rank, size = next(rendezvous("env://"))
    store.set(f"{PID}/{rank}", str(os.getpid()))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size,
        device_id=device if on_gpu else None,
    )  # fmt: skip
    return World(ranks, store)
