"""Which token comes next: the most probable one, or one drawn from a distribution; and what of a draft may stay.

Pure functions of tensors, without a branch on what they hold, so that a CUDA graph may be recorded over them. What is
random comes in as uniform numbers: whoever decodes draws them by (seed, prompt), so that a prompt's continuation
does not depend on what else is decoded beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.sections import LEAST_TEMPERATURE, MOST_TEMPERATURE


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """As servers understand these words, and in their order: temperature, then top_k, then top_p."""

    temperature: float = 0.0
    """0: the most probable token, always."""
    top_p: float = 1.0
    """Only the most probable tokens that together have this much; at least one."""
    top_k: int | None = None
    """Only the so many most probable tokens."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE:
            between = f"from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}"
            raise ValueError(f"temperature: must be 0 or {between}, is {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be more than 0 and at most 1, is {self.top_p:g}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: must be at least 1, is {self.top_k}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] float32: the distribution that is drawn from; not for greedy decoding."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            falling = ordered.softmax(dim=-1)
            # What comes before a token, not what is there with it: the one that crosses the line belongs inside.
            outside = falling.cumsum(dim=-1) - falling >= self.top_p
            outside[..., 0] = False
            logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
        return logits.softmax(dim=-1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """[...]: an index for each distribution [..., V], whose weights need not add up to 1, by a number in [0, 1)."""
    # In float64, where that times the sum is always less than the sum: what has no weight is never drawn.
    rising = weights.double().cumsum(dim=-1)
    at = uniform.double()[..., None] * rising[..., -1:]
    return torch.searchsorted(rising, at, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def keep_greedy(draft_Bk: Tensor, said_BK: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafted tokens stay [B], and what the target says next [B]: a token stays where all before it did, and
    it is what the target would have said. `draft_Bk` has the K-1 tokens behind the block's first, `said_BK` the most
    probable one at each place."""
    # Behind the last slot nothing was drafted.
    kept_B = _first(F.pad(draft_Bk != said_BK[:, :-1], (0, 1), value=True))
    return kept_B, said_BK.gather(1, kept_B[:, None]).squeeze(1)


def keep_sampled(draft_Bk: Tensor, drafted_BkV: Tensor, target_BKV: Tensor, accept_Bk: Tensor, next_B: Tensor
                 ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same where tokens are drawn, by rejection: what comes out is distributed as if the target had drawn it alone,
    whatever the drafter's distributions `drafted_BkV` are that the draft was drawn from. A token x stays with
    probability min(1, p(x) / q(x)); the first that does not is replaced by one drawn from what of p is above q; if all
    stay, the next one is drawn from p. `accept_Bk` and `next_B` are uniform numbers."""
    wanted_Bk = target_BKV[:, :-1].gather(2, draft_Bk[..., None]).squeeze(2)
    given_Bk = drafted_BkV.gather(2, draft_Bk[..., None]).squeeze(2)
    kept_B = (accept_Bk * given_Bk < wanted_Bk).long().cumprod(dim=1).sum(dim=1)
    at = kept_B[:, None, None].expand(-1, 1, target_BKV.shape[2])
    wanted_BV = target_BKV.gather(1, at).squeeze(1)
    # Behind the last slot nothing was drafted.
    given_BKV = torch.cat((drafted_BkV, torch.zeros_like(target_BKV[:, :1])), dim=1)
    left_BV = (wanted_BV - given_BKV.gather(1, at).squeeze(1)).clamp(min=0)
    # Where rounding has left nothing, p and q are the same.
    left_BV = torch.where(left_BV.sum(dim=1, keepdim=True) > 0, left_BV, wanted_BV)
    return kept_B, draw(left_BV, next_B)


def end_of_round(block_BK: Tensor, kept_B: Tensor, next_B: Tensor, stops: Tensor, anchors_B: Tensor, last_B: Tensor,
                  rounds_B: Tensor, done_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What a round came to (see `Engine._work`), and where its rows are then: anchors, rounds, and which are done."""
    slot_K = torch.arange(block_BK.shape[1], device=block_BK.device)
    said_BK = torch.where(slot_K == kept_B[:, None], next_B[:, None], block_BK.roll(-1, dims=1))
    stop_B = _first((said_BK[:, :, None] == stops).any(dim=2))
    ended_B = stop_B <= kept_B
    count_B = torch.minimum(kept_B, stop_B) + 1
    kept_B = torch.minimum(kept_B, count_B)
    count_B = count_B * ~done_B
    # As many tokens as are asked for have room; what a last block has beyond them is not kept.
    anchors_B = torch.minimum(anchors_B + count_B, last_B)
    made_Bn = torch.cat((said_BK, torch.stack((count_B, kept_B, ended_B.long()), dim=1)), dim=1)
    return made_Bn, anchors_B, rounds_B + ~done_B, done_B | ended_B | (anchors_B >= last_B)


def end_of_greedy_round(block_BK: Tensor, said_BK: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same where the target would have said `said_BK`."""
    return end_of_round(block_BK, *keep_greedy(block_BK[:, 1:], said_BK), *rows)


def _first(true_BK: Tensor) -> Tensor:
    """The first place [B] where it is true; K where it is nowhere."""
    place_K = torch.arange(true_BK.shape[1], device=true_BK.device)
    return torch.where(true_BK, place_K, len(place_K)).amin(dim=1)
