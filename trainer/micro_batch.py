"""What a replica is given for a step: rows with the target's features and the blocks laid out over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.clock import Span
from trainer.data.order import Cursor
from trainer.kernels import Shape
from trainer.model.blocks import Blocks
from trainer.report.throughput import Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One replica's share of one step, on its device."""

    step: int
    rows: list[int]
    """Indices of the data's rows, so that a bad one can be named."""
    features_BSF: Tensor
    blocks: Blocks
    weight_sum: float
    """Over the whole step, not only this share."""
    amount: Amount
    cursor: Cursor
    """Where the data goes on after this step."""
    made: Span | None = None
    """While its features were computed, and by which target thread."""
    made_by: int = 0
    ready: Any = None
    """CUDA event after which the tensors may be read."""
    whole: Sequence[tuple[list[int], Amount]] = ()
    """Rows and amount of each share of the step, other processes' too; as the feed has it."""

    @property
    def shape(self) -> Shape:
        return shape_of(self.features_BSF, self.blocks)

    def inputs(self) -> dict[str, Tensor]:
        return {"features_BSF": self.features_BSF, **self.blocks.named()}


def shape_of(features_BSF: Tensor, blocks: Blocks) -> Shape:
    """Of a micro-batch; by it its kernels are chosen, and its graph."""
    rows, length, _ = features_BSF.shape
    return rows, length, blocks.anchors_BN.shape[1]
