"""The FLOPs that a step is said to take, against what torch counts while it takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.kernels import plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import Blocks, generator_for, lay_out, pick_anchors
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.model.flops import (
    Peaks,
    TargetCost,
    _of_card,
    drafter_flop,
    drafter_flop_of,
    peak_flop_s,
)
from trainer.model.loss import block_loss
from trainer.model.target import Target

WIDE = DrafterShape(
    hidden=64, captured=5, layers=1, heads=4, kv_heads=4, head_dim=16, intermediate=256, rms_norm_eps=1e-6,
    rope_theta=1e4,
)  # fmt: skip
DEEP = DrafterShape(
    hidden=48, captured=2, layers=3, heads=6, kv_heads=2, head_dim=16, intermediate=80, rms_norm_eps=1e-6,
    rope_theta=1e4,
)  # fmt: skip


def some_blocks(rows: int, length: int, anchors: int, size: int) -> Blocks:
    ids_BS = torch.randint(4, 90, (rows, length), generator=generator_for("ids"))
    mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    drawn = [pick_anchors(mask_BS[0], anchors, generator_for("anchors", row)) for row in range(rows)]
    anchors_BN, valid_BN = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    return lay_out(ids_BS, mask_BS, anchors_BN, valid_BN, block_size=size, mask_token_id=3, gamma=4.0)


def counted(work: Any) -> float:
    # The fused CPU kernel of attention is one that torch's counter does not know.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    ("shape", "rows", "length", "anchors", "size", "vocabulary"),
    [(WIDE, 2, 64, 8, 4, 96), (WIDE, 1, 40, 30, 2, 1000), (DEEP, 3, 96, 16, 8, 128)],
)
def test_a_drafters_forward_and_backward_take_the_flops_that_torch_counts(
    shape: DrafterShape, rows: int, length: int, anchors: int, size: int, vocabulary: int
) -> None:
    blocks = some_blocks(rows, length, anchors, size)
    drafter = Drafter(shape)
    drafter.initialise(generator_for("weights"))
    table = torch.randn(vocabulary, shape.hidden)
    features = torch.randn(rows, length, shape.captured * shape.hidden)
    ends = FrozenEnds(embedding_VH=table, head_VH=table)

    def step() -> None:
        slots_BTH = drafter(features, blocks, ends, plain(DenseAttention()))
        loss, *_ = block_loss(slots_BTH, blocks, table, weight_sum=1.0, chunk_rows=rows * anchors)
        loss.backward()

    slots, queries = rows * anchors * size, shape.heads * shape.head_dim
    # The dense form computes every pair, seen or not.
    ours = drafter_flop(
        shape, vocabulary=vocabulary, context=rows * length, slots=slots, supervised=rows * anchors * (size - 1),
        pairs=slots * (length + anchors * size),
    )  # fmt: skip
    assert ours == pytest.approx(counted(step), rel=0.01)
    unseen = slots * (length + anchors * size) - _pairs_seen(blocks, length)
    seen = drafter_flop_of(blocks, shape, vocabulary=vocabulary)
    assert ours - seen == pytest.approx(3 * shape.layers * 4 * queries * unseen)


def _pairs_seen(blocks: Blocks, length: int) -> int:
    return int(DenseAttention().mask(blocks, length).sum())


def test_padding_blocks_and_documents_see_what_the_mask_says() -> None:
    mask_BS = torch.zeros(1, 40, dtype=torch.bool)
    mask_BS[:, 10:16] = True
    mask_BS[:, 25:30] = True
    starts_BS = torch.where(torch.arange(40) < 22, 0, 22)[None]
    anchors_N, valid_N = pick_anchors(mask_BS[0], 12, generator_for("few"), starts_S=starts_BS[0])
    assert not valid_N.all()
    blocks = lay_out(
        torch.arange(40)[None], mask_BS, anchors_N[None], valid_N[None], block_size=4, mask_token_id=3, gamma=4.0,
        starts_BS=starts_BS,
    )  # fmt: skip
    whole = drafter_flop(DEEP, vocabulary=50, context=40, slots=48, supervised=36, pairs=_pairs_seen(blocks, 40))
    assert drafter_flop_of(blocks, DEEP, vocabulary=50) == whole


def config_of(family: str) -> Any:
    from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

    small = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "num_hidden_layers": 3}  # fmt: skip
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return {
        "llama": lambda: LlamaConfig(**small, intermediate_size=128, tie_word_embeddings=True),
        "qwen3": lambda: Qwen3Config(**small, intermediate_size=96, head_dim=32),
        "mixtral": lambda: MixtralConfig(**small, **experts, intermediate_size=64, sliding_window=None),
        "gpt2": lambda: GPT2Config(vocab_size=100, n_embd=64, n_head=4, n_layer=2, n_positions=64),
    }[family]()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gpt2"])
def test_a_targets_forward_whole_or_as_far_as_it_is_captured_takes_the_flops_that_torch_counts(family: str) -> None:
    from transformers import AutoModelForCausalLM

    config = config_of(family)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    rows, length = 2, 48
    ids_BS = torch.randint(0, 100, (rows, length))
    positions_BS = torch.arange(length).expand(rows, -1)
    target = Target(model, None, layer_ids=[0], device=torch.device("cpu"), files={})
    for part, layers in ((model, None), (target.trunk, target.depth)):
        cost = TargetCost.of(part, layers=layers)
        with torch.no_grad():
            torchs = counted(lambda part=part: part.base_model(input_ids=ids_BS, use_cache=False))
        # torch counts the whole matrix of attention, of which half is seen.
        unseen = cost.per_pair * rows * (length * length - length * (length + 1) / 2)
        assert cost.flop(positions_BS) + unseen == pytest.approx(torchs, rel=0.01)
    assert target.depth == 1


def test_a_sliding_window_and_the_next_document_are_not_seen() -> None:
    cost = TargetCost(per_token=10.0, per_pair=100.0, per_near_pair=1000.0, window=2)
    assert cost.flop(torch.tensor([[0, 1, 2, 3]])) == 40 + 100 * (1 + 2 + 3 + 4) + 1000 * (1 + 2 + 2 + 2)
    assert cost.flop(torch.tensor([[0, 1, 0, 1]])) == 40 + 100 * (1 + 2 + 1 + 2) + 1000 * (1 + 2 + 1 + 2)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float32, 66.9),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312.0),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.4),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("NVIDIA RTX A6000", torch.bfloat16, 154.8),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("Tesla T4", torch.bfloat16, None),
    ],
)
def test_a_card_is_known_by_its_name_or_not_at_all(name: str, dtype: torch.dtype, tflops: float | None) -> None:
    assert _of_card(name, dtype) == (None if tflops is None else pytest.approx(1e12 * tflops))


def test_an_mfu_is_never_made_up() -> None:
    assert peak_flop_s(torch.device("cpu"), torch.float32) is None
    assert peak_flop_s(torch.device("cpu"), torch.float32, given_tflops=0.5) == 5e11
    cpu = torch.device("cpu")
    assert Peaks([(cpu, torch.float32), (cpu, torch.bfloat16)], given_tflops=None).all is None
    peaks = Peaks([(cpu, torch.float32), (cpu, torch.bfloat16)], given_tflops=0.5)
    assert peaks.devices == [cpu] and peaks.of(cpu) == peaks.all == 5e11
