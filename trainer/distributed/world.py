"""The processes of one training: how they meet, what they tell each other, and how one knows that another has failed.

Figures and gradients travel over NCCL between GPUs, over gloo elsewhere. The store that torchrun keeps for all of them
outlives each: a process that fails notes it there, by which the others know that what then breaks at their own end is
not their failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainer.config import ConfigError
from trainer.distributed.ranks import Ranks
from trainer.kept import changed

T = TypeVar("T")
FAILED = "trainer/failed"


class World:
    """Made by `join`; of one thread at a time, but for `tell_failure` and `failure_elsewhere`."""

    def __init__(self, ranks: Ranks, store: Any) -> None:
        self.ranks, self._store = ranks, store
        self._told = False

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
            if self._store.add(f"{FAILED}/count", 1) == 1:
                self._store.set(FAILED, worker)

    def failure_elsewhere(self) -> str | None:
        """The worker for whose reason everybody is to end, if this process has not told of one itself."""
        if self._told:
            return None
        try:
            return self._store.get(FAILED).decode() if self._store.check([FAILED]) else None
        except RuntimeError:
            return None


def join(ranks: Ranks, device: torch.device) -> World:
    """This process as one of all; waits until all are there."""
    store, rank, size = next(rendezvous("env://"))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size,
        device_id=device if on_gpu else None,
    )  # fmt: skip
    return World(ranks, store)


def leave() -> None:
    """After a good end; where others hang, this would hang too."""
    dist.destroy_process_group()
