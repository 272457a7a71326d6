"""The weighted cross entropy of the supervised slots, without ever holding all logits at once.

The logits of N blocks over a large vocabulary outweigh everything else in memory, so the frozen output head and the
loss run in chunks whose logits are computed again in the backward. The sum of weights by which a step is divided is
that of the *whole* step, over all replicas: so adding up the replicas' gradients gives what one replica with all rows
would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.blocks import Blocks

ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def weighted_cross_entropy(hidden_RH: Tensor, head_VH: Tensor, labels_R: Tensor, weights_R: Tensor) -> Tensor:
    """sum(weight * cross entropy) of hidden states [R, H] against labels [R]."""
    logits_RV = F.linear(hidden_RH, head_VH).float()
    return (F.cross_entropy(logits_RV, labels_R, reduction="none") * weights_R).sum()


def chunks(rows: int, at_most: int) -> tuple[int, int]:
    """How many rows a chunk has, and how many a last one with fewer, or 0."""
    size = math.ceil(rows / math.ceil(rows / at_most))
    return size, rows % size


def block_loss(slots_BTH: Tensor, blocks: Blocks, head_VH: Tensor, *, weight_sum: float | Tensor, chunk_rows: int,
               chunk_loss: ChunkLoss = weighted_cross_entropy, last_chunk_loss: ChunkLoss = weighted_cross_entropy
               ) -> Tensor:  # fmt: skip
    """sum(weight * cross entropy) / `weight_sum` over slots 1..K-1 of all blocks, in chunks of equally many rows and at
    most `chunk_rows`; a last one with fewer goes through `last_chunk_loss`."""
    count = blocks.anchors_BN.shape[1]
    hidden_RH = slots_BTH.unflatten(1, (count, -1))[:, :, 1:].flatten(0, 2)
    labels_R, weights_R = blocks.labels_BNk.flatten(), blocks.weights_BNk.flatten()
    rows = hidden_RH.shape[0]
    if rows <= chunk_rows:
        return chunk_loss(hidden_RH, head_VH, labels_R, weights_R) / weight_sum
    chunk_rows, _ = chunks(rows, chunk_rows)
    total = torch.zeros((), device=slots_BTH.device)
    for start in range(0, rows, chunk_rows):
        part = slice(start, start + chunk_rows)
        # Non-reentrant: the reentrant form hides the inputs' graph. Nothing random runs inside, so no RNG state is
        # kept.
        total = total + checkpoint(
            chunk_loss if start + chunk_rows <= rows else last_chunk_loss,
            hidden_RH[part], head_VH, labels_R[part], weights_R[part], use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
    return total / weight_sum
