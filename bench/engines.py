"""One training over several devices: threads of one process against torch's DDP and FSDP2, target and all.

    python -m bench.engines [--devices 2] [--engines threads ddp fsdp2] [--shapes qwen3-8b] [--targets N] [--rows 1]
                            [--length 2048] [--graphs auto] [--steps 50] [--out FILE]

Every engine trains with the trainer's own loops on a target of these shapes with random weights, made on each device,
and random tokens, in processes of its own. Prints a JSON line an engine: milliseconds from step to step (median and
quartiles), steps, samples (rows) and tokens a second, the last loss (which engines have in common), seconds until the
first step, and gigabytes at the first device's peak. In threads `--targets` may be fewer than there are devices: then
the first so many run the target for all; processes have one each. `--graphs off`: threads launch kernel by kernel, as
DDP and FSDP2 do in any case. `--shapes tiny` on a machine without GPUs tries the bench itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.trainer import SHAPES, random_target
from trainer import compile_plan
from trainer.bench import BenchConsole
from trainer.config import Config
from trainer.data.rows import Rows, rows_of
from trainer.data.token_cache import TABLE, Documents, Refused
from trainer.distributed.ranks import own_devices, ranks_from_environment, settled
from trainer.distributed.reporting import reporter_for
from trainer.distributed.training import RankTraining
from trainer.distributed.world import join
from trainer.report.records import RunIdentity
from trainer.report.tally import memory_peak_bytes
from trainer.stopping import StopRequest
from trainer.train import Training

WARM = 10
ROWS = 512
ENGINES = ("threads", "ddp", "fsdp2")


def config_for(arguments: argparse.Namespace, engine: str) -> Config:
    sizes, count = SHAPES[arguments.shapes], arguments.devices
    gpus = [f"cuda:{index}" for index in range(count)] if torch.cuda.is_available() else ["cpu"] * count
    together = engine != "threads"
    return Config.model_validate({
        "engine": engine, "steps": str(WARM + arguments.steps), "batch_size": str(count * arguments.rows),
        "devices": "auto" if together and gpus[0] != "cpu" else {
            "target": gpus[: arguments.targets or count], "drafter": gpus,
        },
        "cuda_graphs": arguments.graphs, "checkpoint_every": str(WARM + arguments.steps), "target": {"path": "-"},
        "data": {"kind": "python-docs", "sequence_length": str(arguments.length)}, "optimizer": {"lr": "1e-5"},
        "drafter": {"layers": str(sizes["shape"].layers), "block_size": str(sizes["block_size"]),
                    "anchors": str(min(sizes["anchors"], arguments.length - 1)), "mask_token_id": "3"},
    })  # fmt: skip


def random_rows(config: Config, vocabulary: int) -> Rows:
    tokens = np.random.default_rng(0).integers(4, vocabulary, ROWS * config.data.sequence_length, dtype=np.int32)
    table = np.zeros(1, dtype=TABLE)
    table["end"], table["trained"] = len(tokens), len(tokens)
    documents = Documents(
        tokens=tokens, trained=np.ones(len(tokens), dtype=np.bool_), table=table, names=(), records=1,
        first=np.full(vocabulary, -1), refused=Refused(), context_only=0, digest="random",
    )  # fmt: skip
    return rows_of(config.data, documents, filler=0, seed=0)


def measure(arguments: argparse.Namespace, engine: str) -> dict[str, Any] | None:
    """In the process, or in each of the processes, of one engine; None in all but one."""
    ranks = ranks_from_environment(os.environ)
    config = settled(config_for(arguments, engine), ranks)
    world = None
    if ranks is not None:
        devices = own_devices(config, ranks, gpus=torch.cuda.device_count())
        config = config.model_copy(update={"devices": devices})
        world = join(ranks, torch.device(devices.drafter[0]))
    reporter = reporter_for(RunIdentity(directory=arguments.folder / engine, run_id="bench"), ranks)
    console = reporter.console = BenchConsole()
    reporter.open()
    begun = time.monotonic()
    compile_plan.settle_thread(torch.device(config.devices.target[0]), cpu_threads=1, compiles=False)
    targets = []
    for name in config.devices.target:
        torch.manual_seed(0)
        targets.append(random_target(arguments.shapes, torch.device(name)))
    shape, stop = SHAPES[arguments.shapes]["shape"], StopRequest()
    data = config, reporter, stop, targets, random_rows(config, SHAPES[arguments.shapes]["vocabulary"]), shape
    training = Training(*data) if world is None else RankTraining(world, *data)
    training.warmup.compile()
    training.get_ready()
    ready_s = time.monotonic() - begun
    training.saves.off = stop.training = True
    ending = training.run()
    reporter.ended(code=ending.code, stopped=False)
    if ending.code:
        os._exit(ending.code)
    peak = memory_peak_bytes(training.tally.peaks.devices[:1])
    if world is not None:
        world.leave()
    if ranks is not None and not ranks.leads:
        return None
    return {
        "engine": engine, "devices": arguments.devices, "targets": len(targets) if ranks is None else ranks.size,
        "shapes": arguments.shapes, "rows": arguments.rows, "length": arguments.length,
        "anchors": config.drafter.anchors, "block_size": config.drafter.block_size,
        "graphs": config.cuda_graphs if ranks is None else "target only", **rates(console, config),
        "ready_s": round(ready_s, 1), "peak_gb": round(next(iter(peak.values())) / 1e9, 2),
    }  # fmt: skip


def rates(console: BenchConsole, config: Config) -> dict[str, Any]:
    times = [at for _, at in console.steps[WARM - 1 :]]
    took = [1e3 * (other - one) for one, other in itertools.pairwise(times)]
    low, median, high = statistics.quantiles(took, n=4)
    steps_s = len(took) / (times[-1] - times[0])
    last = console.steps[-1][0]
    return {
        "step_ms": round(median, 2), "step_ms_quartiles": [round(low, 2), round(high, 2)],
        "steps_s": round(steps_s, 2), "samples_s": round(steps_s * config.batch_size, 2), "tok_s": round(last.tok_s),
        "loss": round(last.loss, 4),
    }  # fmt: skip


def in_processes(arguments: argparse.Namespace, engine: str, folder: str) -> dict[str, Any]:
    """What the process, or processes, of an engine have found."""
    command = [sys.executable]
    if engine != "threads":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.devices)]
    command += ["-m", "bench.engines", *sys.argv[1:], "--one", engine, "--folder", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(found[-1])) if found else {"engine": engine, "failed": done.returncode}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--targets", type=int, help="in threads (as many as devices)")
    parser.add_argument("--rows", type=int, default=1, help="of a device in a step")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--graphs", choices=("auto", "off"), default="auto")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        if (found := measure(arguments, arguments.one)) is not None:
            print(json.dumps(found), flush=True)
        return 0
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines: list[dict[str, Any]] = [{"card": card, "torch": torch.__version__}]
    print(json.dumps(lines[0]), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-engines-") as folder:
        for engine in arguments.engines:
            lines.append(in_processes(arguments, engine, folder))
            print(json.dumps(lines[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return int(any("failed" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
