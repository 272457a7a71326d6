"""The loss: every kernel and chunk size gives the same, and it is the weighted mean over the whole step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.blocks import Blocks, generator_for, lay_out
from trainer.model.loss import PLAIN, block_loss, pace_weights

HEAD_VH = torch.randn(50, 16, generator=generator_for("head"))
FORMS = {"fused": True, "chunked": False}
both_forms = pytest.mark.parametrize("fused", FORMS.values(), ids=list(FORMS))
both_weights = pytest.mark.parametrize("alpha", [None, 0.3], ids=["exponential", "d-pace"])


def case(*, gamma: float = 3.0) -> tuple[Tensor, Blocks]:
    ids_BS = torch.randint(0, 50, (2, 20), generator=generator_for("ids"))
    anchors_BN = torch.tensor([[1, 6, 17], [0, 9, 0]])
    valid_BN = torch.tensor([[True, True, True], [True, True, False]])
    blocks = lay_out(
        ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), anchors_BN, valid_BN,
        block_size=4, mask_token_id=49, gamma=gamma,
    )  # fmt: skip
    return torch.randn(2, 12, 16, generator=generator_for("slots")), blocks


def loss_and_gradient(chunk_rows: int, *, fused: bool, alpha: float | None = None, dtype: torch.dtype = torch.float32,
                      ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, weight and gradient by the slots."""
    slots, blocks = case(gamma=3.0 if alpha is None else math.inf)
    slots = slots.to(dtype).requires_grad_()
    loss, weight, _ = block_loss(
        slots, blocks, HEAD_VH.to(dtype), weight_sum=5.0, chunk_rows=chunk_rows, head_loss=PLAIN[fused], alpha=alpha
    )
    loss.backward()
    assert slots.grad is not None
    return loss.detach(), weight, slots.grad


@both_forms
@both_weights
def test_any_kernel_and_chunk_size_gives_the_loss_and_gradient_of_one_chunk(fused: bool, alpha: float | None) -> None:
    expected = loss_and_gradient(1000, fused=False, alpha=alpha)
    for chunk_rows in (1, 5, 6, 17, 18, 1000):
        for found, value in zip(loss_and_gradient(chunk_rows, fused=fused, alpha=alpha), expected, strict=True):
            assert torch.allclose(found, value, atol=1e-6, rtol=1e-5)


@both_weights
def test_in_bfloat16_the_fused_kernel_is_as_near_to_the_truth_as_the_chunked(alpha: float | None) -> None:
    *_, truth = loss_and_gradient(1000, fused=False, alpha=alpha, dtype=torch.float64)
    off = {
        fused: (loss_and_gradient(7, fused=fused, alpha=alpha, dtype=torch.bfloat16)[2] - truth).norm() / truth.norm()
        for fused in (True, False)
    }
    assert off[True] < 1.25 * off[False] and off[False] < 0.02, off


def test_a_slot_that_is_nearly_certain_still_gets_its_gradient_in_bfloat16() -> None:
    """There p - 1 is what p has lost in rounding."""
    head_VH, hidden_RH = torch.eye(4), torch.tensor([[9.0, 0.0, 0.0, 0.0]])
    labels_R = torch.tensor([0])
    exact = torch.softmax(hidden_RH, dim=-1) - torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    for fused in (True, False):
        hidden = hidden_RH.bfloat16().requires_grad_()
        PLAIN[fused](hidden, head_VH.bfloat16(), labels_R, chunk_rows=1).sum().backward()
        assert hidden.grad is not None
        assert torch.allclose(hidden.grad.float(), exact, rtol=1e-2)


@both_forms
def test_it_is_the_weighted_sum_of_cross_entropies_over_the_given_sum_of_weights(fused: bool) -> None:
    slots, blocks = case()
    total = 0.0
    for row in range(2):
        for block in range(3):
            for slot in range(1, 4):
                weight = blocks.weights_BNk[row, block, slot - 1].item()
                logits = HEAD_VH @ slots[row, block * 4 + slot]
                total += weight * F.cross_entropy(logits, blocks.labels_BNk[row, block, slot - 1]).item()
    loss, weight, _ = loss_and_gradient(1000, fused=fused)
    assert abs(loss.item() - total / 5.0) < 1e-4
    assert weight == pytest.approx(blocks.weights_BNk.sum().item() / 5.0)


@both_forms
@both_weights
def test_slot_zero_and_unweighted_slots_get_no_gradient(fused: bool, alpha: float | None) -> None:
    *_, gradient = loss_and_gradient(1000, fused=fused, alpha=alpha)
    _, blocks = case()
    reach = gradient.abs().sum(dim=-1).view(2, 3, 4)
    assert (reach[:, :, 0] == 0).all()
    assert torch.equal(reach[:, :, 1:] > 0, blocks.weights_BNk > 0)


@both_forms
@both_weights
def test_of_each_slot_it_says_what_the_right_tokens_were_given_and_how_many_there_were(fused: bool, alpha: float | None
                                                                                       ) -> None:  # fmt: skip
    slots, blocks = case()
    p_BNkV = (slots.unflatten(1, (3, 4))[:, :, 1:] @ HEAD_VH.T).softmax(dim=-1)
    right_BNk = p_BNkV.gather(3, blocks.labels_BNk[..., None]).squeeze(3) * (blocks.weights_BNk > 0)
    *_, sums = block_loss(slots, blocks, HEAD_VH, weight_sum=5.0, chunk_rows=7, head_loss=PLAIN[fused], alpha=alpha)
    assert torch.allclose(sums[0], right_BNk.sum((0, 1)), rtol=1e-4)
    assert sums[1].tolist() == [5.0, 5.0, 4.0], "one block is padding, and one ends with its row"


# --- D-PACE ---------------------------------------------------------------------------------------------------------


def one_by_one(loss_BNk: Tensor, supervised_BNk: Tensor, alpha: float) -> Tensor:
    """The formula of `pace_weights`, written as it is read."""
    weights = torch.zeros_like(loss_BNk)
    rows, blocks, slots = loss_BNk.shape
    for row in range(rows):
        for block in range(blocks):
            for first in range(slots):
                for last in range(first, slots):
                    product = 1.0
                    for slot in range(last + 1):
                        if not supervised_BNk[row, block, slot]:
                            product = 0.0
                        product *= (1 - alpha) * math.exp(-loss_BNk[row, block, slot].item()) + alpha
                    weights[row, block, first] += product
    return weights


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_pace_weights_are_those_of_the_formula(alpha: float) -> None:
    loss_BNk = torch.rand(2, 5, 7, generator=generator_for("loss")) * 4
    supervised_BNk = torch.arange(7) < torch.randint(0, 8, (2, 5, 1), generator=generator_for("supervised"))
    found = pace_weights(loss_BNk, supervised_BNk, alpha=alpha)
    assert torch.allclose(found, one_by_one(loss_BNk, supervised_BNk, alpha), atol=1e-6)
    assert torch.equal(found > 0, supervised_BNk)
    assert (found[..., 1:] <= found[..., :-1]).all(), "no slot counts more than one before it"


def test_pace_weights_without_smoothing_give_the_gradient_of_the_slots_that_are_expected_to_be_kept() -> None:
    loss_BNk = (torch.rand(1, 3, 5, generator=generator_for("loss"), dtype=torch.float64) * 2).requires_grad_()
    (-loss_BNk).exp().cumprod(dim=2).sum().neg().backward()
    weights = pace_weights(loss_BNk, torch.ones(1, 3, 5, dtype=torch.bool), alpha=0.0)
    assert not weights.requires_grad and loss_BNk.grad is not None
    assert torch.allclose(weights, loss_BNk.grad)


@both_forms
def test_the_pace_loss_is_weighted_by_them_and_names_their_sum(fused: bool) -> None:
    slots, blocks = case(gamma=math.inf)
    assert set(blocks.weights_BNk.unique().tolist()) == {0.0, 1.0}
    hidden = slots.unflatten(1, (3, 4))[:, :, 1:]
    loss_BNk = F.cross_entropy((hidden @ HEAD_VH.T).permute(0, 3, 1, 2), blocks.labels_BNk, reduction="none")
    weights = one_by_one(loss_BNk, blocks.weights_BNk > 0, 0.3)
    loss, weight, _ = loss_and_gradient(4, fused=fused, alpha=0.3)
    assert loss == pytest.approx(((weights * loss_BNk).sum() / 5).item(), rel=1e-5)
    assert weight == pytest.approx((weights.sum() / 5).item(), rel=1e-5)
