"""What only a GPU can show: FlexAttention against its twin, and several drafters on a device without a compile race."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.support import TrainerProcess, documents, losses, poll, records, write_config
from trainer.attention import DenseAttention
from trainer.blocks import Blocks, bring, generator_for, lay_out, pick_anchors
from trainer.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.kernels import Kernels, kernels_for, plain
from trainer.loss import block_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda:0")
SHAPE = DrafterShape(
    hidden=1024, captured=3, layers=2, heads=16, kv_heads=4, head_dim=64, intermediate=2048, rms_norm_eps=1e-6,
    rope_theta=10_000.0,
)  # fmt: skip
ROWS, LENGTH, ANCHORS, SIZE, VOCABULARY = 2, 512, 48, 8, 4096

CHANGE_A_SHAPE = """
import trainer.replica, dataclasses
original = trainer.replica.Replica.loss_and_gradients
def shorter(self, batch):
    if batch.step == 5:
        batch = dataclasses.replace(batch, features_BSF=batch.features_BSF[:, :-16])
    return original(self, batch)
trainer.replica.Replica.loss_and_gradients = shorter
"""


@pytest.fixture
def gpu_settings(settings: dict[str, Any]) -> dict[str, Any]:
    settings["devices"] = {"target": ["cuda:0"], "drafter": ["cuda:0"] * 3}
    settings["drafter"] |= {"anchors": 16, "block_size": 8, "head_dim": 64, "heads": 4, "kv_heads": 2}
    settings["data"]["sequence_length"] = 128
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0}
    return {**settings, "steps": 100_000, "batch_size": 6, "checkpoint_every": 100_000}


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
    block_loss(
        slots, blocks, table, weight_sum=100.0, chunk_rows=100, chunk_loss=kernels.chunk_loss,
        last_chunk_loss=kernels.last_chunk_loss,
    ).backward()  # fmt: skip
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


def test_three_drafters_on_one_device_train_after_the_warm_up_and_hold_the_memory_they_name(
    start_trainer: Callable[..., TrainerProcess], gpu_settings: dict[str, Any], tmp_path: Path
) -> None:
    run = start_trainer(write_config(gpu_settings, tmp_path / "config.yaml"))
    run.wait_for_step(60, timeout_s=300)
    assert run.heartbeat()["gpu_memory_bytes"]["cuda:0"] > 0
    run.terminate()
    code, out, err = run.finish()
    assert (code, err) == (0, ""), out
    assert re.search(r"phase=compile_warmup unit=1/1 device=cuda:0 shape=2x128\+16x8 compiled=\d+ seconds=", out)
    of_step = losses(run.run_dir)
    assert sum(of_step[55:60]) < sum(of_step[:5])
    times = [record["time"] for record in records(run.run_dir, "metrics.jsonl") if record["worker"] is None]
    print(f"{(times[-1] - times[4]) / (len(times) - 5) * 1000:.1f} ms a step")
    print("\n".join(out.splitlines()[-12:]))


def test_a_run_over_buckets_compiles_nothing_after_the_warm_up(
    start_trainer: Callable[..., TrainerProcess], gpu_settings: dict[str, Any], tmp_path: Path
) -> None:
    gpu_settings["data"] |= {"paths": documents(tmp_path), "buckets": [16, 32, 128]}
    run = start_trainer(write_config({**gpu_settings, "steps": 60}, tmp_path / "config.yaml"))
    code, out, err = run.finish(timeout_s=400)
    # Whatever would have been compiled later would have ended it.
    assert (code, err) == (0, ""), out
    assert "phase=compile_warmup unit=3/3 device=cuda:0 shape=2x128+16x8 compiled=" in out


def test_a_shape_that_was_not_warmed_is_an_error_of_the_worker_and_no_silent_compile(
    start_trainer: Callable[..., TrainerProcess], gpu_settings: dict[str, Any], tmp_path: Path
) -> None:
    run = start_trainer(write_config(gpu_settings, tmp_path / "config.yaml"), planted=CHANGE_A_SHAPE)
    poll(lambda: run.process.poll() is not None or run.events("exception"), timeout_s=300)
    died = time.monotonic()
    code, _, err = run.finish()
    assert time.monotonic() - died < 15
    assert code == 1 and err.startswith("Exception in thread drafter-")
    (event,) = run.events("exception")
    assert "a micro-batch of 2 x (112 tokens, 16 anchors) on cuda:0 is not in the compile plan" in event["message"]
    assert max(record["step"] for record in records(run.run_dir, "metrics.jsonl")) == 4
