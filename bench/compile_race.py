"""Do threads that share compiled functions kill each other? Fresh starts of several drafters, with and without a plan.

    python -m bench.compile_race [--starts 200] [--naive 20] [--graphs 20] [--threads 3] [--steps 5] [--delay-ms 1]
                                 [--devices cuda:0] [--seconds 300]

A start forgets everything that was compiled, and lets each thread train its own replica for some steps. With the plan,
one thread has been through a step before the others exist, and then compiling is forbidden; naive is the same without
that; graphs is the plan, and what a step does recorded besides. Every node that the tracer makes costs `delay-ms`, so
that what can happen does. Threads go to `--devices` in turn. Prints a line for each mode: how many starts there were,
how many lost a thread, how often the compiler began after the warm-up, how many ended with replicas that are not equal,
and what was raised.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.proxy import TracerBase

from bench.trainer import config_for, make_batch, settle
from trainer import compile_plan
from trainer.kernels import kernels_for
from trainer.model.blocks import generator_for
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.pipeline import Aborted
from trainer.replica import Replica
from trainer.replicas import Replicas

LENGTH = 256
SIZES: dict[str, Any] = {
    "shape": DrafterShape(hidden=256, captured=2, layers=3, heads=4, kv_heads=2, head_dim=64, intermediate=512,
                          rms_norm_eps=1e-6, rope_theta=1e6),
    "vocabulary": 1024, "anchors": 32, "block_size": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    raised: list[str]
    """By the threads."""
    late: int
    """How often the compiler began after the warm-up."""
    equal: bool
    """Whether all replicas ended with the same weights."""


def start(devices: Sequence[torch.device], *, planned: bool, steps: int, graphs: bool) -> Start:
    """Of a thread for each of `devices`, which may repeat."""
    compile_plan.watch.open()
    torch._dynamo.reset()
    compile_plan.watch.open()
    kernels_for.cache_clear()
    config, own = config_for(SIZES, LENGTH, devices), list(dict.fromkeys(devices))
    table = (torch.randn(SIZES["vocabulary"], SIZES["shape"].hidden) * 0.02).to(torch.bfloat16)
    tables = {device: table.to(device) for device in own}
    members = [
        Replica(
            Drafter.fresh(SIZES["shape"], generator_for("weights")),
            FrozenEnds(embedding_VH=tables[device], head_VH=tables[device]),
            kernels_for(device, compile_on_cpu="aot_eager"), config, device,
        ) for device in devices
    ]  # fmt: skip
    if len(own) > 1:
        for member in members:
            member.exchange_early()
    batches = [make_batch(member, SIZES, LENGTH, rank) for rank, member in enumerate(members)]
    replicas, gate = Replicas(len(members), devices), threading.Barrier(len(members))
    raised: list[str] = []

    def settle_thread(member: Replica) -> None:
        compile_plan.settle_thread(member.device, cpu_threads=1, compiles=True)

    def one_step(unit: compile_plan.Unit) -> dict[str, Any]:
        rank = next(rank for rank, device in enumerate(devices) if str(device) == unit.device)
        settle_thread(members[rank])
        with members[rank].stream():
            members[rank].loss_and_gradients(batches[rank])
        return members[rank].kernels.of(batches[rank].shape).compiled

    if planned:
        units = compile_plan.plan(own, rows=1, context_length=LENGTH, anchors=SIZES["anchors"],
                                  block_size=SIZES["block_size"])  # fmt: skip
        compile_plan.warm_up(units, one_step, say=lambda _: None)
        for member, batch in zip(members, batches, strict=True):
            if graphs and member.device.type == "cuda":
                settle_thread(member)
                member.record([batch], averaged=True, several=False)
    compiles = compile_plan.watch.compiles

    def work(rank: int) -> None:
        try:
            settle_thread(members[rank])
            gate.wait()
            with members[rank].stream():
                for _ in range(steps):
                    average = functools.partial(members[rank].average, replicas, rank)
                    members[rank].step([batches[rank]], lr=1e-4, average=average, hashed=False)
        except Aborted:
            pass
        except Exception as error:
            raised.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}")
            replicas.abort()

    workers = [threading.Thread(target=work, args=(rank,), name=f"drafter-{rank}") for rank in range(len(members))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for device in own:
        settle(device)
    weights = [member.flat.weights.cpu() for member in members]
    equal = all(torch.equal(one, weights[0]) for one in weights)
    return Start(raised=raised, late=compile_plan.watch.compiles - compiles, equal=equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--naive", type=int, default=20)
    parser.add_argument("--graphs", type=int, default=0, help="starts with the plan and CUDA graphs")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--devices", type=torch.device, nargs="+")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop beginning new starts of a mode after this")
    arguments = parser.parse_args()
    given = arguments.devices or [torch.device("cuda:0" if torch.cuda.is_available() else "cpu")]
    devices = [given[rank % len(given)] for rank in range(arguments.threads)]
    create_node = TracerBase.create_node

    def slowly(*positional: Any, **named: Any) -> Any:
        time.sleep(arguments.delay_ms / 1000)
        return create_node(*positional, **named)

    TracerBase.create_node = slowly  # type: ignore[method-assign]
    modes = {"naive": arguments.naive, "plan": arguments.starts, "graphs": arguments.graphs}
    for mode, wanted in modes.items():
        begun = time.monotonic()
        starts = lost = late = unequal = 0
        errors: collections.Counter[str] = collections.Counter()
        while starts < wanted and time.monotonic() - begun < arguments.seconds:
            one = start(devices, planned=mode != "naive", steps=arguments.steps, graphs=mode == "graphs")
            starts, lost, late = starts + 1, lost + bool(one.raised), late + one.late
            unequal += not one.equal and not one.raised
            errors.update(one.raised)
        print(json.dumps({
            "mode": mode, "devices": list(map(str, given)), "torch": torch.__version__, "threads": arguments.threads,
            "starts": starts, "starts_that_lost_a_thread": lost, "compiles_after_warm_up": late,
            "starts_that_ended_unequal": unequal, "seconds": round(time.monotonic() - begun, 1), "errors": dict(errors),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
