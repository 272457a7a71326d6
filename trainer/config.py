"""What a run is asked to do, as types; `load_config` reads it from YAML in which nothing is guessed.

Every other module takes the part of `Config` it needs. Paths may hold `~` and `$VARS`; a relative path is relative to
the working directory. Sizes that are left out are taken from the target model.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

import typedyaml
from trainer import inputs
from trainer.data import source_files
from typedyaml import Abbreviated, Bool, Float, Int, Model, ProblemAt, Str

Count = Annotated[Int, Field(ge=1)]
Size = Annotated[Int, Field(ge=1, le=1_000_000)]
"""Of something that is held in memory, or made one by one."""
Threads = Annotated[Int, Field(ge=1, le=1000)]
"""Many more, and the C library ends the process."""
Index = Annotated[Int, Field(ge=0)]
Positive = Annotated[Float, Field(gt=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
Momentum = Annotated[Float, Field(ge=0, lt=1)]
Length = Annotated[Int, Field(ge=8, le=10_000_000)]
Device = Annotated[Str, Field(pattern=r"^(auto|cpu|cuda:[0-9]+)$")]
Dtype = Literal["auto", "float32", "bfloat16"]

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 100.0
"""Of sampling, where it is not greedy: beyond, the probabilities of float32 logits are none."""
BLOCK_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}
"""The published gamma of each block size; other sizes take half the block."""


class ConfigError(Exception):
    """One line for a person: what is wrong, where, and what to do. The process ends with exit code 2."""


class Devices(Abbreviated):
    shorthands: ClassVar[dict[str, Any]] = {"auto": {"target": ["auto"], "drafter": ["auto"]}}

    target: Annotated[list[Device], Field(min_length=1)]
    """One target thread each; a device may be named several times, and holds the model once. `auto`, alone: one for
    each GPU of the machine, or the CPU."""
    drafter: Annotated[list[Device], Field(min_length=1)]
    """One replica and one thread each; a device may be named several times. `auto`, alone: one for each GPU of the
    machine, as many as `batch_size` can be divided by, or one on the CPU."""

    @model_validator(mode="after")
    def _auto_is_alone(self) -> Devices:
        for key, names in (("target", self.target), ("drafter", self.drafter)):
            if "auto" in names and len(names) > 1:
                raise ProblemAt((key,), "auto stands alone, for all that the machine has")
        return self

    def named(self) -> list[str]:
        """Those that the machine has to have."""
        return [name for name in (*self.target, *self.drafter) if name != "auto"]

    def absent(self, gpus: int) -> list[str]:
        """Those that a machine of so many GPUs does not have, each once."""
        names = dict.fromkeys(self.named())
        return [name for name in names if name != "cpu" and int(name.removeprefix("cuda:")) >= gpus]

    def on(self, gpus: int, *, batch_size: int) -> Devices:
        """With `auto` filled in for a machine of so many GPUs."""
        every = [f"cuda:{index}" for index in range(gpus)] or ["cpu"]
        drafters = max(count for count in range(1, len(every) + 1) if batch_size % count == 0)
        return Devices(
            target=every if self.target == ["auto"] else self.target,
            drafter=every[:drafters] if self.drafter == ["auto"] else self.drafter,
        )


class CpuThreads(Model):
    """Cores that one worker thread may use inside an operation; with more workers than cores, 1 is best."""

    target: Threads = 1
    """Of each target thread."""
    drafter: Threads = 1
    """Of each drafter thread."""


class TargetConfig(Model):
    path: Str
    """A local Hugging Face causal language model."""
    dtype: Dtype = "auto"
    """auto: bfloat16 where the device computes in it, else float32."""
    layer_ids: Annotated[list[Index], Field(min_length=1)] | None = None
    """Layers whose outputs are captured (0-based); left out, `captured_layers` of them evenly spread."""
    compile: Literal["auto", "off"] = "auto"
    """auto: where its forward is recorded as a CUDA graph, its layers are compiled for that, which leaves out most of
    what is no matrix product; features then differ by rounding from those of other ways to run it. off: they are
    recorded as transformers runs them."""
    captured_layers: Count = 5
    """How many, where `layer_ids` does not say which: from the second layer to the third from the end."""


class DataConfig(Model):
    kind: Literal["conversations", "text", "python-docs"]
    """What a row means. conversations: `messages` of role and content, or ShareGPT's `conversations`, in the target's
    chat template, trained on what the assistant says; text: all of it is trained on; python-docs: a text that needs no
    file at all."""
    paths: list[Str] = Field(default_factory=list)
    """Files; globs; folders, for all files in them; folders that `datasets.save_to_disk` wrote. What a file is follows
    from its name: .jsonl, .json (an array or lines), .parquet, and .txt or any other for plain text; the JSON and text
    ones also with .gz or .zst behind. Parquet, data sets and .zst need
    `pip install pyarrow`."""
    text_field: Str = "text"
    """Of kind text: where a line of JSONL, or a row of a table, has its text."""
    sequence_length: Length
    """Of a row at most; what is longer is cut."""
    buckets: Annotated[list[Length], Field(min_length=1)] | None = None
    """Lengths to which rows are padded, rising to `sequence_length`: each row to the shortest one that it fits, and all
    rows of a step to the same. Every bucket is compiled for itself. Left out: all rows to `sequence_length`."""
    packing: Bool = False
    """Put several documents into a row, as many as have room. Each is trained on as if it were alone: nothing sees
    across, and positions begin anew."""
    duplicates: Literal["keep", "drop"] = "keep"
    """drop: of documents that are the same to the token, all but the first. They are counted either way."""
    max_bad_fraction: Fraction = 0.05
    """A share of the records, from 0 to 1. A run does not start when more of them than this are bad: cannot be read, or
    leave nothing to train on within `sequence_length`."""
    cache: Str | None = None
    """Folder of tokenised data, by which the next start does not tokenise again. An entry belongs to the content of the
    files and to the tokenizer; none is ever removed, and any may be. Left out: `token-cache` in specctl's workdir, or
    beside `output_dir`."""

    @property
    def lengths(self) -> list[int]:
        """Of the buckets, rising."""
        return self.buckets or [self.sequence_length]

    @model_validator(mode="after")
    def _buckets_rise_to_the_end(self) -> DataConfig:
        if any(one >= other for one, other in itertools.pairwise(self.lengths)):
            raise ProblemAt(("buckets",), f"must rise, is {self.lengths}")
        if self.lengths[-1] != self.sequence_length:
            raise ProblemAt(
                ("buckets",), f"must end with sequence_length, which is {self.sequence_length}; is {self.lengths}"
            )
        return self

    @model_validator(mode="after")
    def _paths_fit_kind(self) -> DataConfig:
        if self.kind == "python-docs" and self.paths:
            raise ProblemAt(("paths",), "python-docs reads the standard library; leave paths out")
        if self.kind != "python-docs" and not self.paths:
            raise ProblemAt(("paths",), f"{self.kind} needs at least one file")
        return self


class EvaluationConfig(Model):
    """Decoding with the drafter in the midst of its training; see `evaluate_every`."""

    paths: list[Str] = Field(default_factory=list)
    """Held-out data, of the same kind as the training's: prompts are what stands before an answer, or how a text
    begins. Left out, the beginning of what is trained on, of which a drafter knows more than it will of other texts."""
    prompts: Size = 8
    """That are decoded side by side; their memory is taken for the whole run."""
    prompt_tokens: Size = 256
    """Of a prompt at most; longer ones are left out."""
    max_tokens: Size = 64
    """Written behind each."""


class DrafterConfig(Model):
    layers: Annotated[Int, Field(ge=1, le=1000)]
    """Of the drafter; its hidden size is the target's."""
    block_size: Annotated[Int, Field(ge=2)]
    """Slots of a block: the anchor's token and those that are drafted at once behind it."""
    anchors: Count
    """Blocks per sequence and step, always this many: rows that cannot fill them are padded, so shapes stay static. A
    bucket that is too short for them has one less than its length."""
    mask_token_id: Index
    """A spare row of the target's embedding; never the pad token, never a token of the data."""
    dtype: Dtype = "auto"
    """Of the arithmetic; weights and optimizer are always float32."""
    heads: Size | None = None
    """Of attention, in each layer. Left out, as many as the target has."""
    kv_heads: Size | None = None
    """Heads of keys and values, each shared by equally many `heads`. Left out, as many as the target has, or as `heads`
    if that is given."""
    head_dim: Size | None = None
    """Size of a head. Left out, the target's."""
    intermediate_size: Size | None = None
    """Of the MLP of each layer. Left out, the target's."""
    start_from: Str | None = None
    """Begin with the weights of a drafter that is there, instead of fresh ones: the directory of a run or of one of its
    checkpoints (of either the moving average, if one is kept), of an export, or of a drafter in z-lab's format. The
    optimizer begins anew. A run that is resumed goes on from its own checkpoint, and does not look there."""

    @model_validator(mode="before")
    @classmethod
    def _moved(cls, value: Any) -> Any:
        for old, new in (("loss_decay", "loss.decay"), ("head_chunk_rows", "loss.chunk_rows")):
            if isinstance(value, dict) and old in value:
                raise ProblemAt((old,), f"is {new} now")
        return value


class LossConfig(Model):
    kernel: Literal["auto", "chunked", "fused", "liger"] = "auto"
    """How the cross entropy over the vocabulary is computed, which never has all logits at once. fused: each chunk of
    logits once, its gradient with it. chunked: a second time in the backward, which is slower and keeps a little less.
    liger: as fused, by the Triton kernel of the package liger-kernel, on GPUs only. auto: fused."""
    chunk_rows: Count = 2048
    """Rows of logits that exist at once, one for each supervised slot; they take `chunk_rows` x vocabulary x 4 to 12
    bytes."""
    weights: Literal["exponential", "d-pace"] = "exponential"
    """What a slot counts, as a slot is only of use if all before it were right. exponential: exp(-(k-1) / `decay`) for
    slot k. d-pace: as much as the drafter, by its own probabilities in this very block, is expected to keep from that
    slot on (see `loss.pace_weights`)."""
    decay: Annotated[Float, Field(ge=0.01)] | None = None
    """Of exponential weights, in slots. Left out, the published one of the block size: 7, 5 or 4 for blocks of 16, 10
    or 8, half the block for others."""
    alpha: Annotated[Float, Field(ge=0, lt=1)] | None = None
    """Of D-PACE: a slot's probability q of being right counts as (1 - alpha) q + alpha, so that a block that fails at
    once still teaches the slots behind. Left out, 0.5."""

    @model_validator(mode="after")
    def _fits_the_weights(self) -> LossConfig:
        for key, belongs in (("decay", "exponential"), ("alpha", "d-pace")):
            if getattr(self, key) is not None and self.weights != belongs:
                raise ProblemAt((key,), f"belongs to weights: {belongs}")
        return self

    def gamma(self, block_size: int) -> float:
        """Decay of the weights that are known beforehand. D-PACE's are not, where all slots begin alike."""
        if self.weights == "d-pace":
            return math.inf
        return self.decay or BLOCK_DECAY.get(block_size, block_size / 2)

    @property
    def pace_alpha(self) -> float | None:
        """None where weights are exponential."""
        if self.weights != "d-pace":
            return None
        return 0.5 if self.alpha is None else self.alpha


class OptimizerConfig(Model):
    lr: Annotated[Float, Field(gt=0, le=10)]
    """At its highest: what AdamW moves a weight by in a step, about."""
    warmup_fraction: Fraction = 0.04
    """Of all steps, in which the learning rate rises in a straight line; one step at least."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warm-up. cosine: half a cosine down to the last step. wsd: constant, and down within the last
    `decay_fraction` of the steps, before which a run can be made longer and lose nothing. constant: as it is."""
    final_lr_fraction: Fraction = 0.1
    """Of `lr`, in the last step; unless the schedule is constant."""
    decay_fraction: Annotated[Float, Field(gt=0, le=1)] | None = None
    """Of all steps, in which the learning rate of wsd falls. Left out, 0.2."""
    decay_shape: Literal["linear", "1-sqrt"] | None = None
    """How that of wsd falls: in a straight line, which is what is meant if it is left out, or as 1 - sqrt(share of the
    decay), which is quick at first."""
    weight_decay: Annotated[Float, Field(ge=0)] = 0.01
    """AdamW's, of matrices; norms do not decay. A step takes `lr` times this away of each weight,
    at most all of it."""
    beta1: Momentum = 0.9
    """AdamW's, of the mean of gradients."""
    beta2: Momentum = 0.95
    """AdamW's, of the mean of their squares."""
    clip_norm: Annotated[Float, Field(ge=1e-6)] = 1.0
    """Gradients of a larger norm, that of all weights together, are scaled down to it."""
    ema: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999, beside them: 4 bytes for each
    on the device, and `ema.safetensors` in every checkpoint, which is what to serve then. It is corrected for its
    beginning, so that it never holds anything of the random weights before step 1. Left out: none."""

    @property
    def decay_share(self) -> float:
        return self.decay_fraction or 0.2

    @model_validator(mode="after")
    def _decays_towards_zero(self) -> OptimizerConfig:
        if (share := self.lr * self.weight_decay) > 1:
            raise ProblemAt(("weight_decay",), f"times lr must be at most 1, all of a weight in a step; is {share:g}")
        return self

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> OptimizerConfig:
        for key in ("decay_fraction", "decay_shape"):
            if getattr(self, key) is not None and self.schedule != "wsd":
                raise ProblemAt((key,), "belongs to schedule: wsd")
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_share > 1 + 1e-9:
            raise ProblemAt(
                ("decay_fraction",), f"is {self.decay_share:g}, after a warmup_fraction of {self.warmup_fraction:g}:"
                " together at most 1"
            )  # fmt: skip
        return self


class WatchdogConfig(Model):
    action: Literal["stop", "report", "off"] = "stop"
    """When no step ends for too long: stop the run with an error, or report it and go on waiting. Either way the log
    then shows what every thread does."""
    least_s: Positive = 60.0
    """Seconds for which no step may end without a word."""
    factor: Positive = 20.0
    """Too long: longer than `least_s` and than so many median steps; ten times `least_s` for the first step, and five
    times as long for a checkpoint or an evaluation."""


class WandbConfig(Model):
    project: Str
    """The W&B project that the run belongs to; made if there is none."""
    entity: Str | None = None
    """A team; left out, the one that the key belongs to."""
    mode: Literal["online", "offline"] = "online"
    """online: WANDB_API_KEY has to be in the environment. offline: into `wandb` in the run's directory alone, to be
    sent later by `wandb sync`."""


class TrackioConfig(Model):
    project: Str
    """The trackio project that the run belongs to. It is kept in trackio's own folder, or where TRACKIO_DIR says;
    `trackio show` shows it."""


class TrackingConfig(Model):
    """Who is told of the run's figures besides metrics.jsonl. Everywhere the run has its own name, which is its run id,
    or without specctl the name of `output_dir`. None of them can hold up a step, nor end the run."""

    tensorboard: Bool = True
    """Event files in `tensorboard` in the run's directory."""
    wandb: WandbConfig | None = None
    """Weights & Biases; needs the extra `wandb`."""
    trackio: TrackioConfig | None = None
    """trackio; needs the extra `trackio`."""


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
