"""Replicas in step: gradients added up in a fixed order, and a proof that all replicas hold the same weights.

Each replica adds up its own slice of everybody's gradients, always in the order of the ranks, then fetches the slices
that the others added up: every replica ends with the same bits, whatever the threads' timing. Losses are already
divided by the weight of the whole step, so the sum *is* the average. On CUDA the threads only meet; their devices wait
for each other by events, and no thread waits for a device: a layer's gradients are on their way while the device is in
the backward of the layer before. A barrier that another worker's failure broke raises
`Aborted`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stretch of a flat buffer, and the CUDA event after which it holds what is to be added up."""

    low: int
    high: int
    ready: Any = None


class Replicas:
    """The meeting place of `count` drafter threads; each calls every method as often as the others, with its rank.

    Waiting has no time limit: after `abort`, all who wait or will wait raise `Aborted`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count)
        self._flat: list[Tensor | None] = [None] * count
        self._parts: list[list[list[Part]]] = [[[]] * count for _ in range(3)]
        """By phase of `average` and rank: what others may rely on of this replica's buffer from when on. A phase has
        its own, since a quick thread is in the next one before a slow one has looked."""

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

    def average(self, rank: int, flat: Tensor, *, parts: Sequence[Part] = (), stream: Any = None,
                mean: bool = False) -> None:  # fmt: skip
        """Make `flat` [P], the gradients, say, the sum over all replicas, in place, or their `mean`; nobody reads it
        any more, as far as its device is concerned, when this returns.

        On CUDA the work goes to `stream`, part after part as each is `ready`: while the device is still busy with what
        the later ones come from. Without parts it is one, which is ready when the current stream gets here.
        """
        on_cuda = flat.device.type == "cuda"
        here = torch.cuda.current_stream(flat.device) if on_cuda else None
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            whole = [Part(low=0, high=len(flat), ready=here.record_event() if here else None)]
            self._flat[rank] = flat
            own = self._published(0, rank, list(parts) or whole)
            added = []
            for number, part in enumerate(own):
                low, high = self._slice(rank, part)
                first = self._of(0, 0, number, low, high, flat.device)
                # The mean as a distance from the first, so that of equals it is what they are: 3 * x / 3 need not be x.
                total = torch.zeros_like(first) if mean else first.clone()
                for other in range(1, self.count):
                    one = self._of(0, other, number, low, high, flat.device)
                    total += one - first if mean else one
                flat[low:high] = first + total / self.count if mean else total
                added.append(dataclasses.replace(part, ready=event_here(flat.device)))
            for number, part in enumerate(self._published(1, rank, added)):
                for other in range(self.count):
                    if other != rank:
                        low, high = self._slice(other, part)
                        flat[low:high] = self._of(1, other, number, low, high, flat.device)
            # The caller changes it next: not before everybody has fetched this replica's slices.
            self._published(2, rank, [dataclasses.replace(whole[0], ready=event_here(flat.device))])
        for (end,) in self._parts[2]:
            _wait_for(end.ready, flat.device)

    def mean(self, rank: int, buffers: Sequence[Tensor]) -> None:
        """Make each of the flat `buffers` the mean over all replicas, in place."""
        for buffer in buffers:
            self.average(rank, buffer, mean=True)

    def _slice(self, rank: int, part: Part) -> tuple[int, int]:
        """What of a part replica `rank` adds up for all."""
        size = part.high - part.low
        return part.low + size * rank // self.count, part.low + size * (rank + 1) // self.count

    def _published(self, phase: int, rank: int, parts: list[Part]) -> list[Part]:
        """Tell the others, and wait until they have told theirs."""
        self._parts[phase][rank] = parts
        self.meet()
        return parts

    def _of(self, phase: int, rank: int, number: int, low: int, high: int, device: torch.device) -> Tensor:
        """low:high of a replica's buffer on `device`, as it is once that replica's part is ready."""
        flat = self._flat[rank]
        assert flat is not None
        _wait_for(self._parts[phase][rank][number].ready, device)
        return flat[low:high].to(device)


def event_here(device: torch.device) -> Any:
    """What is told to `device` after it may rely on what its current stream was told so far. In a graph that is being
    recorded: after it in the graph's latest launch."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(external=torch.cuda.is_current_stream_capturing())
    event.record(torch.cuda.current_stream(device))
    return event


def _wait_for(event: Any, device: torch.device) -> None:
    """What `device` is told from now on comes after `event`."""
    if event is None:
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_event(event)
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
