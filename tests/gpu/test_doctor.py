"""The doctor on a GPU: leaks through the compiled kernels, gradients against written ones, memory against the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import documents
from tests.trainer.test_doctor import examined, sees_its_anchor, sees_other_documents, visibility_of
from trainer.config import Config
from trainer.doctor import examine, leak
from trainer.kernels import kernels_for, plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import generator_for, lay_out, pick_anchors
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.model.loss import PLAIN, block_loss
from trainer.replica import Replica

CUDA = torch.device("cuda:0")
EVERY = [check.name for check in examine.CHECKS]


@pytest.mark.parametrize("packing", [False, True])
def test_a_right_run_has_nothing_wrong_with_it(on_gpu: dict[str, Any], tmp_path: Path, packing: bool) -> None:
    if packing:
        on_gpu["data"] |= {"paths": documents(tmp_path) * 5, "packing": True, "buckets": [64, 128]}
    found = examined(on_gpu, *EVERY)
    for name, finding in found.items():
        print(f"{finding.status} {name}: {finding.evidence}")
    assert {name: one.evidence for name, one in found.items() if one.status in ("fail", "skip")} == {}
    assert "compiled gradients differ by" in found["kernels"].evidence


@pytest.mark.parametrize(("visible", "what"), [(sees_its_anchor, leak.OWN_ANCHOR),
                                               (sees_other_documents, leak.OTHER_DOCUMENT)])  # fmt: skip
def test_a_wrong_mask_is_named_through_the_compiled_kernels(
    on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, visible: Callable[..., torch.Tensor], what: str
) -> None:
    torch._dynamo.reset()
    kernels_for.cache_clear()
    visibility_of(visible)(monkeypatch)
    found = examined(on_gpu, "leak: hidden states", quick=True)["leak: hidden states"]
    assert found.status == "fail" and what in found.facts["leaks"]
    torch._dynamo.reset()
    kernels_for.cache_clear()


def test_the_plan_is_not_below_what_a_step_takes_and_not_far_above(on_gpu: dict[str, Any]) -> None:
    on_gpu["drafter"] |= {"anchors": 100, "intermediate_size": 2048, "layers": 4}
    found = examined(on_gpu, "memory")["memory"]
    print(found.evidence)
    planned, measured = found.facts["planned"]["cuda:0"], found.facts["measured"]["cuda:0"]
    assert planned["drafters"] == pytest.approx(measured["drafters"], rel=0.1)
    assert 0.9 * measured["work"] < planned["work"] < 1.5 * measured["work"]


WIDTH = DrafterShape(
    hidden=4096, captured=5, layers=5, heads=32, kv_heads=8, head_dim=128, intermediate=12288, rms_norm_eps=1e-6,
    rope_theta=1e6,
)  # fmt: skip


def test_at_the_real_width_the_backward_compiles_and_its_gradients_are_those_of_what_is_written() -> None:
    """Errors that depend on the width (of checkpoints under a compiler, of a kernel's shared memory) show at no other.
    The widths are those of a drafter for Qwen3-8B, blocks and vocabulary as long as the reference leaves room."""
    torch._dynamo.reset()
    kernels_for.cache_clear()
    length, anchors, size, vocabulary = 2048, 128, 16, 32_768
    drafter = Drafter(WIDTH)
    drafter.initialise(generator_for("weights"))
    drafter.to(CUDA)
    table = (torch.randn(vocabulary, WIDTH.hidden, generator=generator_for("table")) * 0.02).to(CUDA)
    features = torch.randn(1, length, 5 * WIDTH.hidden, generator=generator_for("features")).to(CUDA)
    ids_BS = torch.randint(4, vocabulary, (1, length), generator=generator_for("ids"))
    mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    drawn, valid = pick_anchors(mask_BS[0], anchors, generator_for("anchors"))
    blocks = lay_out(
        ids_BS, mask_BS, drawn[None], valid[None], block_size=size, mask_token_id=3, gamma=7.0
    ).to(CUDA)  # fmt: skip
    gradients = {}
    for kernel in ("fused", "chunked", "written"):
        dtype = torch.float32 if kernel == "written" else torch.bfloat16
        ends = FrozenEnds(embedding_VH=table.to(dtype), head_VH=table.to(dtype))
        if kernel == "written":
            kernels = plain(DenseAttention(), PLAIN[False])
        else:
            kernels = kernels_for(CUDA, loss_kernel=kernel).of((1, length, anchors))
        drafter.zero_grad()
        slots = drafter(features.to(dtype), blocks, ends, kernels)
        loss, *_ = block_loss(
            slots, blocks, ends.head_VH, weight_sum=1000.0, chunk_rows=512, head_loss=kernels.head_loss
        )  # fmt: skip
        loss.backward()
        gradients[kernel] = {name: one.grad.clone() for name, one in drafter.named_parameters() if one.grad is not None}
    for kernel in ("fused", "chunked"):
        assert gradients[kernel].keys() == gradients["written"].keys()
        apart = {
            name: float((one - gradients["written"][name]).norm() / gradients["written"][name].norm())
            for name, one in gradients[kernel].items()
        }
        worst = max(apart, key=apart.__getitem__)
        print(f"{kernel}: worst gradient {apart[worst]:.2e} ({worst})")
        assert apart[worst] < 0.15
    torch._dynamo.reset()
    kernels_for.cache_clear()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thread_that_set_no_device_works_on_its_replicas_own(on_gpu: dict[str, Any]) -> None:
    table = torch.randn(400, 64, device="cuda:1")
    shape = DrafterShape(
        hidden=64, captured=3, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, rms_norm_eps=1e-6,
        rope_theta=1e4,
    )  # fmt: skip
    second = torch.device("cuda:1")
    ends = FrozenEnds(embedding_VH=table, head_VH=table)
    config = Config.model_validate(on_gpu)
    drafter = Drafter.fresh(shape, generator_for("weights"))
    member = Replica(drafter, ends, kernels_for(second), config, second)
    found: list[int] = []

    def work() -> None:
        with member.stream():
            found.append(torch.cuda.current_device())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [1]
