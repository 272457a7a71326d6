"""FlexAttention against its twin, and copies that nobody reads before they have come."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trainer.kernels import Kernels, kernels_for, plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import Blocks, bring, generator_for, lay_out, pick_anchors
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.model.loss import block_loss
from trainer.model.target import load_target
from trainer.sections import TargetConfig

CUDA = torch.device("cuda:0")
SHAPE = DrafterShape(
    hidden=1024, captured=3, layers=2, heads=16, kv_heads=4, head_dim=64, intermediate=2048, rms_norm_eps=1e-6,
    rope_theta=10_000.0,
)  # fmt: skip
ROWS, LENGTH, ANCHORS, SIZE, VOCABULARY = 2, 512, 48, 8, 4096


def some_blocks() -> Blocks:
    """With a row too short to fill all its blocks."""
    ids_BS = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator_for("ids"))
    mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    mask_BS[1, 30:] = False
    drawn = [pick_anchors(mask_S, ANCHORS, generator_for("anchors", row)) for row, mask_S in enumerate(mask_BS)]
    anchors_BN, valid_BN = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    assert not valid_BN.all()
    return lay_out(ids_BS, mask_BS, anchors_BN, valid_BN, block_size=SIZE, mask_token_id=3, gamma=4.0).to(CUDA)


def slots_and_gradients(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    drafter = Drafter(SHAPE)
    drafter.initialise(generator_for("weights"))
    drafter.to(CUDA)
    table = (torch.randn(VOCABULARY, 1024, generator=generator_for("table")) * 0.05).to(CUDA, dtype)
    ends = FrozenEnds(embedding_VH=table, head_VH=table)
    features = torch.randn(ROWS, LENGTH, 3072, generator=generator_for("features")).to(CUDA, dtype)
    blocks = some_blocks()
    slots = drafter(features, blocks, ends, kernels)
    loss, *_ = block_loss(slots, blocks, table, weight_sum=100.0, chunk_rows=100, head_loss=kernels.head_loss)
    loss.backward()
    gradients = {name: p.grad.float() for name, p in drafter.named_parameters() if p.grad is not None}
    return slots.detach().float(), gradients


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_flex_attention_agrees_with_its_twin_forward_and_backward() -> None:
    exact, exact_gradients = slots_and_gradients(plain(DenseAttention()), torch.float32)
    for dtype, forward, backward in ((torch.float32, 1e-4, 1e-3), (torch.bfloat16, 2e-2, 5e-2)):
        slots, gradients = slots_and_gradients(kernels_for(CUDA).of((ROWS, LENGTH, ANCHORS)), dtype)
        worst = max(relative(gradients[name], gradient) for name, gradient in exact_gradients.items())
        print(f"flex vs dense float32 in {dtype}: forward {relative(slots, exact):.2e}, worst gradient {worst:.2e}")
        assert gradients.keys() == exact_gradients.keys()
        assert relative(slots, exact) < forward
        assert worst < backward


def test_a_drafter_on_the_cpu_reads_no_feature_before_it_has_come() -> None:
    slow = torch.zeros(1 << 22, device=CUDA)
    torch.cuda._sleep(500_000_000)
    slow += 1
    assert (bring(slow, torch.device("cpu")) == 1).all()


def test_the_targets_layers_compiled_for_a_graph_make_the_same_features_up_to_rounding(tiny_target: Path) -> None:
    target = load_target(TargetConfig(path=str(tiny_target), captured_layers=3), CUDA)
    one = torch.randint(4, 400, (2, 96), generator=torch.Generator().manual_seed(1))
    other = torch.randint(4, 400, (2, 96), generator=torch.Generator().manual_seed(2))
    positions = torch.cat((torch.arange(40), torch.arange(56))).repeat(2, 1)
    with target.stream():
        expected = [target.features(one), target.features(other, positions)]
        target.record([(other,), (one, positions)], compiled=True)
        found = [target.features(one), target.features(other, positions)]
    torch.cuda.synchronize()
    assert len(target._graphs._graphs) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert not torch.equal(ours, theirs), "nothing was compiled"
        assert (ours.float() - theirs.float()).norm() < 0.02 * theirs.float().norm()
