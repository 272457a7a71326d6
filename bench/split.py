"""A target on one device and drafters on others, all at work at once: which side waits for which?

    python -m bench.split [--shapes qwen3-8b] [--length 2048 4096] [--target cuda:0] [--drafters cuda:1 ...]
                          [--graphs on] [--steps 20] [--profile FILE]

Prints a JSON line for each length: a target thread a device runs the frozen forward, with random weights, and hands
features on as in a run; drafter threads train on them and exchange gradients in every step. A micro-batch is one row of
exactly that length, with the anchors and block size that the line states. `samples_s` counts rows of all drafters,
`target_samples_s` those that the targets would do if nobody held them up; `target_busy` is the share of the time in
which a target's device was in the forward, `drafters_stalled` that in which a drafter's had nothing to work on.
`hand_over_ms` is what it takes to bring a row's features to a drafter's device, alone. With `--profile` torch's
profiler writes its trace of a few steps more into FILE.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.trainer import SHAPES, WARM, Drafters, make_row, milliseconds, random_target, settle
from trainer import compile_plan
from trainer.clock import Span, mark
from trainer.data.order import Cursor
from trainer.micro_batch import MicroBatch
from trainer.model.blocks import bring
from trainer.model.target import Target
from trainer.pipeline import Channel
from trainer.replicas import Replicas
from trainer.report.throughput import Amount

QUEUE_DEPTH = 2


class Pipeline:
    """Targets and drafters of these shapes, warm; `run` lets them work."""

    def __init__(self, shapes: str, length: int, targets: Sequence[torch.device], drafters: Sequence[torch.device], *,
                 graphs: bool) -> None:  # fmt: skip
        sizes = SHAPES[shapes]
        self.targets: list[Target] = [random_target(shapes, device) for device in targets]
        self.rows = [make_row(sizes, length, rank) for rank in range(len(drafters))]
        if any(device.type == "cuda" for device in (*targets, *drafters)):
            self.rows = [(ids_BS.pin_memory(), blocks.each(torch.Tensor.pin_memory)) for ids_BS, blocks in self.rows]
        for target in self.targets:
            compile_plan.settle_thread(target.device, cpu_threads=1, compiles=False)
            if graphs:
                target.record([(self.rows[0][0],)], compiled=True)  # as a run does
        self.drafters = Drafters(sizes, length, drafters, graphs=graphs, apart=False, loss="auto")

    def run(self, steps: int) -> dict[str, Any]:
        members, count = self.drafters.members, self.drafters.count
        replicas = Replicas(count, [member.device for member in members])
        channels: list[Channel[MicroBatch]] = [Channel(QUEUE_DEPTH, first=1) for _ in members]
        made: list[Span] = []
        idle: list[Span] = []
        ends: list[float] = []

        def hand_on(number: int) -> None:
            target = self.targets[number]
            compile_plan.settle_thread(target.device, cpu_threads=1, compiles=False)
            with target.stream():
                for place in range(count * steps):
                    if place % len(self.targets) != number:
                        continue
                    step, rank = place // count + 1, place % count
                    ids_BS, blocks = self.rows[rank]
                    begin = mark(target.device)
                    features_BSF = target.features(ids_BS)
                    made.append(Span(begin=begin, end=mark(target.device)))
                    with target.handing_over(features_BSF, members[rank].device):
                        batch = members[rank].accept(
                            step=step, rows=[rank], features_BSF=features_BSF, blocks=blocks,
                            weight_sum=float(blocks.weights_BNk.sum()) * count, amount=Amount(), cursor=Cursor(),
                        )  # fmt: skip
                    channels[rank].put(batch, step)

        def train(rank: int) -> None:
            member = members[rank]
            compile_plan.settle_thread(member.device, cpu_threads=1, compiles=member.kernels.compiles)
            average = None if count == 1 else partial(member.average, replicas, rank)
            before = end = None
            with member.stream():
                for _ in range(steps):
                    batch = channels[rank].get()
                    begin = mark(member.device)
                    figures = member.step([batch], lr=1e-5, average=average, hashed=False)
                    if end is not None:
                        idle.append(Span(begin=end, end=figures.stalls[-1].end if figures.stalls else begin))
                    end = mark(member.device)
                    if before is not None:
                        before.wait()  # as in a run, which is never more than a step ahead
                        ends.extend([time.monotonic()] * (rank == 0))
                    before = figures

        threads = [threading.Thread(target=hand_on, args=(number,)) for number in range(len(self.targets))]
        threads += [threading.Thread(target=train, args=(rank,)) for rank in range(count)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._settle()
        seconds = time.monotonic() - started
        times = [1000 * (other - one) for one, other in itertools.pairwise(ends)]
        low, step_ms, high = (round(value, 2) for value in statistics.quantiles(times, n=4))
        forward_s = sum(span.seconds() for span in made)
        busy = forward_s / len(self.targets) / seconds
        stalled = sum(span.seconds() for span in idle) / count / seconds
        return {
            "samples_s": round(count * steps / seconds, 2),
            "target_samples_s": round(len(self.targets) * count * steps / forward_s, 2),
            "step_ms": step_ms, "step_ms_quartiles": [low, high],
            "target_busy": round(busy, 3), "drafters_stalled": round(stalled, 3),
            "bottleneck": "target" if stalled > 1 - busy else "drafters",
        }  # fmt: skip

    def hand_over_ms(self, times: int = 20) -> float | None:
        """Of the features of one row, from the first target's device to the last drafter's."""
        target, device = self.targets[0], self.drafters.members[-1].device
        if target.device == device or device.type != "cuda":
            return None
        with target.stream():
            features_BSF = target.features(self.rows[0][0])
        self._settle()
        found = []
        for _ in range(times):
            begun = mark(device)
            bring(features_BSF, device)
            found.append((begun, mark(device)))
        self._settle()
        return round(statistics.median(milliseconds(*pair) for pair in found), 3)

    def _settle(self) -> None:
        for device in (*(target.device for target in self.targets), *self.drafters.devices):
            settle(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--length", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--target", type=torch.device, nargs="+", help="a thread each")
    parser.add_argument("--drafters", type=torch.device, nargs="+", help="a thread each; they may repeat")
    parser.add_argument("--graphs", choices=("on", "off"), default="on")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", type=Path)
    arguments = parser.parse_args()
    there = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    targets = arguments.target or there[:1]
    drafters = arguments.drafters or there[1:] or there
    sizes = SHAPES[arguments.shapes]
    graphs = arguments.graphs == "on" and all(device.type == "cuda" for device in (*targets, *drafters))
    for length in arguments.length:
        pipeline = Pipeline(arguments.shapes, length, targets, drafters, graphs=graphs)
        compiles = compile_plan.watch.compiles
        pipeline.run(WARM)
        line = {
            "shapes": arguments.shapes, "target": list(map(str, targets)), "drafters": list(map(str, drafters)),
            "rows": 1, "length": length, "anchors": sizes["anchors"], "block_size": sizes["block_size"],
            "graphs": graphs, **pipeline.run(arguments.steps), "hand_over_ms": pipeline.hand_over_ms(),
            "late_compiles": compile_plan.watch.compiles - compiles, "torch": torch.__version__,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        if arguments.profile:
            with torch.profiler.profile() as profile:
                pipeline.run(WARM)
            profile.export_chrome_trace(str(arguments.profile.with_stem(f"{arguments.profile.stem}-{length}")))
        # Before the next ones are made: a target and drafters of these sizes are there once.
        del pipeline
        compile_plan.watch.open()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
