"""Anchors, what stands in a block, and who may see whom."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer.model.attention import DenseAttention
from trainer.model.blocks import Blocks, bring, generator_for, lay_out, pick_anchors

MASK = 99


def blocks_at(anchors: list[list[int]], *, valid: list[list[bool]] | None = None, length: int = 12, size: int = 4,
              loss_mask: torch.Tensor | None = None) -> Blocks:  # fmt: skip
    """Blocks over the tokens 0, 1, 2 ... of each row, so that a token is its own position."""
    anchors_BN = torch.tensor(anchors)
    valid_BN = torch.ones_like(anchors_BN, dtype=torch.bool) if valid is None else torch.tensor(valid)
    ids_BS = torch.arange(length).expand(len(anchors), -1)
    mask = torch.ones_like(ids_BS, dtype=torch.bool) if loss_mask is None else loss_mask
    return lay_out(ids_BS, mask, anchors_BN, valid_BN, block_size=size, mask_token_id=MASK, gamma=2.0)


class CopiesThatDoNotWait(TorchFunctionMode):
    """Devices to which something was copied without waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("non_blocking"):
            self.to.append(str(args[1]))
        return function(*args, **(kwargs or {}))


def test_only_copies_to_a_device_with_a_stream_of_its_own_go_on_unfinished() -> None:
    with CopiesThatDoNotWait() as copies:
        blocks_at([[2]]).to(torch.device("cpu"))
        bring(torch.ones(3), torch.device("cpu"))
    assert copies.to == []


def test_anchors_are_sorted_distinct_and_stand_before_a_trained_token() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    seen = set()
    for step in range(40):
        anchors, valid = pick_anchors(mask, 3, generator_for(0, step))
        assert valid.all()
        assert anchors.tolist() == sorted(set(anchors.tolist()))
        seen |= set(anchors.tolist())
    assert seen == {1, 4, 5, 6}


def test_missing_anchors_are_padded_behind_the_valid_ones() -> None:
    mask = torch.zeros(20, dtype=torch.bool)
    mask[7:10] = True
    anchors, valid = pick_anchors(mask, 5, generator_for(0))
    assert anchors.tolist() == [7, 8, 0, 0, 0]
    assert valid.tolist() == [True, True, False, False, False]


def test_the_same_seed_draws_the_same_anchors_and_another_step_draws_others() -> None:
    mask = torch.ones(200, dtype=torch.bool)
    first, again, other = (pick_anchors(mask, 20, generator_for(3, step))[0] for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_block_holds_its_anchor_then_masks_at_consecutive_positions_and_predicts_what_follows() -> None:
    blocks = blocks_at([[2, 5]])
    assert blocks.tokens_BT.tolist() == [[2, MASK, MASK, MASK, 5, MASK, MASK, MASK]]
    assert blocks.positions_BT.tolist() == [[2, 3, 4, 5, 5, 6, 7, 8]]
    assert blocks.labels_BNk.tolist() == [[[3, 4, 5], [6, 7, 8]]]


def test_weights_decay_from_slot_one_on() -> None:
    weights = blocks_at([[2]]).weights_BNk[0, 0]
    assert torch.allclose(weights, torch.exp(-torch.tensor([0.0, 1.0, 2.0]) / 2.0))


def test_slots_past_the_end_past_a_gap_or_in_padding_blocks_weigh_nothing() -> None:
    loss_mask = torch.ones(1, 12, dtype=torch.bool)
    loss_mask[0, 4] = False
    blocks = blocks_at([[2, 10, 0]], valid=[[True, True, False]], loss_mask=loss_mask)
    # Anchor 2: token 3 counts, 4 is not trained on, 5 stands behind that gap. Anchor 10: only token 11 exists.
    assert (blocks.weights_BNk[0] > 0).tolist() == [[True, False, False], [True, False, False], [False] * 3]


def test_a_slot_sees_context_strictly_before_its_anchor_and_its_own_block_and_nothing_else() -> None:
    anchors, length, size = [[0, 3, 7], [2, 2, 0]], 12, 4
    valid = [[True, True, True], [True, True, False]]
    mask = DenseAttention().mask(blocks_at(anchors, valid=valid, length=length, size=size), length)
    assert mask.shape == (2, 1, 12, 24)
    for row in range(2):
        for query in range(12):
            block = query // size
            for key in range(24):
                if key < length:
                    expected = valid[row][block] and key < anchors[row][block]
                else:
                    expected = (key - length) // size == block
                assert mask[row, 0, query, key] == expected, (row, query, key)


def test_no_row_of_the_mask_is_empty_even_for_padding() -> None:
    mask = DenseAttention().mask(blocks_at([[0, 0]], valid=[[False, False]]), 12)
    assert mask.any(dim=-1).all()
