"""Replicas in step: gradients added up in a fixed order, and a proof that all replicas hold the same weights.

Each replica adds up its own slice of everybody's gradients, always in the order of the ranks, then fetches the slices
that the others added up: every replica ends with the same bits, whatever the threads' timing. Losses are already
divided by the weight of the whole step, so the sum *is* the average. A barrier that another worker's failure broke
raises `Aborted`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.pipeline import Aborted

HASH_CHUNK = 1 << 20
"""Weights whose products, 8 bytes each, exist at once."""


class ReplicasDiffer(RuntimeError):
    """The replicas no longer hold the same weights: a bug or broken hardware, never to be trained on."""


class Replicas:
    """The meeting place of `count` drafter threads; each calls every method as often as the others, with its rank.

    Waiting has no time limit: after `abort`, all who wait or will wait raise `Aborted`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count)
        self._gradients: list[Tensor | None] = [None] * count

    def abort(self) -> None:
        """Let every replica that waits, or will, raise `Aborted`."""
        self._barrier.abort()

    def meet(self) -> None:
        """Wait until all replicas are here."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Aborted from None

    def average(self, rank: int, gradients: Tensor) -> None:
        """Make flat `gradients` [P] the sum over all replicas, in place; nobody reads it any more when this returns."""
        self._gradients[rank] = gradients
        self._published(gradients)
        low, high = self._slice(rank, len(gradients))
        total = self._part(0, low, high, gradients.device).clone()
        for other in range(1, self.count):
            total += self._part(other, low, high, gradients.device)
        gradients[low:high] = total
        self._published(gradients)
        for other in range(self.count):
            if other != rank:
                low, high = self._slice(other, len(gradients))
                gradients[low:high] = self._part(other, low, high, gradients.device)
        # The caller clips in place next: not before everybody has fetched this replica's slice.
        self._published(gradients)

    def _slice(self, rank: int, size: int) -> tuple[int, int]:
        return size * rank // self.count, size * (rank + 1) // self.count

    def _part(self, rank: int, low: int, high: int, device: torch.device) -> Tensor:
        gradients = self._gradients[rank]
        assert gradients is not None
        return gradients[low:high].to(device)

    def _published(self, gradients: Tensor) -> None:
        if gradients.device.type == "cuda":
            # Another thread's stream reads it next, perhaps from another device.
            torch.cuda.current_stream(gradients.device).synchronize()
        self.meet()


def prove_equal(weights: Sequence[Tensor], *, step: int) -> None:
    """Raises `ReplicasDiffer` unless the replicas' weights, none of which may be changing, have one hash."""
    hashes = [weight_hash(one) for one in weights]
    if len(set(hashes)) > 1:
        raise ReplicasDiffer(f"after step {step} the weights differ by replica: hashes {hashes}")


def weight_hash(weights: Tensor) -> int:
    """The same on every device: the sum of all weights' bits times (2 * index + 1) cubed, modulo 2**64.

    Up to 2**31 weights, any one change and any swap of two are seen: such odd cubes of two indices differ by an odd
    multiple of twice the indices' difference, and that times a difference of 32 bits is no multiple of 2**64.
    """
    bits = weights.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=weights.device)
    for start in range(0, len(bits), HASH_CHUNK):
        part = bits[start : start + HASH_CHUNK]
        odd = 2 * torch.arange(start, start + len(part), device=weights.device) + 1
        total += (part * odd**3).sum()
    return int(total)
