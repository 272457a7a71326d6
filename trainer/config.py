"""What a run is asked to do, as a type; `load_config` reads it from YAML in which nothing is guessed.

Every other module takes the part of `Config` it needs (`sections.py`). Paths may hold `~` and `$VARS`; a relative path
is relative to the working directory. Sizes that are left out are taken from the target model.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

import typedyaml
from trainer import inputs
from trainer.data import source_files
from trainer.sections import (
    Count,
    CpuThreads,
    DataConfig,
    Devices,
    DrafterConfig,
    EvaluationConfig,
    Index,
    LossConfig,
    OptimizerConfig,
    Size,
    TargetConfig,
    TrackingConfig,
    WatchdogConfig,
)
from typedyaml import Float, Model, ProblemAt, Str


class ConfigError(Exception):
    """One line for a person: what is wrong, where, and what to do. The process ends with exit code 2."""


class Config(Model):
    steps: Count
    """Optimizer steps of the whole run, resumes included."""
    batch_size: Size
    """Sequences per optimizer step, over all replicas."""
    seed: Index = 0
    """Of everything that is drawn: first weights, the order of the data, anchors."""
    output_dir: Str = "runs/trainer"
    """Where records and checkpoints go when specctl gives no run directory."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the latest whole checkpoint of this run, if there is one. never: refuse to start where there is
    one; `--resume` on the command line goes on all the same."""
    checkpoint_every: Count = 500
    """Steps between two checkpoints; the last step, and one that a signal ends the run with, has its own."""
    keep_checkpoints: Count = 3
    """Only the latest so many of this run stay. The disk has to have room for one more: the oldest goes when a new one
    is there."""
    log_every: Count = 1
    """Steps between two that are printed and recorded; those with a checkpoint are besides."""
    evaluate_every: Count | None = None
    """Steps between two evaluations, in which the drafter's own target decodes some prompts with it while the training
    waits: the acceptance length tau stands in the step line, the records and the trackers of such a step. Left out:
    none."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """What is decoded then."""
    sync: Literal["grads", "params"] = "grads"
    """grads: the replicas add up their gradients in every step, which makes one step of all. params: each steps on its
    own share, and every `sync_every` steps weights and moments are averaged."""
    sync_every: Count = 1
    """Steps between two averagings of `sync: params`; a checkpoint brings one forward. A run that is told to stop goes
    on to the next one, so that it can be resumed to the bit."""
    replica_check_every: Count = 20
    """Steps between two proofs that all replicas hold the same weights (with `sync: params`, from the next averaging
    on); one precedes every checkpoint besides."""
    on_worker_death: Literal["stop", "degrade"] = "stop"
    """degrade: when a drafter or a target thread fails, the others go on, and do its share too."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite, the step changes nothing, on no replica. stop: the run then ends, and says
    in which worker and layer, and of which samples. skip: it goes on with the next step, until that has happened more
    often than `max_skipped`."""
    max_skipped: Count = 10
    """Steps that `on_nonfinite: skip` may skip in all of a run, resumes included."""
    watchdog: WatchdogConfig = WatchdogConfig()
    tracking: TrackingConfig = TrackingConfig()
    """Who is told of the run's figures besides metrics.jsonl."""
    peak_tflops: Annotated[Float, Field(ge=1e-6, le=1e9)] | None = None
    """What each device can do at most in a second, 10^12 floating-point operations, for the MFU. Left out: what the
    maker says of the card; of one that nobody knows, and of a CPU, there is no MFU."""
    queue_depth: Count = 2
    """Micro-batches that may wait in front of each drafter, and pieces of work in front of each target thread."""
    engine: Literal["auto", "threads", "ddp", "fsdp2"] = "auto"
    """What keeps several drafters in step. threads: one process, whose threads add up their gradients. Under torchrun,
    which starts a process for each device: ddp, every process holds all weights; fsdp2, each holds a shard of weights,
    gradients and optimizer. auto: threads in one process, ddp under torchrun."""
    devices: Devices
    compile_on_cpu: Literal["off", "aot_eager"] = "off"
    """aot_eager: trace on the CPU what is compiled on CUDA, under the same rules; slower, to try those rules out."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Whether what a GPU does in a step is recorded beforehand and launched as a whole, which for small models is many
    times faster and takes some memory. auto: where it can be done; where it cannot, the log says so. on: or the run
    does not start."""
    compile_cache: Str | None = None
    """Folder of compiled code, by which the next start is warm in a fraction of the time. Left out: what
    TORCHINDUCTOR_CACHE_DIR says; else `compile-cache` in specctl's workdir, or beside `output_dir`."""
    cpu_threads: CpuThreads = CpuThreads()
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig
    requirements: list[Str] | None = None
    """Read by specctl, not by the trainer: what the run's environment is made from."""
    patterns: dict[Str, Str] = Field(default_factory=dict)
    """Read by specctl, not by the trainer."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        if self.sync == "grads" and self.sync_every > 1:
            raise ProblemAt(("sync_every",), "belongs to sync: params; gradients are added up in every step")
        replicas = len(self.devices.drafter)
        if self.batch_size % replicas:
            raise ProblemAt(("batch_size",), f"must be a multiple of the {replicas} drafters, is {self.batch_size}")
        if self.drafter.block_size > self.data.lengths[0]:
            shortest = f"the shortest of data.buckets, {self.data.lengths[0]}"
            limit = shortest if self.data.buckets else "data.sequence_length"
            raise ProblemAt(("drafter", "block_size"), f"must not exceed {limit}")
        if self.drafter.anchors > self.data.sequence_length - 1:
            raise ProblemAt(("drafter", "anchors"), "must be less than data.sequence_length")
        return self

    @property
    def max_refused(self) -> int:
        """Steps that may change nothing before the run ends."""
        return self.max_skipped if self.on_nonfinite == "skip" else 0

    def anchors_at(self, length: int) -> int:
        """Of rows of this length: a bucket may be too short for `drafter.anchors` different ones."""
        return min(self.drafter.anchors, length - 1)

    def what_must_be_there(self) -> dict[str, Any]:
        """Each path that is read, by its key, what the model has to have, the devices, and the extras.
        `output_dir` is made."""
        files = {f"data.paths[{index}]": path for index, path in enumerate(self.data.paths)}
        files |= {f"evaluation.paths[{index}]": path for index, path in enumerate(self.evaluation.paths)}
        wanted = {
            "mask_token_id": self.drafter.mask_token_id, "layer_ids": self.target.layer_ids,
            "captured_layers": self.target.captured_layers, "data_kind": self.data.kind,
        }  # fmt: skip
        start = self.drafter.start_from
        return {
            "model": {"target.path": self.target.path}, "files": files,
            "drafter": {} if start is None else {"drafter.start_from": start},
            "wanted": wanted, "devices": self.devices.named(), "extras": self._extras(),
        }  # fmt: skip

    def _extras(self) -> list[str]:
        """The extras of this package that the run needs besides `trainer`."""
        needed = {
            "data": any(map(source_files.may_need_pyarrow, [*self.data.paths, *self.evaluation.paths])),
            "wandb": self.tracking.wandb is not None, "trackio": self.tracking.trackio is not None,
            "liger": self.loss.kernel == "liger",
        }  # fmt: skip
        return [name for name, wanted in needed.items() if wanted]

    def what_a_resume_must_keep(self) -> dict[str, Any]:
        """What decides which blocks and weights a step works on. Rows and target are known by their content instead of
        by their paths."""
        free = {"path", "dtype", "chunk_rows", "kernel", "start_from", "compile"}
        free |= {"paths", "text_field", "duplicates", "max_bad_fraction", "cache"}
        kept = {key: getattr(self, key).model_dump(exclude=free) for key in ("target", "data", "drafter", "loss")}
        # What changes nothing is not there, as in what was written before there was any of it.
        if len(self.data.lengths) == 1:
            del kept["data"]["buckets"]
        if not self.data.packing:
            del kept["data"]["packing"]
        return {"seed": self.seed, "batch_size": self.batch_size, **kept}


def load_config(path: str) -> Config:
    """Raises `ConfigError` with file, line and key."""
    try:
        return typedyaml.load(path, Config)
    except typedyaml.TypedYamlError as error:
        raise ConfigError(str(error)) from error


def check_inputs(config: Config, *, weights: bool = True, starts: bool = True) -> None:
    """Raises `ConfigError` for all that a run reads and that is not there, or is not what it should be, at once. The
    model's weights may be left out, where only its tokenizer is needed, and `drafter.start_from`, where the run goes on
    from a checkpoint of its own."""
    asked = config.what_must_be_there()
    if not (weights and starts):
        asked["drafter"] = {}
    for kind in inputs.KINDS:
        asked[kind] = {key: expand_path(text, key=key) for key, text in asked[kind].items()}
    found = list(inputs.problems(asked, weights=weights))
    if not found and importlib.util.find_spec("pyarrow") is None:
        found = [
            (key, f"{source.path} cannot be read without pyarrow: pip install pyarrow")
            for key, path in asked["files"].items()
            for source in source_files.resolve(path, config.data.kind) if source.needs_pyarrow
        ][:1]  # fmt: skip
    if found:
        raise ConfigError("; ".join(f"{key}: {problem}" for key, problem in found))


def expand_path(text: str, *, key: str) -> Path:
    """`text` with `~` and `$VARS` filled in; a variable that is not set is a `ConfigError`, never a literal `$`."""
    expanded = os.path.expandvars(text)
    if left := re.search(r"\$\{?\w+\}?", expanded):
        raise ConfigError(f"{key}: {left.group()} is not set in the environment (in {text!r})")
    if not expanded or "\0" in expanded:
        raise ConfigError(f"{key}: {text!r} is no path" + ("" if expanded else ": it is empty"))
    return Path(expanded).expanduser()
