"""A step with every option on a GPU: the loss's kernels, D-PACE, the moving average; recorded, and never waiting."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.support import losses, records
from trainer.kernels import kernels_for
from trainer.model.blocks import Blocks, generator_for, lay_out, pick_anchors
from trainer.model.loss import PLAIN, HeadLoss, block_loss
from trainer.replica import Replica

Settings = dict[str, Any]
CUDA = torch.device("cuda:0")
ROWS, LENGTH, ANCHORS, SIZE, HIDDEN, VOCABULARY = 2, 512, 48, 8, 1024, 32_000
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
KERNELS = ["fused", "chunked", pytest.param("liger", marks=pytest.mark.skipif(not HAS_LIGER, reason="no liger-kernel"))]


def some_blocks() -> Blocks:
    ids_BS = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator_for("ids"))
    mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    mask_BS[1, 30:] = False
    drawn = [pick_anchors(mask_S, ANCHORS, generator_for("anchors", row)) for row, mask_S in enumerate(mask_BS)]
    anchors_BN, valid_BN = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    return lay_out(ids_BS, mask_BS, anchors_BN, valid_BN, block_size=SIZE, mask_token_id=3, gamma=float("inf")).to(CUDA)


def loss_and_gradient(head_loss: HeadLoss, dtype: torch.dtype, alpha: float | None) -> tuple[float, Tensor]:
    head_VH = (torch.randn(VOCABULARY, HIDDEN, generator=generator_for("head")) * 0.05).to(CUDA, dtype)
    slots = torch.randn(ROWS, ANCHORS * SIZE, HIDDEN, generator=generator_for("slots")).to(CUDA, dtype).requires_grad_()
    loss, *_ = block_loss(
        slots, some_blocks(), head_VH, weight_sum=100.0, chunk_rows=100, head_loss=head_loss, alpha=alpha
    )
    loss.backward()
    assert slots.grad is not None
    return loss.item(), slots.grad.double()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_every_kernel_is_as_near_to_the_truth_as_the_chunked_one_as_it_is_written(kernel: str, alpha: float | None
                                                                                ) -> None:  # fmt: skip
    exact, exact_gradient = loss_and_gradient(PLAIN[False], torch.float64, alpha)
    own = kernels_for(CUDA, loss_kernel=kernel).of((ROWS, LENGTH, ANCHORS)).head_loss
    for dtype in (torch.float32, torch.bfloat16):
        off = {}
        for name, head_loss in ((kernel, own), ("as written", PLAIN[False])):
            loss, gradient = loss_and_gradient(head_loss, dtype, alpha)
            off[name] = float((gradient - exact_gradient).norm() / exact_gradient.norm())
            assert loss == pytest.approx(exact, rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
        print(f"{kernel}, alpha {alpha}, {dtype}: gradients off by {off}")
        assert off[kernel] < 1.25 * off["as written"] + 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weights", ["exponential", "d-pace"])
def test_recorded_steps_leave_the_bits_of_launched_ones_with_every_option(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path, kernel: str, weights: str
) -> None:
    on_gpu["loss"] = {"kernel": kernel, "weights": weights, "chunk_rows": 100}
    on_gpu["optimizer"]["ema"] = 0.9
    on_gpu["target"]["compile"] = "off"  # compiled, its layers round in another way
    found, slots = {}, {}
    for graphs in ("on", "off"):
        training = train({**on_gpu, "cuda_graphs": graphs, "output_dir": str(tmp_path / graphs)})
        averages = [member.ema.weights for member in training.members.values()]
        assert all(torch.equal(average, averages[0]) for average in averages)
        found[graphs] = losses(tmp_path / graphs), training.members[0].flat.weights.cpu(), averages[0].cpu()
        rows = [row for row in records(tmp_path / graphs, "metrics.jsonl") if row["worker"] is None]
        slots[graphs] = [[value for key, value in row.items() if key.startswith("slot_p_")] for row in rows]
    assert slots["on"] == slots["off"] and 0 < slots["on"][0][0] < slots["on"][-1][0]
    assert found["on"][0] == found["off"][0] and found["on"][0][-1] < found["on"][0][0]
    assert torch.equal(found["on"][1], found["off"][1]) and torch.equal(found["on"][2], found["off"][2])


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Of the whole process: nothing else may be under way."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_would_wait_is_seen() -> None:
    values = torch.arange(3.0, device=CUDA)
    for waits in (values[0].item, values.nonzero, values.tolist, values.cpu):
        with pytest.raises(RuntimeError), waiting_is_an_error():
            waits()


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weights", ["exponential", "d-pace"])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_nothing_in_a_step_waits_for_the_device(
    train: Callable[..., Any], on_gpu: Settings, graphs: str, kernel: str, weights: str, ema: float | None
) -> None:
    """Steps of one replica on the main thread, after a run that has warmed it up."""
    on_gpu["loss"] = {"kernel": kernel, "weights": weights, "chunk_rows": 100}
    on_gpu["optimizer"] |= {"ema": ema, "clip_norm": 1e-3}
    on_gpu["devices"]["drafter"] = ["cuda:0"]
    training = train({**on_gpu, "steps": 2, "cuda_graphs": graphs})
    member: Replica = training.members[0]
    (unit,) = training.warmup.units
    batch = training.warmup._batch(unit, member)
    torch.cuda.synchronize()
    before = member.flat.weights.clone()
    with member.stream(), waiting_is_an_error():
        for _ in range(3):
            figures = member.step([batch], lr=1e-3, hashed=True)
    figures.wait()
    assert figures.loss > 0 and not torch.equal(member.flat.weights, before)
