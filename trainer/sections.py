"""The sections of a configuration, as types: what each key takes, and what it means.

`config.py` puts them together; `python -m trainer schema` and the tables of docs/trainer.md are made of the words below
the keys.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

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
