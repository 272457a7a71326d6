"""Whether two greedy continuations of a prompt are the same; and if not, whether that is rounding or a fault.

Verifying a block and writing one token at a time are products of other shapes, which round differently. Where the two
most probable tokens are closer than that, either may come out on top: a tie. From there on the two texts are different
ones, and nothing more can be compared. In float32 ties are too rare to be seen; in bfloat16 they are common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.model.blocks import bring
from trainer.model.target import Target

TIE_STEPS = 8
"""Logits this many steps of their type apart are a tie, the largest one's step: 8 x 2^-7 of it in bfloat16."""
RULE = f"a tie: both within {TIE_STEPS} rounding steps of the largest logit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where two continuations differ."""

    place: int
    gap: float
    """Between the largest logit there, as the target alone computes it, and the lower of those of the two tokens."""
    limit: float

    @property
    def tie(self) -> bool:
        return self.gap <= self.limit


@torch.no_grad()
def first_difference(target: Target, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
                     ) -> Difference | None:  # fmt: skip
    """None where they are the same, or one is the beginning of the other."""
    place = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return None
    ids_1S = bring(torch.tensor([[*prompt, *one[:place]]]), target.device)
    with target.stream():
        hidden_1SH, _ = target.run({"input_ids": ids_1S})
        logits_V = F.linear(hidden_1SH[0, -1], target.ends.head_VH).float().cpu()
    largest = logits_V.max()
    gap = float(largest - logits_V[[one[place], other[place]]].min())
    return Difference(
        place=place, gap=gap, limit=TIE_STEPS * torch.finfo(target.model.dtype).eps * float(largest.abs())
    )  # fmt: skip
