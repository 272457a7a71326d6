"""The weighted cross entropy of the supervised slots, without ever holding all logits at once.

The logits of N blocks over a large vocabulary outweigh everything else in memory, so the frozen output head and the
cross entropy run in chunks of rows (`HeadLoss`), a row for each supervised slot. Fused, a chunk's logits are computed
once and leave their gradient by the hidden states, which the backward only has to weigh; chunked, they are computed
again in the backward. `kernels.py` chooses, and compiles what works on one chunk.

What a step is divided by is the sum of weights of the *whole* step, over all replicas: so adding up the replicas'
gradients gives what one replica with all rows would have had.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.model.blocks import Blocks

ChunkLoss = Callable[[Tensor, Tensor, Tensor], Any]
"""(hidden [C, H], head [V, H], labels [C]) -> cross entropy [C] in float32; fused: and its gradient [C, H]."""


def cross_entropy(hidden_CH: Tensor, head_VH: Tensor, labels_C: Tensor) -> Tensor:
    """Of each row [C], in float32."""
    return F.cross_entropy(F.linear(hidden_CH, head_VH).float(), labels_C, reduction="none")


def cross_entropy_and_gradient(hidden_CH: Tensor, head_VH: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row [C], in float32; and the gradient of each by its own hidden state [C, H], in that one's type."""
    log_p_CV = F.log_softmax(F.linear(hidden_CH, head_VH), dim=-1, dtype=torch.float32)
    label_C1 = labels_C[:, None]
    loss_C1 = -log_p_CV.gather(1, label_C1)
    by_logits_CV = log_p_CV.exp_().to(head_VH.dtype)
    # p - 1 at the label: from the loss, since a p near 1 has lost in rounding what it lacks.
    by_logits_CV.scatter_(1, label_C1, torch.expm1(-loss_C1).to(head_VH.dtype))
    return loss_C1.squeeze(1), by_logits_CV @ head_VH


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLoss:
    """Cross entropies of rows, chunk by chunk; a last chunk with fewer rows goes through a function of its own."""

    chunk: ChunkLoss
    last_chunk: ChunkLoss
    fused: bool
    """Whether a chunk gives its gradient, too."""
    compiles: bool = True
    """Whether both functions are compiled where anything is."""

    def __call__(self, hidden_RH: Tensor, head_VH: Tensor, labels_R: Tensor, *, chunk_rows: int) -> Tensor:
        """Of each row [R], in float32: in chunks of equally many rows, at most `chunk_rows`."""
        if self.fused:
            of_rows: Tensor = _Fused.apply(hidden_RH, head_VH, labels_R, self, chunk_rows)  # type: ignore[no-untyped-call]
            return of_rows
        again = functools.partial(_with_threads_of, torch.get_num_threads())
        # Non-reentrant: the reentrant form hides the inputs' graph. Nothing random runs inside, so no RNG state is
        # kept.
        return torch.cat([
            checkpoint(
                work, hidden_RH[part], head_VH, labels_R[part], use_reentrant=False, preserve_rng_state=False,
                context_fn=again,
            ) for part, work in self.parts(len(labels_R), chunk_rows)
        ])  # fmt: skip

    def parts(self, rows: int, at_most: int) -> list[tuple[slice, ChunkLoss]]:
        size, last = chunks(rows, at_most)
        starts = range(0, rows, size)
        return [
            (slice(start, start + size), self.last_chunk if last and start == starts[-1] else self.chunk)
            for start in starts
        ]  # fmt: skip


def _with_threads_of(threads: int) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the forward, and around the same work in the backward. On CUDA that is in a thread of autograd's own,
    which keeps torch's number of threads as it was when that thread began; what is compiled is guarded by it."""
    return contextlib.nullcontext(), _threads(threads)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    yield


PLAIN = {
    True: HeadLoss(chunk=cross_entropy_and_gradient, last_chunk=cross_entropy_and_gradient, fused=True),
    False: HeadLoss(chunk=cross_entropy, last_chunk=cross_entropy, fused=False),
}
"""Fused and chunked, as they are written."""


class _Fused(torch.autograd.Function):
    """The head is frozen: no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, head_VH: Tensor, labels_R: Tensor, loss: HeadLoss, chunk_rows: int
                ) -> Tensor:  # fmt: skip
        found = [work(hidden_RH[part], head_VH, labels_R[part]) for part, work in loss.parts(len(labels_R), chunk_rows)]
        of_rows, gradients = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
        ctx.save_for_backward(gradients)
        return of_rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weight_R: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_RH,) = ctx.saved_tensors
        return (gradient_RH * weight_R[:, None]).to(gradient_RH.dtype), None, None, None, None


def chunks(rows: int, at_most: int) -> tuple[int, int]:
    """How many rows a chunk has, and how many a last one with fewer, or 0."""
    size = math.ceil(rows / math.ceil(rows / at_most))
    return size, rows % size


def pace_weights(loss_BNk: Tensor, supervised_BNk: Tensor, *, alpha: float) -> Tensor:
    """D-PACE's weights [B, N, K-1] of slots 1..K-1, from their cross entropies; no gradient goes through them.

    q_i = exp(-CE_i) is the probability of slot i's token, q~_i = (1 - alpha) q_i + alpha, and the weight of slot j is
    sum over k >= j of (q~_1 q~_2 ... q~_k): what is added up is how likely the block is right as far as slot k, and the
    whole sum, for j = 1, how many slots it is expected to keep. For alpha = 0, weight times CE has the gradient of just
    that expectation, negative. Slots that are not supervised, which come last, end the sum and weigh nothing.
    """
    kept_BNk = (1 - alpha) * torch.exp(-loss_BNk.detach()) + alpha
    reached_BNk = torch.where(supervised_BNk, kept_BNk, 0.0).cumprod(dim=2)
    return reached_BNk.flip(2).cumsum(dim=2).flip(2)


def slot_sums(loss_BNk: Tensor, supervised_BNk: Tensor) -> Tensor:
    """By slot 1..K-1 [2, K-1]: the sum of what the drafter gave the right tokens, exp(-CE), and of how many tokens."""
    right_BNk = torch.where(supervised_BNk, torch.exp(-loss_BNk.detach()), 0.0)
    return torch.stack([right_BNk.sum((0, 1)), supervised_BNk.sum((0, 1)).to(right_BNk.dtype)])


def block_loss(slots_BTH: Tensor, blocks: Blocks, head_VH: Tensor, *, weight_sum: float | Tensor, chunk_rows: int,
               head_loss: HeadLoss = PLAIN[True], alpha: float | None = None
               ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """sum(weight * cross entropy) / `weight_sum` over slots 1..K-1 of all blocks, sum(weight) / `weight_sum`, and
    `slot_sums`.

    Weights are the blocks' own, by which `weight_sum` is known before anything is computed; or, with `alpha`, D-PACE's,
    whose sum is only known afterwards: then what a step came to has to be divided by the sum of the second result over
    the whole step.
    """
    count = blocks.anchors_BN.shape[1]
    hidden_RH = slots_BTH.unflatten(1, (count, -1))[:, :, 1:].flatten(0, 2)
    loss_R = head_loss(hidden_RH, head_VH, blocks.labels_BNk.flatten(), chunk_rows=chunk_rows)
    loss_BNk, weights_BNk = loss_R.view_as(blocks.weights_BNk), blocks.weights_BNk
    supervised_BNk = weights_BNk > 0
    if alpha is not None:
        weights_BNk = pace_weights(loss_BNk, supervised_BNk, alpha=alpha)
    loss, weight = (loss_BNk * weights_BNk).sum() / weight_sum, weights_BNk.sum() / weight_sum
    return loss, weight, slot_sums(loss_BNk, supervised_BNk)
