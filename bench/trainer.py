"""How fast is a drafter's training step? At the shapes of a drafter for Qwen3-8B, against what this card can do.

    python -m bench.trainer [--length 2048] [--drafters 1 3] [--steps 20] [--tiny] [--out FILE]

Prints a JSON line for the ceiling (bf16 matrix product of 8192, TFLOP/s), then one for each number of drafters, every
one a thread with a replica of its own on the same device, which average their gradients as in a run: milliseconds a
step, of which forward + loss + backward (one drafter only), useful TFLOP/s of all together, share of the ceiling, and
gigabytes at the peak. Useful: no recomputation counted, a slot sees half the context on average, the frozen head has no
gradient of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import compile_plan
from trainer.blocks import generator_for, lay_out, pick_anchors
from trainer.config import Config
from trainer.drafter import DrafterShape, FrozenEnds
from trainer.kernels import kernels_for
from trainer.order import Cursor
from trainer.replica import MicroBatch, Replica
from trainer.replicas import Replicas

WARM = 4
QWEN3_8B = {
    "shape": DrafterShape(hidden=4096, captured=5, layers=5, heads=32, kv_heads=8, head_dim=128, intermediate=12288,
                          rms_norm_eps=1e-6, rope_theta=1e6),
    "vocabulary": 151_936, "anchors": 512, "block_size": 16,
}  # fmt: skip
TINY = {
    "shape": DrafterShape(hidden=64, captured=2, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96,
                          rms_norm_eps=1e-6, rope_theta=1e6),
    "vocabulary": 512, "anchors": 16, "block_size": 4,
}  # fmt: skip


def useful_flop(sizes: dict[str, Any], length: int) -> float:
    """Of one row's step: linear layers forward once and backward twice, except `fc` and the head (once each)."""
    shape: DrafterShape = sizes["shape"]
    slots = sizes["anchors"] * sizes["block_size"]
    supervised = sizes["anchors"] * (sizes["block_size"] - 1)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 2 * 2 * slots * shape.hidden * queries + 2 * 2 * (length + slots) * shape.hidden * keys
    layer += 3 * 2 * slots * shape.hidden * shape.intermediate
    layer += 4 * slots * ((length - 2) / 2 + sizes["block_size"]) * queries
    features = 2 * length * shape.captured * shape.hidden * shape.hidden
    head = 2 * supervised * shape.hidden * sizes["vocabulary"]
    return float(3 * shape.layers * layer + 2 * features + 2 * head)


def ceiling_tflop_s(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 256
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        started = mark(device)
        one @ other
        times.append((started, mark(device)))
    settle(device)
    return 2 * size**3 / statistics.median(milliseconds(*pair) for pair in times[5:]) / 1e9


def mark(device: torch.device) -> Any:
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
    return time.perf_counter()


def milliseconds(one: Any, other: Any) -> float:
    return float((other - one) * 1000 if isinstance(one, float) else one.elapsed_time(other))


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_batch(member: Replica, sizes: dict[str, Any], length: int, rank: int) -> MicroBatch:
    shape: DrafterShape = sizes["shape"]
    ids_BS = torch.randint(4, sizes["vocabulary"], (1, length), generator=generator_for("ids", rank))
    mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    anchors_N, valid_N = pick_anchors(mask_BS[0], sizes["anchors"], generator_for("anchors", rank))
    blocks = lay_out(
        ids_BS, mask_BS, anchors_N[None], valid_N[None], block_size=sizes["block_size"], mask_token_id=3, gamma=7.0
    )
    features = torch.randn(1, length, shape.captured * shape.hidden, device=member.device, dtype=torch.bfloat16)
    return member.accept(
        step=1, rows=[0], features_BSF=features, blocks=blocks, weight_sum=blocks.weights_BNk.sum().item(),
        tokens=length, cursor=Cursor(),
    )  # fmt: skip


def config_for(sizes: dict[str, Any], length: int, device: torch.device, drafters: int) -> Config:
    return Config.model_validate({
        "steps": "1", "batch_size": str(drafters), "target": {"path": "-"},
        "devices": {"target": [str(device)], "drafter": [str(device)] * drafters},
        "data": {"kind": "python-docs", "sequence_length": str(length)}, "optimizer": {"lr": "1e-5"},
        "drafter": {"layers": str(sizes["shape"].layers), "block_size": str(sizes["block_size"]),
                    "anchors": str(sizes["anchors"]), "mask_token_id": "3"},
    })  # fmt: skip


def measure(sizes: dict[str, Any], length: int, device: torch.device, drafters: int, steps: int) -> dict[str, Any]:
    config = config_for(sizes, length, device, drafters)
    table = (torch.randn(sizes["vocabulary"], sizes["shape"].hidden, device=device) * 0.02).to(torch.bfloat16)
    head = (torch.randn(sizes["vocabulary"], sizes["shape"].hidden, device=device) * 0.02).to(torch.bfloat16)
    ends = FrozenEnds(embedding_VH=table, head_VH=head)
    kernels = kernels_for(device)
    members = [
        Replica(sizes["shape"], ends, kernels, config, device, initial=generator_for("weights"))
        for _ in range(drafters)
    ]
    batches = [make_batch(member, sizes, length, rank) for rank, member in enumerate(members)]
    replicas = Replicas(drafters)
    if drafters > 1:
        for member in members:
            member.exchange_early()

    def step(rank: int) -> None:
        average = partial(members[rank].average, replicas, rank) if drafters > 1 else None
        members[rank].step([batches[rank]], lr=1e-5, average=average, hashed=False)

    def warm(_unit: compile_plan.Unit) -> dict[str, Any]:
        compile_plan.settle_thread(device, cpu_threads=1, compiles=kernels.compiles)
        with members[0].stream():
            members[0].loss_and_gradients(batches[0])
        return kernels.of(batches[0].shape).compiled

    units = compile_plan.plan([device] if kernels.compiles else [], rows=1, context_length=length,
                              anchors=sizes["anchors"], block_size=sizes["block_size"])  # fmt: skip
    started = time.monotonic()
    compile_plan.warm_up(units, warm, say=lambda _: None)
    warm_up_s = time.monotonic() - started
    compiles = compile_plan.watch.compiles
    settle(device)
    times: list[float] = []
    core: list[float] = []

    def work(rank: int) -> None:
        compile_plan.settle_thread(device, cpu_threads=1, compiles=kernels.compiles)
        with members[rank].stream():
            marks = []
            for number in range(WARM + steps):
                if number >= WARM and rank == 0:
                    marks.append(mark(device))
                step(rank)
            marks.append(mark(device))
            settle(device)
            if rank == 0:
                times.extend(milliseconds(one, other) for one, other in itertools.pairwise(marks))
            if rank == 0 and drafters == 1:
                for _ in range(steps):
                    begun = mark(device)
                    members[0].loss_and_gradients(batches[0])
                    ended = mark(device)
                    settle(device)
                    core.append(milliseconds(begun, ended))

    threads = [threading.Thread(target=work, args=(rank,), name=f"drafter-{rank}") for rank in range(drafters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    low, step_ms, high = (round(value, 2) for value in statistics.quantiles(times, n=4))
    return {
        "drafters": drafters,
        "length": length,
        "step_ms": step_ms,
        "step_ms_quartiles": [low, high],
        "core_ms": round(statistics.median(core), 2) if core else None,
        "tflop_s": drafters * useful_flop(sizes, length) / step_ms / 1e9,
        "warm_up_s": round(warm_up_s, 1),
        "late_compiles": compile_plan.watch.compiles - compiles,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--drafters", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try this program without a GPU")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    sizes = TINY if arguments.tiny else QWEN3_8B
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    ceiling = ceiling_tflop_s(device)
    lines: list[dict[str, Any]] = [{"card": card, "torch": torch.__version__, "ceiling_tflop_s": round(ceiling, 1)}]
    print(json.dumps(lines[0]), flush=True)
    for drafters in arguments.drafters:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        line = measure(sizes, arguments.length, device, drafters, arguments.steps)
        line |= {"tflop_s": round(line["tflop_s"], 1), "ceiling": round(line["tflop_s"] / ceiling, 3)}
        lines.append(line)
        print(json.dumps(line), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
