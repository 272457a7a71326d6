"""How fast is a drafter's training step, and the target's forward, against what this card can do?

    python -m bench.trainer [--shapes qwen3-8b] [--length 2048] [--drafters 1 3] [--graphs on off] [--steps 20]
                            [--loss auto] [--apart] [--devices cuda:0 cuda:1] [--processes N] [--target]
                            [--out FILE]

Prints a JSON line for the ceiling (bf16 matrix product of 8192, TFLOP/s), then one for each number of drafters, every
one a thread with a replica of its own, all on the same device or on `--devices` in turn, which average their gradients
as in a run (`--apart`: which do not): milliseconds a step and steps a second of all together, milliseconds of forward +
loss + backward (one drafter only), those of an exchange by itself (of which a step hides what it can behind the
backward), useful TFLOP/s of all together, share of the ceiling (of one device), and gigabytes at the first device's
peak. `--processes`: so many processes with a drafter each at the same time, to hold threads against. `--target`: the
forward of a target of these shapes, with random weights. Useful: no recomputation counted, a slot sees half the context
on average, the frozen head has no gradient of its own.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import compile_plan
from trainer.clock import Span, mark
from trainer.config import Config
from trainer.data.order import Cursor
from trainer.inputs import choose_layers
from trainer.kernels import kernels_for
from trainer.micro_batch import MicroBatch
from trainer.model.blocks import Blocks, generator_for, lay_out, pick_anchors
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.model.flops import TargetCost, drafter_flop
from trainer.model.target import Target
from trainer.replica import Replica
from trainer.replicas import Replicas
from trainer.report.throughput import Amount

WARM = 4
QWEN3_8B = {
    "shape": DrafterShape(hidden=4096, captured=5, layers=5, heads=32, kv_heads=8, head_dim=128, intermediate=12288,
                          rms_norm_eps=1e-6, rope_theta=1e6),
    "vocabulary": 151_936, "anchors": 512, "block_size": 16,
}  # fmt: skip
SMOLLM2 = {
    "shape": DrafterShape(hidden=576, captured=5, layers=3, heads=9, kv_heads=3, head_dim=64, intermediate=1536,
                          rms_norm_eps=1e-6, rope_theta=1e5),
    "vocabulary": 49_152, "anchors": 64, "block_size": 8,
}  # fmt: skip
TINY = {
    "shape": DrafterShape(hidden=64, captured=2, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96,
                          rms_norm_eps=1e-6, rope_theta=1e6),
    "vocabulary": 512, "anchors": 16, "block_size": 4,
}  # fmt: skip
SHAPES = {"qwen3-8b": QWEN3_8B, "smollm2": SMOLLM2, "tiny": TINY}
TARGETS = {
    "qwen3-8b": {"layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 12288},
    "smollm2": {"layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536},
    "tiny": {"layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96},
}


def useful_flop(sizes: dict[str, Any], length: int) -> float:
    """Of one row's step, as the MFU of a run has it."""
    anchors, size = sizes["anchors"], sizes["block_size"]
    return drafter_flop(
        sizes["shape"], vocabulary=sizes["vocabulary"], context=length, slots=anchors * size,
        supervised=anchors * (size - 1), pairs=anchors * size * ((length - 2) / 2 + size),
    )  # fmt: skip


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


def milliseconds(begin: Any, end: Any) -> float:
    return 1000 * Span(begin=begin, end=end).seconds()


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_row(sizes: dict[str, Any], length: int, rank: int) -> tuple[Tensor, Blocks]:
    """Ids [1, length], drawn at random, and the blocks over them, both on the CPU."""
    ids_BS = torch.randint(4, sizes["vocabulary"], (1, length), generator=generator_for("ids", rank))
    mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    anchors_N, valid_N = pick_anchors(mask_BS[0], sizes["anchors"], generator_for("anchors", rank))
    return ids_BS, lay_out(
        ids_BS, mask_BS, anchors_N[None], valid_N[None], block_size=sizes["block_size"], mask_token_id=3, gamma=7.0
    )


def make_batch(member: Replica, sizes: dict[str, Any], length: int, rank: int) -> MicroBatch:
    shape: DrafterShape = sizes["shape"]
    _, blocks = make_row(sizes, length, rank)
    features = torch.randn(1, length, shape.captured * shape.hidden, device=member.device, dtype=torch.bfloat16)
    return member.accept(
        step=1, rows=[0], features_BSF=features, blocks=blocks, weight_sum=blocks.weights_BNk.sum().item(),
        amount=Amount(tokens=length), cursor=Cursor(),
    )  # fmt: skip


def config_for(sizes: dict[str, Any], length: int, devices: Sequence[torch.device], *, loss: str = "auto"
               ) -> Config:  # fmt: skip
    """Of a run with a drafter on each of `devices`."""
    return Config.model_validate({
        "steps": "1", "batch_size": str(len(devices)), "target": {"path": "-"}, "loss": {"kernel": loss},
        "devices": {"target": [str(devices[0])], "drafter": [str(device) for device in devices]},
        "data": {"kind": "python-docs", "sequence_length": str(length)}, "optimizer": {"lr": "1e-5"},
        "drafter": {"layers": str(sizes["shape"].layers), "block_size": str(sizes["block_size"]),
                    "anchors": str(sizes["anchors"]), "mask_token_id": "3"},
    })  # fmt: skip


class Drafters:
    """A replica on each of `devices`, warm, with a thread each; `run` lets them step."""

    def __init__(self, sizes: dict[str, Any], length: int, devices: Sequence[torch.device], *, graphs: bool,
                 apart: bool, loss: str) -> None:  # fmt: skip
        self.count, self.apart = len(devices), apart or len(devices) == 1
        self.devices = list(dict.fromkeys(devices))
        config = config_for(sizes, length, devices, loss=loss)
        tables = [
            (torch.randn(sizes["vocabulary"], sizes["shape"].hidden, device=devices[0]) * 0.02).to(torch.bfloat16)
            for _ in range(2)
        ]  # fmt: skip
        ends = {
            device: FrozenEnds(embedding_VH=tables[0].to(device), head_VH=tables[1].to(device))
            for device in self.devices
        }  # fmt: skip
        fresh = Drafter.fresh(sizes["shape"], generator_for("weights"))
        self.members = [
            Replica(copy.deepcopy(fresh), ends[device], kernels_for(device, loss_kernel=loss), config, device)
            for device in devices
        ]
        if len(self.devices) > 1 and not self.apart:
            for member in self.members:
                member.exchange_early()
        self.batches = [make_batch(member, sizes, length, rank) for rank, member in enumerate(self.members)]
        compiled = [device for device in self.devices if kernels_for(device, loss_kernel=loss).compiles]
        units = compile_plan.plan(compiled, rows=1, context_length=length, anchors=sizes["anchors"],
                                  block_size=sizes["block_size"])  # fmt: skip
        started = time.monotonic()
        compile_plan.warm_up(units, self._warm, say=lambda _: None)
        for member, batch in zip(self.members, self.batches, strict=True):
            if graphs:
                self._settle_thread(member)
                member.record([batch], averaged=not self.apart, several=False)
        self._settle()
        self.warm_up_s = time.monotonic() - started

    def _settle(self) -> None:
        for device in self.devices:
            settle(device)

    def _settle_thread(self, member: Replica) -> None:
        compile_plan.settle_thread(member.device, cpu_threads=1, compiles=member.kernels.compiles)

    def _warm(self, unit: compile_plan.Unit) -> dict[str, Any]:
        rank = next(rank for rank, member in enumerate(self.members) if str(member.device) == unit.device)
        member, batch = self.members[rank], self.batches[rank]
        self._settle_thread(member)
        with member.stream():
            member.loss_and_gradients(batch)
        return member.kernels.of(batch.shape).compiled

    def run(self, steps: int) -> tuple[list[float], float]:
        """Milliseconds of each of the first one's steps, and seconds for all of everybody."""
        replicas = Replicas(self.count, [member.device for member in self.members])
        gate = threading.Barrier(self.count + 1)
        times: list[float] = []

        def work(rank: int) -> None:
            member, batch = self.members[rank], self.batches[rank]
            self._settle_thread(member)
            average = None if self.apart else partial(member.average, replicas, rank)
            gate.wait()
            before = None
            with member.stream():
                marks = []
                for _ in range(steps):
                    marks.append(mark(member.device))
                    figures = member.step([batch], lr=1e-5, average=average, hashed=False)
                    if before is not None:
                        before.wait()  # as in a run, which is never more than a step ahead
                    before = figures
                marks.append(mark(member.device))
                figures.wait()
            if rank == 0:
                times.extend(milliseconds(one, other) for one, other in itertools.pairwise(marks))

        threads = [threading.Thread(target=work, args=(rank,), name=f"drafter-{rank}") for rank in range(self.count)]
        for thread in threads:
            thread.start()
        gate.wait()
        started = time.monotonic()
        for thread in threads:
            thread.join()
        self._settle()
        return times, time.monotonic() - started

    def exchange_ms(self, times: int = 20) -> float:
        """What an exchange takes by itself, of gradients that are all there."""
        replicas = Replicas(self.count, [member.device for member in self.members])

        def work(rank: int) -> None:
            member = self.members[rank]
            self._settle_thread(member)
            with member.stream():
                for _ in range(times):
                    member.average(replicas, rank)

        self._settle()
        started = time.monotonic()
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._settle()
        return 1000 * (time.monotonic() - started) / times

    def core_ms(self, steps: int) -> float:
        """Forward, loss and backward alone, of the first one."""
        found, member = [], self.members[0]
        self._settle_thread(member)
        with member.stream():
            for _ in range(steps):
                begun = mark(member.device)
                member.loss_and_gradients(self.batches[0])
                ended = mark(member.device)
                settle(member.device)
                found.append(milliseconds(begun, ended))
        return statistics.median(found)


def measure(sizes: dict[str, Any], length: int, devices: Sequence[torch.device], steps: int, *, graphs: bool,
            apart: bool, loss: str) -> dict[str, Any]:  # fmt: skip
    made, drafters = Drafters(sizes, length, devices, graphs=graphs, apart=apart, loss=loss), len(devices)
    compiles = compile_plan.watch.compiles
    made.run(WARM)
    times, seconds = made.run(steps)
    low, step_ms, high = (round(value, 2) for value in statistics.quantiles(times, n=4))
    return {
        "drafters": drafters, "devices": len(made.devices), "loss": loss, "graphs": graphs,
        "exchange": not made.apart, "length": length,
        "step_ms": step_ms, "step_ms_quartiles": [low, high], "steps_s": round(drafters * steps / seconds, 1),
        "core_ms": round(made.core_ms(min(steps, 20)), 2) if drafters == 1 else None,
        "exchange_ms": None if made.apart else round(made.exchange_ms(), 2),
        "tflop_s": drafters * useful_flop(sizes, length) * steps / seconds / 1e12,
        "warm_up_s": round(made.warm_up_s, 1), "late_compiles": compile_plan.watch.compiles - compiles,
        "peak_gb": round(torch.cuda.max_memory_allocated(devices[0]) / 1e9, 2) if devices[0].type == "cuda" else None,
    }  # fmt: skip


def processes(arguments: argparse.Namespace, count: int, *, graphs: bool) -> dict[str, Any]:
    """`count` processes with a drafter each, let go together once all are warm; steps a second of all together."""
    command = [
        sys.executable, "-m", "bench.trainer", "--child", "--shapes", arguments.shapes,
        "--graphs", "on" if graphs else "off", "--length", str(arguments.length), "--steps", str(arguments.steps),
        "--loss", arguments.loss,
    ]  # fmt: skip
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    rates = [float(child.communicate()[0]) for child in children]
    return {"processes": count, "graphs": graphs, "steps_s": round(sum(rates), 1), "each": rates}


def child(sizes: dict[str, Any], length: int, device: torch.device, steps: int, *, graphs: bool, loss: str
          ) -> None:  # fmt: skip
    made = Drafters(sizes, length, [device], graphs=graphs, apart=True, loss=loss)
    made.run(WARM)
    print("ready", flush=True)
    sys.stdin.readline()
    _, seconds = made.run(steps)
    print(round(steps / seconds, 1), flush=True)


def random_target(name: str, device: torch.device) -> Target:
    """Of these shapes, with weights that nobody has trained."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes, own = SHAPES[name], TARGETS[name]
    config = Qwen3Config(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["shape"].hidden, intermediate_size=own["intermediate"],
        num_hidden_layers=own["layers"], num_attention_heads=own["heads"], num_key_value_heads=own["kv_heads"],
        head_dim=own["head_dim"], tie_word_embeddings=False, attn_implementation="sdpa", dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    layer_ids = choose_layers(None, sizes["shape"].captured, count=own["layers"])
    return Target(model, None, layer_ids=layer_ids, device=device, files={})


def target_forward(name: str, length: int, device: torch.device, steps: int) -> dict[str, Any]:
    """The forward of a target of these shapes through `Target.features`, as in a run."""
    target = random_target(name, device)
    ids_BS = torch.randint(4, SHAPES[name]["vocabulary"], (1, length), generator=generator_for("ids"))
    flop = TargetCost.of(target.trunk, layers=target.depth).flop(torch.arange(length)[None])
    line: dict[str, Any] = {"target": name, "length": length}
    compile_plan.settle_thread(device, cpu_threads=1, compiles=False)
    for way in ("", "_graphs", "_compiled") if device.type == "cuda" else ("",):
        if way:
            target.record([(ids_BS,)], compiled=way == "_compiled")
        times = []
        with target.stream():
            for _ in range(WARM + steps):
                begun = mark(device)
                target.features(ids_BS)
                ended = mark(device)
                settle(device)
                times.append(milliseconds(begun, ended))
        ms = statistics.median(times[WARM:])
        line |= {f"forward_ms{way}": round(ms, 2), f"tflop_s{way}": flop / ms / 1e9}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--drafters", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--graphs", choices=("on", "off"), nargs="+", default=["on"])
    parser.add_argument("--loss", choices=("auto", "chunked", "fused", "liger"), default="auto")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--devices", type=torch.device, nargs="+", help="of the drafters, in turn")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--target", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    devices = arguments.devices or [torch.device("cuda:0" if torch.cuda.is_available() else "cpu")]
    device, sizes = devices[0], SHAPES[arguments.shapes]
    if arguments.child:
        child(sizes, arguments.length, device, arguments.steps, graphs=arguments.graphs == ["on"], loss=arguments.loss)
        return
    ceiling = ceiling_tflop_s(device)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    lines: list[dict[str, Any]] = []

    def found(line: dict[str, Any]) -> None:
        if "tflop_s" in line:
            line |= {"tflop_s": round(line["tflop_s"], 1), "ceiling": round(line["tflop_s"] / ceiling, 3)}
        lines.append(line)
        print(json.dumps(line), flush=True)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    found({"card": card, "torch": torch.__version__, "ceiling_tflop_s": round(ceiling, 1), "shapes": arguments.shapes})
    for drafters in arguments.drafters:
        for graphs in [one == "on" and device.type == "cuda" for one in arguments.graphs]:
            placed = [devices[rank % len(devices)] for rank in range(drafters)]
            found(measure(
                sizes, arguments.length, placed, arguments.steps, graphs=graphs, apart=arguments.apart,
                loss=arguments.loss,
            ))  # fmt: skip
    if arguments.processes:
        for graphs in [one == "on" and device.type == "cuda" for one in arguments.graphs]:
            found(processes(arguments, arguments.processes, graphs=graphs))
    if arguments.target:
        found(target_forward(arguments.shapes, arguments.length, device, arguments.steps))
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
