"""`python -m trainer bench CONFIG`: how long each stage of a step takes, how fast the run is, and what holds it up.

What is measured is a run as `train` does it, cut short: the same threads, queues and recordings on the same data. It
saves nothing and leaves no directory behind.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer import compile_plan, inputs, kept
from trainer.config import Config, expand_path
from trainer.plan import forecast
from trainer.report.console import complain
from trainer.report.records import RunIdentity
from trainer.report.reporter import GIB, SHARES, Reporter, RunStep
from trainer.report.tally import memory_peak_bytes
from trainer.sections import TrackingConfig
from trainer.stopping import StopRequest
from trainer.train import Training, prepare

WARM_UP_STEPS = 5
"""After which the queues are as full as they will be, too."""
STAGES = ("data", "target forward", "hand-over", "drafter forward + backward", "exchange", "optimizer", "step")


class BenchConsole:
    """Keeps the steps; says on stderr, in a terminal, what the bench is about to do."""

    def __init__(self) -> None:
        self.steps: list[tuple[RunStep, float]] = []
        """With when each was done."""

    def open(self) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def complain(self, line: str) -> None:
        complain(line)

    def write_error(self, text: str) -> None:
        sys.stderr.write(text)

    def phase(self, name: str, line: str) -> None:
        if sys.stderr.isatty():
            print(f"bench: {name}", file=sys.stderr, flush=True)

    def step(self, done: RunStep) -> None:
        self.steps.append((done, time.monotonic()))

    def close(self) -> None:
        pass

    def last_words(self, line: bytes) -> None:
        pass


def bench(config: Config, stop: StopRequest, *, steps: int) -> dict[str, Any] | None:
    """What came of `steps` steps after the warm-up; None if a worker has failed, which has been said. Raises
    `ConfigError` as `train` does."""
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as folder:
        stop.on_exit = lambda _stopped, _code: shutil.rmtree(folder, ignore_errors=True)
        config = _cut_short(config, Path(folder), steps=WARM_UP_STEPS + steps)
        console = BenchConsole()
        reporter = Reporter(RunIdentity(directory=Path(folder), run_id="bench"), console=console)
        reporter.open()
        before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        began, compiled_before = time.monotonic(), compile_plan.watch.compiles
        try:
            training = prepare(config, reporter, stop)
            ready_s, compiled = time.monotonic() - began, compile_plan.watch.compiles
            training.timer.on, training.saves.off = True, True
            training.tally.warm_up_steps = WARM_UP_STEPS
            stop.training = True
            reporter.phase("train")
            ending = training.run()
            late = compile_plan.watch.compiles - compiled
        finally:
            reporter.ended(code=0, stopped=False)
        if ending.code:
            return None
        for device in training.tally.peaks.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return {
            **_rates(training, console, steps=steps),
            "ready_s": round(ready_s, 2),
            "memory": _memory(training, before_bytes),
            "compiles": {"warm_up": compiled - compiled_before, "after": late},
            "torch": torch.__version__,
        }


def _cut_short(config: Config, folder: Path, *, steps: int) -> Config:
    directory = kept.run_directory(config, os.environ)
    caches = {
        "compile_cache": kept.compile_cache(config, directory, os.environ),
        "data": config.data.model_copy(update={"cache": str(kept.token_cache(config.data, directory, os.environ))}),
    }  # fmt: skip
    return config.model_copy(update={
        **caches, "steps": steps, "output_dir": str(folder), "checkpoint_every": steps, "log_every": 1,
        "resume": "never", "evaluate_every": None, "tracking": TrackingConfig(tensorboard=False),
    })  # fmt: skip


def _rates(training: Training, console: BenchConsole, *, steps: int) -> dict[str, Any]:
    counted = console.steps[WARM_UP_STEPS:]
    times = [at for _, at in console.steps[WARM_UP_STEPS - 1 :]]
    stages = training.timer.seconds(after_step=WARM_UP_STEPS)
    stages["step"] = [other - one for one, other in itertools.pairwise(times)]
    shares = {
        worker.name: {share: round(statistics.fmean(_share(done, worker.name, share) for done, _ in counted), 4)
                      for share in SHARES}
        for worker in (counted[-1][0].workers if counted else [])
    }  # fmt: skip
    last = counted[-1][0] if counted else None
    return {
        "steps": len(counted),
        "wanted_steps": steps,
        "warm_up_steps": WARM_UP_STEPS,
        "devices": {str(device): _named(device) for device in training.tally.peaks.devices},
        "stages": {name: _spread(stages[name]) for name in STAGES if stages.get(name)},
        "workers": shares,
        "tok_s": last and round(last.tok_s, 1),
        "positions_s": last and round(last.positions_s, 1),
        "mfu": last and last.mfu,
        "tflop_s": last and round(_flop_s(training) / 1e12, 4),
        # As `RunStep.bottleneck` has it, over all that was measured.
        "bottleneck": min(waits(shares), key=waits(shares).__getitem__) if shares else None,
    }


def _share(done: RunStep, worker: str, share: str) -> float:
    return next(float(getattr(one, share)) for one in done.workers if one.name == worker)


def _flop_s(training: Training) -> float:
    return sum(rate.flop for rate in training.tally.throughput.rates())


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return {"median_ms": round(1e3 * median, 3), "low_ms": round(1e3 * low, 3), "high_ms": round(1e3 * high, 3)}


def waits(shares: dict[str, dict[str, float]]) -> dict[str, float]:
    """By stage: the share of the time in which its workers wait for another stage."""
    found: dict[str, list[float]] = {}
    for name, share in shares.items():
        found.setdefault(name.rpartition("-")[0], []).append(share["wait_input"] + share["wait_room"])
    return {stage: statistics.fmean(each) for stage, each in found.items()}


def _memory(training: Training, before_bytes: int) -> dict[str, dict[str, int]]:
    """Planned and measured, by device; of the CPU, what the process has grown by."""
    config, target = training.config, next(iter(training.targets.values()))
    member = next(iter(training.members.values()))
    path = expand_path(config.target.path, key="target.path")
    planned = forecast.memory(
        config, target.model.config, member.drafter.shape, layer_ids=target.layer_ids,
        parameters=inputs.parameter_count(path),
    )  # fmt: skip
    measured = memory_peak_bytes(training.tally.peaks.devices)
    return {
        name: {"planned_bytes": planned[name].peak, "measured_bytes": size - (before_bytes if name == "cpu" else 0)}
        for name, size in measured.items()
    }


def sentence(found: dict[str, Any]) -> str:
    """What holds the run up, and how much the others have to wait for it."""
    stage = found["bottleneck"]
    if stage is None:
        return f"stopped within the {found['warm_up_steps']} steps of warm-up, so that nothing was measured"
    others = [f"the {name} waits {part:.0%}" for name, part in waits(found["workers"]).items() if name != stage]
    return f"The {stage} is the bottleneck: {', '.join(others)} of the time."


def table(found: dict[str, Any]) -> Any:
    """The same for people, as a table of rich's."""
    from rich import box
    from rich.table import Table

    whole_ms = found["stages"]["step"]["median_ms"]
    devices = ", ".join(f"{name} ({what})" for name, what in found["devices"].items())
    shown = Table(
        title=f"{found['steps']} steps after {found['warm_up_steps']} of warm-up; {devices}; torch {found['torch']}",
        caption=sentence(found), box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left", title_style="bold",
        caption_style="bold",
    )  # fmt: skip
    for column in ("a step's", "median", "quartiles", "of a step"):
        shown.add_column(column, justify="left" if column == "a step's" else "right", no_wrap=True)
    for name, spread in found["stages"].items():
        low, median, high = (f"{spread[key]:,.2f}" for key in ("low_ms", "median_ms", "high_ms"))
        shown.add_row(
            name if name != "step" else "all of it", f"{median} ms", f"{low} - {high}",
            f"{spread['median_ms'] / whole_ms:.0%}", end_section=name == "step",
        )  # fmt: skip
    for name, share in found["workers"].items():
        waited = ", ".join(f"{key.removeprefix('wait_')} {share[key]:.0%}" for key in SHARES[1:])
        shown.add_row(name, f"busy {share['busy']:.0%}", f"waits for {waited}", "")
    shown.add_section()
    mfu, speed = "unknown", f"{found['tflop_s']:,.3g} TFLOP/s"
    if found["mfu"] is None:
        speed += "; set peak_tflops"
    else:
        mfu = f"{found['mfu']:.1%}"
    shown.add_row("tok/s", f"{found['tok_s']:,.0f}", "", "")
    shown.add_row("positions/s", f"{found['positions_s']:,.0f}", "supervised slots", "")
    shown.add_row("MFU", mfu, speed, "", end_section=True)
    for name, sizes in found["memory"].items():
        planned, measured = (f"{sizes[key] / GIB:,.2f} GiB" for key in ("planned_bytes", "measured_bytes"))
        shown.add_row(f"memory of {name}", measured, f"planned {planned}", "")
    compiles = found["compiles"]
    shown.add_row("compiled", f"{compiles['warm_up']}", f"{compiles['after']} after the warm-up", "")
    return shown
