"""Rows of a step for the leak test, as the trainer lays them out; and the rules of anchors and blocks, once more.

What is checked here and in `leak.py` is checked against the data alone (ids, loss mask, where documents begin): nothing
is taken from `blocks.py` but the blocks that are to be judged. Shapes: B rows, S context, N blocks of K slots, T = N*K.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Config
from trainer.data.rows import Rows
from trainer.feed import step_blocks, target_inputs
from trainer.model.blocks import Blocks
from trainer.model.target import Target

STEP = 1
"""Whose anchors are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows of one step as the trainer lays them out, on the CPU, and the target's features of them."""

    name: str
    ids_BS: Tensor
    loss_mask_BS: Tensor
    starts_BS: Tensor
    features_BSF: Tensor
    blocks: Blocks

    @property
    def may_see_BNS(self) -> Tensor:
        """Which hidden states a block may depend on: those of its anchor's document, strictly before the anchor."""
        place_S = torch.arange(self.ids_BS.shape[1])
        anchors_BN = self.blocks.anchors_BN.cpu()
        starts_BN = self.starts_BS.long().gather(1, anchors_BN)
        inside = (place_S >= starts_BN[..., None]) & (place_S < anchors_BN[..., None])
        return inside & self.blocks.valid_BN.cpu()[..., None]

    def named(self, row: int, block: int) -> str:
        anchor = int(self.blocks.anchors_BN[row, block])
        place = f"at anchor {anchor}" if self.blocks.valid_BN[row, block] else "(padding)"
        return f"{self.name}: row {row}, block {block} {place}"


def cases(config: Config, rows: Rows, target: Target, *, count: int) -> Iterator[Case]:
    """Of every bucket: the data's own rows; the same with so little to train on that blocks are missing; and the same
    cut into documents. `count` rows each."""
    for length in config.data.lengths:
        own = (rows.order.padded_R == length).nonzero().squeeze(1)
        own = own if len(own) else torch.arange(len(rows))
        ids_BS, mask_BS, starts_BS = rows.cut(own[torch.arange(count) % len(own)], length)
        few = max(2, config.anchors_at(length) // 2)
        cut_S = torch.arange(length)
        third = max(4, length // 3)
        features: Tensor | None = None
        for name, mask, starts in (
            ("rows", mask_BS, starts_BS),
            ("padding blocks", mask_BS & (mask_BS.cumsum(1) <= few), starts_BS),
            ("documents", mask_BS, torch.maximum(starts_BS, (cut_S // third * third).expand(ids_BS.shape))),
        ):
            case = make_case(config, target, ids_BS, mask, starts, name=f"{name} of {length}", features_BSF=features)
            # Where rows are one document each, any features will do to try documents with: the target made others of
            # none of this.
            features = None if config.data.packing else case.features_BSF
            yield case


def make_case(config: Config, target: Target, ids_BS: Tensor, mask_BS: Tensor, starts_BS: Tensor, *, name: str,
              features_BSF: Tensor | None = None) -> Case:  # fmt: skip
    """With features of the target, if none are given."""
    blocks = step_blocks(config, ids_BS, mask_BS, starts_BS, step=STEP)
    if features_BSF is None:
        with target.stream():
            features_BSF = target.features(*target_inputs(config, ids_BS, blocks)).cpu()
    return Case(
        name=name, ids_BS=ids_BS, loss_mask_BS=mask_BS, starts_BS=starts_BS, blocks=blocks, features_BSF=features_BSF
    )  # fmt: skip


# --- the rules ----------------------------------------------------------------------------------------------------


def broken_rules(case: Case, config: Config) -> Iterator[str]:
    """What is wrong with the anchors of this case, and with what stands in its blocks."""
    blocks, size = case.blocks, config.drafter.block_size
    length, count = case.ids_BS.shape[1], config.anchors_at(case.ids_BS.shape[1])
    for row, (ids, mask, starts) in enumerate(
        zip(case.ids_BS.tolist(), case.loss_mask_BS.tolist(), case.starts_BS.tolist(), strict=True)
    ):
        valid = blocks.valid_BN[row].tolist()
        anchors = [anchor for anchor, real in zip(blocks.anchors_BN[row].tolist(), valid, strict=True) if real]
        where = f"{case.name}: row {row}"
        allowed = {at for at in range(length - 1) if mask[at] and mask[at + 1] and starts[at] == starts[at + 1]}
        if len(valid) != count:
            yield f"{where} has {len(valid)} blocks instead of {count}"
        if not all(valid[: len(anchors)]):
            yield f"{where}: padding blocks stand before real ones"
        if anchors != sorted(anchors):
            yield f"{where}: anchors are not sorted: {anchors}"
        if len(set(anchors)) < len(anchors):
            yield f"{where}: an anchor is drawn twice: {sorted(anchors)}"
        if wrong := sorted(set(anchors) - allowed):
            yield f"{where}: anchor {wrong[0]} or the token after it is not trained on, or not of its document"
        if len(anchors) != min(count, len(allowed)):
            yield f"{where} has {len(anchors)} anchors where {min(count, len(allowed))} could be"
        tokens, positions = blocks.tokens_BT[row].tolist(), blocks.positions_BT[row].tolist()
        if blocks.positions_BS[row].tolist() != [at - start for at, start in enumerate(starts)]:
            yield f"{where}: positions of the context do not count from its document's start"
        for block, anchor in enumerate(anchors):
            first, named = block * size, case.named(row, block)
            if tokens[first : first + size] != [ids[anchor], *[config.drafter.mask_token_id] * (size - 1)]:
                yield f"{named} does not hold its anchor's token and then mask tokens"
            expected = [anchor - starts[anchor] + slot for slot in range(size)]
            if positions[first : first + size] != expected:
                yield f"{named} stands at positions {positions[first]}.. instead of {expected[0]}.."
            yield from _wrong_labels(case, config, row, block, anchor)
        if blocks.weights_BNk[row][~blocks.valid_BN[row]].any():
            yield f"{where}: a padding block is trained on"


def _wrong_labels(case: Case, config: Config, row: int, block: int, anchor: int) -> Iterator[str]:
    ids, mask, starts = case.ids_BS[row], case.loss_mask_BS[row], case.starts_BS[row]
    unbroken, gamma = True, config.loss.gamma(config.drafter.block_size)
    for slot in range(1, config.drafter.block_size):
        at, weight = anchor + slot, float(case.blocks.weights_BNk[row, block, slot - 1])
        unbroken = unbroken and at < len(ids) and bool(mask[at]) and bool(starts[at] == starts[anchor])
        if not unbroken and weight:
            yield f"{case.named(row, block)} is trained on slot {slot}, behind the end of what is trained on"
        due = math.exp(-(slot - 1) / gamma)
        if unbroken and abs(weight - due) > 1e-5:
            yield f"{case.named(row, block)}: slot {slot} weighs {weight:.4g} instead of {due:.4g}"
        if unbroken and int(case.blocks.labels_BNk[row, block, slot - 1]) != int(ids[at]):
            yield f"{case.named(row, block)}: slot {slot} is to predict another token than the one at {at}"
