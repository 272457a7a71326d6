"""How long do head and loss of a step take, forward and backward, by each kernel of `loss.kernel`?

    python -m bench.loss [--shapes qwen3-8b] [--kernels chunked fused liger] [--weights d-pace] [--rounds 20]

Prints a JSON line for each kernel: milliseconds of one replica's share (median and quartiles), the ratio to the first
kernel's of the same round, which is what another job on the machine falsifies least, useful TFLOP/s (the logits once,
their gradient once), gigabytes at the peak beyond what was there before, and how far the gradient is off, relative to
that of the first kernel in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from bench.trainer import SHAPES, milliseconds, settle
from trainer.clock import mark
from trainer.kernels import kernels_for
from trainer.model.blocks import Blocks, generator_for, lay_out, pick_anchors
from trainer.model.loss import HeadLoss, block_loss

WARM = 3


class Case:
    """One row's slots as they come out of a drafter, and the frozen head."""

    def __init__(self, sizes: dict[str, Any], device: torch.device, *, pace: bool) -> None:
        self.device, self.alpha = device, 0.5 if pace else None
        vocabulary, hidden = sizes["vocabulary"], sizes["shape"].hidden
        length = 4 * sizes["anchors"]
        ids_BS = torch.randint(4, vocabulary, (1, length), generator=generator_for("ids"))
        mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        anchors_N, valid_N = pick_anchors(mask_BS[0], sizes["anchors"], generator_for("anchors"))
        self.blocks: Blocks = lay_out(
            ids_BS, mask_BS, anchors_N[None], valid_N[None], block_size=sizes["block_size"], mask_token_id=3,
            gamma=math.inf if pace else 7.0,
        ).to(device)  # fmt: skip
        slots = sizes["anchors"] * sizes["block_size"]
        self.slots_BTH = torch.randn(1, slots, hidden, generator=generator_for("slots")).to(device, torch.bfloat16)
        self.head_VH = (torch.randn(vocabulary, hidden, generator=generator_for("head")) * 0.05).to(
            device, torch.bfloat16
        )  # fmt: skip
        self.flop = 4 * self.blocks.weights_BNk.numel() * hidden * vocabulary

    def gradient(self, head_loss: HeadLoss, chunk_rows: int, dtype: torch.dtype | None = None) -> Tensor:
        slots_BTH = self.slots_BTH.to(dtype or self.slots_BTH.dtype).detach().requires_grad_()
        loss, *_ = block_loss(
            slots_BTH, self.blocks, self.head_VH.to(slots_BTH.dtype), weight_sum=100.0, chunk_rows=chunk_rows,
            head_loss=head_loss, alpha=self.alpha,
        )  # fmt: skip
        loss.backward()
        assert slots_BTH.grad is not None
        return slots_BTH.grad

    def ms(self, head_loss: HeadLoss, chunk_rows: int) -> float:
        begin = mark(self.device)
        self.gradient(head_loss, chunk_rows)
        end = mark(self.device)
        settle(self.device)
        return milliseconds(begin, end)

    def peak_gb(self, head_loss: HeadLoss, chunk_rows: int) -> float | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.gradient(head_loss, chunk_rows)
        return round((torch.cuda.max_memory_allocated() - before) / 1e9, 2)


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 3) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--kernels", nargs="+", choices=("chunked", "fused", "liger"), default=["chunked", "fused"])
    parser.add_argument("--weights", choices=("exponential", "d-pace"), default="exponential")
    parser.add_argument("--chunk-rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32", action="store_true", help="compute in float32, as drafters on the CPU do")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    sizes = SHAPES[arguments.shapes]
    case = Case(sizes, device, pace=arguments.weights == "d-pace")
    if arguments.float32:
        case.slots_BTH, case.head_VH = case.slots_BTH.float(), case.head_VH.float()
    shape = (1, 4 * sizes["anchors"], sizes["anchors"])
    losses = {name: kernels_for(device, loss_kernel=name).of(shape).head_loss for name in arguments.kernels}
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(WARM + arguments.rounds):
        for name, head_loss in losses.items():
            times[name].append(case.ms(head_loss, arguments.chunk_rows))
    first = next(iter(losses))
    truth = case.gradient(losses[first], arguments.chunk_rows, torch.float32)
    for name, head_loss in losses.items():
        own, others = times[name][WARM:], times[first][WARM:]
        off = (case.gradient(head_loss, arguments.chunk_rows) - truth).norm() / truth.norm()
        print(json.dumps({
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "shapes": arguments.shapes,
            "kernel": name, "weights": arguments.weights, "ms": quartiles(own),
            f"of_{first}": quartiles([one / other for one, other in zip(own, others, strict=True)]),
            "tflop_s": round(case.flop / statistics.median(own) / 1e9, 3),
            "peak_gb": case.peak_gb(head_loss, arguments.chunk_rows), "off": round(float(off), 5),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
