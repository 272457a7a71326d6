"""Replicas in step: gradients added up in a fixed order, and a proof that all replicas hold the same weights.

Whoever comes last to an exchange tells all devices what to do (`exchange.py`): every replica ends with the same bits,
whatever the threads' timing. Losses are already divided by the weight of the whole step, so the sum *is* the average.
On CUDA the threads only meet; their devices wait for each other by events, and no thread waits for a device: some
layers' gradients are on their way while the device is in the backward of those before. A barrier that another worker's
failure broke raises `Aborted`.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from trainer.exchange import Offer, Part, Side, event_here, exchange
from trainer.pipeline import Aborted, waiting

HASH_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Weights whose products, 8 bytes each, exist at once: few enough for a cache, and enough to keep a GPU busy."""
MEAN_CHUNK = 1 << 26
"""Floats of which a mean is made at a time: copies of so many exist meanwhile."""


class ReplicasDiffer(RuntimeError):
    """The replicas no longer hold the same weights: a bug or broken hardware, never to be trained on."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class Replicas:
    """The meeting place of `count` drafter threads; each calls every method as often as the others, with its rank.
    `devices` are theirs, by rank; left out, they share one.

    Waiting has no time limit: after `abort`, all who wait or will wait raise `Aborted`.
    """

    def __init__(self, count: int, devices: Sequence[Hashable] = ()) -> None:
        self.count = count
        sides: dict[Hashable, list[int]] = {}
        for rank, device in enumerate(devices or [None] * count):
            sides.setdefault(device, []).append(rank)
        self._sides = [Side(ranks) for ranks in sides.values()]
        """In the order of the lowest ranks there."""
        self._side_of = {rank: side for side in self._sides for rank in side.ranks}
        self._barrier = threading.Barrier(count)
        self._offers: dict[int, Offer] = {}
        """By rank, of the exchange that is next."""
        self._came = 0
        self._coming = threading.Lock()

    def abort(self) -> None:
        """Let every replica that waits, or will, raise `Aborted`."""
        self._barrier.abort()

    def meet(self) -> None:
        """Wait until all replicas are here."""
        try:
            with waiting("peers"):
                self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Aborted from None

    def average(self, rank: int, flat: Tensor, *, parts: Sequence[Part] = (), mean: bool = False) -> None:
        """Make `flat` [P], the gradients, say, the sum over all replicas, in place, or their `mean`; nobody reads it
        any more, as far as its device is concerned, when this returns.

        On CUDA the work goes to streams of its own, part after part as each is `ready`: while the device is still busy
        with what the later ones come from. Without parts it is one, which is ready when the current stream gets here.
        """
        parts = parts or [Part(low=0, high=len(flat), ready=event_here(flat.device))]
        self._offers[rank] = Offer(flat=flat, parts=parts)
        with self._coming:
            self._came += 1
            last = self._came % self.count == 0
        if last:
            if self._barrier.broken:
                raise Aborted
            for side in self._sides:
                side.bring(self._offers)
            exchange(self._sides, mean=mean)
        self.meet()
        if flat.device.type == "cuda":
            torch.cuda.current_stream(flat.device).wait_event(self._side_of[rank].done)

    def mean(self, rank: int, buffers: Sequence[Tensor]) -> None:
        """Make each of the flat `buffers` the mean over all replicas, in place."""
        for buffer in buffers:
            ready = event_here(buffer.device)
            parts = [
                Part(low=low, high=min(low + MEAN_CHUNK, len(buffer)), ready=ready)
                for low in range(0, len(buffer), MEAN_CHUNK)
            ]
            self.average(rank, buffer, parts=parts, mean=True)


def check_equal(hashes: Mapping[str, int], *, step: int) -> None:
    """Raises `ReplicasDiffer` unless the replicas' weights, by worker, have one hash. It names those that are alone
    with theirs; of two, the later one."""
    if len(set(hashes.values())) <= 1:
        return
    alike = collections.Counter(hashes.values()).most_common(1)[0][0]
    odd = [worker for worker, one in hashes.items() if one != alike]
    same = [worker for worker in hashes if worker not in odd]
    said = ", ".join(f"{worker} {one & (1 << 64) - 1:016x}" for worker, one in hashes.items())
    raise ReplicasDiffer(
        odd[0],
        f"after step {step} the weights of {', '.join(odd)} are not those of {', '.join(same)} (hashes: {said}); a bug"
        " or broken hardware: go on from the last checkpoint, on another device if it happens again",
    )


def weight_hash(weights: Tensor, *, chunk: int | None = None) -> Tensor:
    """One int64, the same on every device: the sum of all weights' bits times (2 * index + 1) cubed, modulo 2**64.

    Up to 2**31 weights, any one change and any swap of two are seen: such odd cubes of two indices differ by an odd
    multiple of twice the indices' difference, and that times a difference of 32 bits is no multiple of 2**64. So many
    at a time as there are in a `chunk`, or as suits the device.
    """
    bits = weights.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=weights.device)
    chunk = chunk or HASH_CHUNK[weights.device.type]
    for start in range(0, len(bits), chunk):
        part = bits[start : start + chunk]
        # In place: on a GPU each copy would take half a GiB.
        cubes = torch.arange(start, start + len(part), device=weights.device).mul_(2).add_(1).pow_(3)
        total += cubes.mul_(part).sum()
    return total
