"""Replicas in step: gradients added up in a fixed order, and a proof that all replicas hold the same weights.

Each replica adds up its own slice of everybody's gradients, always in the order of the ranks, then fetches the slices
that the others added up: every replica ends with the same bits, whatever the threads' timing. Losses are already
divided by the weight of the whole step, so the sum *is* the average. On CUDA the threads only meet; their devices wait
for each other by events, and no thread waits for a device. A barrier that another worker's failure broke raises
`Aborted`.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.pipeline import Aborted, waiting

HASH_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Weights whose products, 8 bytes each, exist at once: few enough for a cache, and enough to keep a GPU busy."""


class ReplicasDiffer(RuntimeError):
    """The replicas no longer hold the same weights: a bug or broken hardware, never to be trained on."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class Replicas:
    """The meeting place of `count` drafter threads; each calls every method as often as the others, with its rank.

    Waiting has no time limit: after `abort`, all who wait or will wait raise `Aborted`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count)
        self._gradients: list[Tensor | None] = [None] * count
        self._reached: list[list[Any]] = [[None] * count for _ in range(3)]
        """By phase of `average` and rank: the CUDA event up to which others may rely on this replica's work. A phase
        has its own, since a quick thread is in the next one before a slow one has looked."""

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

    def average(self, rank: int, gradients: Tensor) -> None:
        """Make flat `gradients` [P] the sum over all replicas, in place; nobody reads it any more, as far as its device
        is concerned, when this returns."""
        self._gradients[rank] = gradients
        self._published(0, rank, gradients)
        low, high = self._slice(rank, len(gradients))
        total = self._part(0, low, high, gradients.device).clone()
        for other in range(1, self.count):
            total += self._part(other, low, high, gradients.device)
        gradients[low:high] = total
        self._published(1, rank, gradients)
        for other in range(self.count):
            if other != rank:
                low, high = self._slice(other, len(gradients))
                gradients[low:high] = self._part(other, low, high, gradients.device)
        # The caller changes them next: not before everybody has fetched this replica's slice.
        self._published(2, rank, gradients)

    def mean(self, rank: int, buffers: Sequence[Tensor]) -> None:
        """Make each of the flat `buffers` the mean over all replicas, in place."""
        for buffer in buffers:
            self.average(rank, buffer)
            buffer /= self.count

    def _slice(self, rank: int, size: int) -> tuple[int, int]:
        return size * rank // self.count, size * (rank + 1) // self.count

    def _part(self, rank: int, low: int, high: int, device: torch.device) -> Tensor:
        gradients = self._gradients[rank]
        assert gradients is not None
        return gradients[low:high].to(device)

    def _published(self, phase: int, rank: int, gradients: Tensor) -> None:
        """What this replica's device has been told to do so far comes before what the others' are told from now on."""
        on_cuda = gradients.device.type == "cuda"
        if on_cuda:
            stream = torch.cuda.current_stream(gradients.device)
            self._reached[phase][rank] = stream.record_event()
        self.meet()
        for event in self._reached[phase]:
            if event is None:
                continue
            if on_cuda:
                stream.wait_event(event)
            else:
                event.synchronize()


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


def weight_hash(weights: Tensor) -> Tensor:
    """One int64, the same on every device: the sum of all weights' bits times (2 * index + 1) cubed, modulo 2**64.

    Up to 2**31 weights, any one change and any swap of two are seen: such odd cubes of two indices differ by an odd
    multiple of twice the indices' difference, and that times a difference of 32 bits is no multiple of 2**64.
    """
    bits = weights.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=weights.device)
    chunk = HASH_CHUNK[weights.device.type]
    for start in range(0, len(bits), chunk):
        part = bits[start : start + chunk]
        odd = 2 * torch.arange(start, start + len(part), device=weights.device) + 1
        total += (part * odd**3).sum()
    return total
