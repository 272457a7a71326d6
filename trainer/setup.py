"""What a run needs before its first step: devices that exist, a report on the data, replicas.

Called by `train.train`, on the main thread.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import MutableMapping, Sequence

import torch

from trainer import kept
from trainer.config import Config, ConfigError
from trainer.data.rows import Rows, check_bad
from trainer.kernels import kernels_for
from trainer.model import liger
from trainer.model.blocks import generator_for
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.model.target import Target, drafter_dtype
from trainer.replica import Replica
from trainer.report.reporter import Reporter
from trainer.sections import DataConfig

BAD_ROWS_NAMED = 10
BAD_ROWS_RECORDED = 100


def on_this_machine(config: Config, reporter: Reporter) -> Config:
    """`config` with the devices that this machine has. Raises `ConfigError` for one that it does not have."""
    gpus = torch.cuda.device_count()
    if absent := config.devices.absent(gpus):
        raise ConfigError(f"devices: {absent[0]} is not here; torch sees {gpus} CUDA devices")
    devices = config.devices.on(gpus, batch_size=config.batch_size)
    if config.cuda_graphs == "on" and {*devices.target, *devices.drafter} == {"cpu"}:
        raise ConfigError("cuda_graphs: on needs a GPU, and all devices are the CPU; leave it out to train there")
    if config.loss.kernel == "liger":
        liger.check(devices.drafter)
    if devices != config.devices:
        reporter.say(f"devices: auto is target {', '.join(devices.target)}; drafter {', '.join(devices.drafter)}")
    return config.model_copy(update={"devices": devices})


def keep_compiled_code(config: Config, reporter: Reporter, environ: MutableMapping[str, str]) -> None:
    """Where it outlives the run: torch asks the environment for it whenever it compiles."""
    # float32 is trained in where it is asked for, and then wanted exactly.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    folder = environ["TORCHINDUCTOR_CACHE_DIR"] = kept.compile_cache(config, reporter.identity.directory, environ)
    reporter.say(f"compiled code is kept in {folder}")


def make_replicas(config: Config, targets: Sequence[Target], shape: DrafterShape) -> dict[int, Replica]:
    """One per drafter device, by rank, all with the same fresh weights; those of a device share its copy of the frozen
    ends, which is the target's own where one is there."""
    there = {target.device: target for target in reversed(targets)}
    ends: dict[torch.device, FrozenEnds] = {}
    fresh = Drafter.fresh(shape, generator_for(config.seed, "weights"))
    members = {}
    for rank, device in enumerate(map(torch.device, config.devices.drafter)):
        if device not in ends:
            dtype = drafter_dtype(config.drafter.dtype, device)
            ends[device] = there.get(device, targets[0]).ends.to(device, dtype)
        kernels = kernels_for(device, compile_on_cpu=config.compile_on_cpu, loss_kernel=config.loss.kernel)
        members[rank] = Replica(copy.deepcopy(fresh), ends[device], kernels, config, device)
    return members


def report_data(config: DataConfig, rows: Rows, reporter: Reporter) -> None:
    """What is trained on and what is not. Raises `ConfigError` where too much of the data is bad."""
    dropped = rows.dropped
    for bad in dropped.examples(BAD_ROWS_NAMED):
        reporter.say(f"data row skipped: {bad.where}: {bad.why}")
    if dropped.bad_count > BAD_ROWS_NAMED:
        reporter.say(f"data row skipped: and {dropped.bad_count - BAD_ROWS_NAMED} more")
    tokens, padded_R = int(rows.lengths_R.sum()), rows.order.padded_R
    counts = " ".join(f"{length}:{int((padded_R == length).sum())}" for length in config.lengths)
    documents = f" documents={len(rows.members)}" if config.packing else ""
    reporter.say(
        f"data rows={len(rows)}{documents} bad={dropped.bad_count} tokens={tokens} trained_on={rows.trained_tokens}"
        f" buckets {counts} padding={1 - tokens / int(padded_R.sum()):.1%}"
    )
    verb = "dropped" if config.duplicates == "drop" else "kept"
    told = {
        f"{dropped.duplicates} duplicates are {verb} (data.duplicates)": dropped.duplicates,
        f"{dropped.cut} conversations are longer than {config.sequence_length} tokens: {dropped.cut_tokens} are cut":
            dropped.cut,
        f"{dropped.context_only} assistant turns are not trained on: the chat template leaves their thinking out":
            dropped.context_only,
    }  # fmt: skip
    for line, count in told.items():
        if count:
            reporter.say(f"data: {line}")
    reporter.event(
        "data", rows=len(rows), records=dropped.records, bad=dropped.bad_count, bad_by_reason=dropped.bad,
        bad_rows=[f"{bad.where}: {bad.why}" for bad in dropped.first[:BAD_ROWS_RECORDED]], tokens=tokens,
        trained_on=rows.trained_tokens, duplicates=dropped.duplicates, cut=dropped.cut, cut_tokens=dropped.cut_tokens,
        context_only=dropped.context_only,
    )  # fmt: skip
    check_bad(dropped, config.max_bad_fraction)
