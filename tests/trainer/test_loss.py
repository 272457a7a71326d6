"""The loss: chunked equals whole, and it is the weighted mean over the whole step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.blocks import Blocks, generator_for, lay_out
from trainer.loss import block_loss

HEAD_VH = torch.randn(50, 16, generator=generator_for("head"))


def case() -> tuple[Tensor, Blocks]:
    ids_BS = torch.randint(0, 50, (2, 20), generator=generator_for("ids"))
    anchors_BN = torch.tensor([[1, 6, 17], [0, 9, 0]])
    valid_BN = torch.tensor([[True, True, True], [True, True, False]])
    blocks = lay_out(
        ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), anchors_BN, valid_BN,
        block_size=4, mask_token_id=49, gamma=3.0,
    )  # fmt: skip
    return torch.randn(2, 12, 16, generator=generator_for("slots")), blocks


def loss_and_gradient(chunk_rows: int, *, weight_sum: float = 5.0) -> tuple[Tensor, Tensor]:
    slots, blocks = case()
    slots.requires_grad_()
    loss = block_loss(slots, blocks, HEAD_VH, weight_sum=weight_sum, chunk_rows=chunk_rows)
    loss.backward()
    assert slots.grad is not None
    return loss.detach(), slots.grad


def test_any_chunk_size_gives_the_loss_and_gradient_of_one_chunk() -> None:
    whole, gradient = loss_and_gradient(1000)
    for chunk_rows in (1, 5, 6, 17, 18):
        loss, chunked = loss_and_gradient(chunk_rows)
        assert torch.allclose(loss, whole, atol=1e-5)
        assert torch.allclose(chunked, gradient, atol=1e-6)


def test_it_is_the_weighted_sum_of_cross_entropies_over_the_given_sum_of_weights() -> None:
    slots, blocks = case()
    total = 0.0
    for row in range(2):
        for block in range(3):
            for slot in range(1, 4):
                weight = blocks.weights_BNk[row, block, slot - 1].item()
                logits = HEAD_VH @ slots[row, block * 4 + slot]
                total += weight * F.cross_entropy(logits, blocks.labels_BNk[row, block, slot - 1]).item()
    loss, _ = loss_and_gradient(1000, weight_sum=5.0)
    assert abs(loss.item() - total / 5.0) < 1e-4


def test_slot_zero_and_unweighted_slots_get_no_gradient() -> None:
    _, gradient = loss_and_gradient(1000)
    _, blocks = case()
    reach = gradient.abs().sum(dim=-1).view(2, 3, 4)
    assert (reach[:, :, 0] == 0).all()
    assert torch.equal(reach[:, :, 1:] > 0, blocks.weights_BNk > 0)
