"""What a step came to: each replica's figures and share of it, and the figures of all together.

Replica 0 makes a `Step` of what all replicas have begun, and asks it once the figures have reached the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainer.clock import Span
from trainer.data.order import Cursor
from trainer.micro_batch import MicroBatch
from trainer.report.throughput import Amount, total


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a step came to on one replica, on its way to the host."""

    values_5: Tensor
    """float64: loss, own gradient norm, gradient norm of all together, weight, and whether the step changed nothing."""
    slots_2k: Tensor
    """float64: see `loss.slot_sums`; of this replica's own micro-batches."""
    hash: Tensor | None
    done: Any
    """CUDA event after which they are there."""
    stalls: list[Span] = field(default_factory=list)
    """While the device had nothing to do because a micro-batch was not ready."""

    @property
    def arrived(self) -> bool:
        return self.done is None or bool(self.done.query())

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    @property
    def stalled_s(self) -> float:
        return sum(stall.seconds() for stall in self.stalls)

    @property
    def loss(self) -> float:
        """This replica's part of the whole step's, once that has been divided by the whole step's `weight`."""
        return float(self.values_5[0])

    @property
    def own_norm(self) -> float:
        return float(self.values_5[1])

    @property
    def norm(self) -> float:
        return float(self.values_5[2])

    @property
    def weight(self) -> float:
        """This replica's part of the step's: all together 1 where weights are known beforehand."""
        return float(self.values_5[3])

    @property
    def own_mean(self) -> float:
        """The mean loss of its own slots. One whose blocks all were padding contributed nothing: 0, not 0/0."""
        return self.loss / max(self.weight, 1e-12)

    @property
    def refused(self) -> bool:
        """Something was not finite, here or at another replica: weights and optimizer are as before the step."""
        return bool(self.values_5[4])


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one replica contributes to a step: usually one micro-batch, and more for those whose drafter is lost."""

    worker: str
    figures: Figures
    rows: list[int]
    amount: Amount
    cursor: Cursor
    made: list[tuple[int, Span]]
    """Which target thread made its features, and while."""

    @property
    def rank(self) -> int:
        """Of the drafter that it was for."""
        return int(self.worker.rpartition("-")[2])

    @classmethod
    def of(cls, worker: str, batches: list[MicroBatch], figures: Figures) -> Share:
        """Without the batches' tensors: their memory is the next one's."""
        return cls(
            worker=worker, figures=figures, rows=[row for batch in batches for row in batch.rows],
            amount=total(batch.amount for batch in batches), cursor=batches[0].cursor,
            made=[(batch.made_by, batch.made) for batch in batches if batch.made is not None],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step that all replicas have begun. Its figures are worth reading after `wait`."""

    number: int
    lr: float
    shares: list[Share]

    @property
    def arrived(self) -> bool:
        return all(share.figures.arrived for share in self.shares)

    def wait(self) -> None:
        for share in self.shares:
            share.figures.wait()

    @property
    def cursor(self) -> Cursor:
        """Where the data goes on after it."""
        return self.shares[0].cursor

    @property
    def loss(self) -> float:
        return sum(share.figures.loss for share in self.shares) / (
            sum(share.figures.weight for share in self.shares) or math.nan
        )

    @property
    def slot_probabilities(self) -> list[float | None]:
        """By slot 1..K-1: the mean probability that the drafters gave the right token, as it was before this step; None
        where there was none to predict, or a loss is not finite."""
        sums, counts = sum(share.figures.slots_2k for share in self.shares)
        return [
            total / count if count and math.isfinite(total) else None
            for total, count in zip(sums.tolist(), counts.tolist(), strict=True)
        ]

    @property
    def norm(self) -> float:
        """Of the gradients of all together; where each replica steps on its own, the largest one's."""
        return max(share.figures.norm for share in self.shares)

    @property
    def refused(self) -> bool:
        """Something in it was not finite: no weights have changed, and all replicas know."""
        return any(share.figures.refused for share in self.shares)

    @property
    def hashes(self) -> dict[str, int]:
        """Of the replicas' weights after it, by worker, if it was a step that has them."""
        return {share.worker: int(share.figures.hash) for share in self.shares if share.figures.hash is not None}
