"""Which rows make the next step: an order that depends on the seed alone, in steps of rows of one bucket.

A run reads all rows, epoch after epoch, each epoch in an order of its own. A row that has been read waits until its
bucket has enough of them for a step. So a step has one shape, no row is left out, and none comes again before all
others of its bucket have come. What waits at the end of an epoch waits on into the next one, and a step may hold rows
of both. Which rows wait is computed from the `Cursor`, so that it is all that a checkpoint needs to know. With one
bucket a step is simply the next rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model.blocks import generator_for

EPOCHS_KEPT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where in the data a run is: what it reads next is row `position` of the order of `epoch`."""

    epoch: int = 0
    position: int = 0


def pad_to(lengths_R: Tensor, buckets: list[int]) -> Tensor:
    """The smallest of the rising `buckets` that each length fits."""
    rising = torch.tensor(buckets)
    return rising[torch.searchsorted(rising, lengths_R)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Epoch:
    rows_R: Tensor
    """In the order in which they are read."""
    places: dict[int, Tensor]
    """Where in it the rows of each bucket are, rising."""
    ends: Tensor
    """Where in it the rows are that make a step full, rising."""


class Order:
    """The order of rows of which row r is padded to `padded_R[r]`."""

    def __init__(self, padded_R: Tensor, *, seed: int) -> None:
        self.padded_R, self.seed = padded_R, seed
        self._buckets = [int(length) for length in padded_R.unique()]
        self._epoch = functools.lru_cache(maxsize=EPOCHS_KEPT)(self._read)

    def take(self, cursor: Cursor, count: int) -> tuple[Tensor, Cursor]:
        """The indices of the next `count` rows that make a step, all of one bucket, and the cursor behind the last.

        `count` is to be the same in all of a run: which rows wait follows from it."""
        epoch, place = cursor.epoch, self._next_end(cursor.epoch, cursor.position, count)
        while place is None:
            epoch += 1
            place = self._next_end(epoch, 0, count)
        bucket = int(self.padded_R[self._epoch(epoch, count).rows_R[place]])
        parts: list[Tensor] = []
        missing, at, read = count, epoch, place + 1
        while missing:
            here = self._epoch(at, count)
            until = int(torch.searchsorted(here.places[bucket], read))
            parts.insert(0, here.rows_R[here.places[bucket][max(0, until - missing) : until]])
            missing -= len(parts[0])
            at, read = at - 1, len(self.padded_R)
        over = place + 1 == len(self.padded_R)
        return torch.cat(parts), Cursor(epoch=epoch + over, position=0 if over else place + 1)

    def _next_end(self, epoch: int, position: int, count: int) -> int | None:
        ends = self._epoch(epoch, count).ends
        index = int(torch.searchsorted(ends, position))
        return int(ends[index]) if index < len(ends) else None

    def _read(self, epoch: int, count: int) -> _Epoch:
        rows_R = torch.randperm(len(self.padded_R), generator=generator_for(self.seed, "order", epoch))
        padded_R = self.padded_R[rows_R]
        places = {bucket: (padded_R == bucket).nonzero().squeeze(1) for bucket in self._buckets}
        # All of a bucket that came in the epochs before has gone into steps, but for these.
        waiting = {bucket: epoch * len(there) % count for bucket, there in places.items()}
        full = [there[count - 1 - waiting[bucket] :: count] for bucket, there in places.items()]
        return _Epoch(rows_R=rows_R, places=places, ends=torch.cat(full).sort().values)
