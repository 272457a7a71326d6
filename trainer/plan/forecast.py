"""`python -m trainer plan`: what a run would compile, and how much memory it would take on each device.

Nothing is loaded, compiled or trained, and no GPU is needed: sizes come from the target's files, and what a step takes
from going through one without any content (`work.py`), all workers at their worst at once. On the CPU that is
what is measured (`python -m trainer doctor` does), to the byte. On CUDA the allocator's own losses and the CUDA context
(about half a GiB) come on top, and what `evaluate_every` keeps for its prompts. Of several buckets the longest has the
most of everything, and so the peak. What torch's engines need in each of their processes is `engines.py`'s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer import inputs
from trainer.config import Config, ConfigError, Devices, expand_path
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.loss import chunks
from trainer.model.target import arithmetic_dtype, drafter_dtype, shape_for
from trainer.optim import FlatWeights
from trainer.plan import engines
from trainer.plan.engines import ENGINES
from trainer.plan.work import batch_bytes, drafter_work, exchange_room, micro_batch, target_work

GIB = 1 << 30
WORKSPACE_BYTES = 32 << 20
"""Of the matrix products' library on CUDA, for each thread that uses a stream, and a drafter's backward runs in one of
autograd's; that much since Hopper, 8 MiB before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A function that is compiled for one device and shape; it has this one form."""

    device: str
    kind: str
    shape: str
    mode: str = "train"
    """Evaluation compiles nothing (`decode/in_training.py`)."""
    passes: str = "forward, backward"


@dataclass(slots=True)
class Memory:
    """Bytes on one device, by what they are for."""

    target: int = 0
    frozen_ends: int = 0
    drafters: int = 0
    queues: int = 0
    work: int = 0
    """While a step goes on, of all drafters and targets there at once."""

    @property
    def peak(self) -> int:
        return self.target + self.frozen_ends + self.drafters + self.queues + self.work


def forms(config: Config, device: torch.device) -> Iterator[Form]:
    """What the drafters of a device have compiled, bucket by bucket, in the order in which a step meets it."""
    if device.type == "cpu" and config.compile_on_cpu == "off":
        return
    drafter, rows, name = config.drafter, config.batch_size // len(config.devices.drafter), str(device)
    for length in config.data.lengths:
        anchors = config.anchors_at(length)
        slots = anchors * drafter.block_size
        layer = f"{rows} x {slots} slots, {length}+{slots} keys"
        if device.type == "cuda":
            yield Form(device=name, kind="make_mask", shape=layer, passes="forward")
        yield Form(device=name, kind="first_layer", shape=layer)
        if drafter.layers > 1:
            yield Form(device=name, kind="layer", shape=layer)
        size, last = chunks(rows * anchors * (drafter.block_size - 1), config.loss.chunk_rows)
        # Two buckets may have as many anchors, and yet each has functions of its own.
        of = f" of {length} tokens" if len(config.data.lengths) > 1 else ""
        if config.loss.kernel == "liger":
            continue  # that one is Triton's, and made for any number of rows
        passes = "forward, backward" if config.loss.kernel == "chunked" else "forward"
        yield Form(device=name, kind="chunk_loss", shape=f"{size} rows{of}", passes=passes)
        if last:
            yield Form(device=name, kind="last_chunk_loss", shape=f"{last} rows{of}", passes=passes)


def memory(config: Config, model: Any, shape: DrafterShape, *, layer_ids: list[int], parameters: int
           ) -> dict[str, Memory]:  # fmt: skip
    """By device. `model` is the target's configuration, `parameters` the size of its weights."""
    of = functools.partial(_of_process, model=model, shape=shape, layer_ids=layer_ids, parameters=parameters)
    if config.engine not in ENGINES:
        return of(config, processes=1)
    names, found = config.devices.drafter, dict[str, Memory]()
    for name in names:  # a process of its own for each, with a target
        alone = {"devices": Devices(target=[name], drafter=[name]), "batch_size": config.batch_size // len(names)}
        here, own = found.setdefault(name, Memory()), of(config.model_copy(update=alone), processes=len(names))[name]
        for field in dataclasses.fields(Memory):
            setattr(here, field.name, getattr(here, field.name) + getattr(own, field.name))
    return found


def _of_process(config: Config, *, model: Any, shape: DrafterShape, layer_ids: list[int], parameters: int,
                processes: int) -> dict[str, Memory]:  # fmt: skip
    text = model.get_text_config()
    found: dict[str, Memory] = {}
    together = config.engine in ENGINES
    share = config.batch_size // len(config.devices.drafter)
    # The longest bucket has the most of everything.
    length = config.data.sequence_length
    targets: dict[str, torch.dtype] = {}
    for name in config.devices.target:
        dtype = arithmetic_dtype(config.target.dtype, torch.device(name))
        here = found.setdefault(name, Memory())
        if name not in targets:
            here.target = parameters * dtype.itemsize
        targets[name] = dtype
        here.work += _target_work(config, model, layer_ids, dtype, share, length) + _workspaces(name, threads=1)
    features_dtype = targets[config.devices.target[0]]
    features_BSF, blocks = micro_batch(shape, config, dtype=features_dtype, rows=share, length=length)
    ends_there: set[str] = set()
    drafter = Drafter.without_content(shape)
    for name in config.devices.drafter:
        device, here = torch.device(name), found.setdefault(name, Memory())
        dtype = drafter_dtype(config.drafter.dtype, device)
        if name not in ends_there and targets.get(name) != dtype:
            tied = getattr(text, "tie_word_embeddings", False)
            here.frozen_ends += (1 if tied else 2) * text.vocab_size * text.hidden_size * dtype.itemsize
        ends_there.add(name)
        if together:
            here.drafters += engines.held(drafter, config, processes=processes)
        else:
            # Weights, gradients, two moments and a moving average in float32, and what the module computes with.
            flat = FlatWeights(drafter)
            average = 0 if config.optimizer.ema is None else 1
            copy = 0 if dtype == torch.float32 else dtype.itemsize
            here.drafters += flat.exchanged.nbytes + len(flat.weights) * (4 * (3 + average) + copy)
        # Those that wait, and the one that is worked on.
        here.queues += (config.queue_depth + 1) * batch_bytes(features_BSF, blocks)
        if device.type == "cuda" and config.cuda_graphs != "off":
            # Each graph has inputs of its own, and the target's, of which there is one a shape, what it makes. Torch's
            # engines launch the drafter's step themselves.
            here.queues += (1 if together else 2) * sum(config.data.lengths) * features_BSF.nbytes // length
        here.work += drafter_work(
            shape, config, device, vocabulary=text.vocab_size, dtype=dtype, features_dtype=features_dtype, rows=share,
            length=length,
        ) + _workspaces(name, threads=2)  # fmt: skip
    for name in {} if together else dict.fromkeys(config.devices.drafter):
        found[name].work += exchange_room(shape, config)
    return found


def _workspaces(device: str, *, threads: int) -> int:
    return threads * WORKSPACE_BYTES if torch.device(device).type == "cuda" else 0


def _target_work(config: Config, model: Any, layer_ids: list[int], dtype: torch.dtype, rows: int, length: int) -> int:
    try:
        return target_work(
            model, layer_ids=layer_ids, dtype=dtype, rows=rows, length=length, packing=config.data.packing
        )  # fmt: skip
    except Exception:  # a model's code is its own; one that looks into its tensors cannot run without any
        text, tokens = model.get_text_config(), rows * length
        widest = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        # The widest layer's, and the captured ones, first apart and then side by side; and who sees whom.
        pairs = tokens * length * (3 + dtype.itemsize) if config.data.packing else 0
        return pairs + tokens * (3 * widest + (4 + 2 * len(layer_ids)) * text.hidden_size) * dtype.itemsize


def forecast(config: Config) -> str:
    """The whole answer, as a text. Raises `ConfigError` for a target whose sizes cannot be told."""
    from transformers import AutoConfig

    gpus = torch.cuda.device_count()
    devices = config.devices.on(gpus, batch_size=config.batch_size)
    if config.engine in ENGINES:
        devices = devices.model_copy(update={"target": list(dict.fromkeys(devices.drafter))})
    config = config.model_copy(update={"devices": devices})
    path = expand_path(config.target.path, key="target.path")
    try:
        model = AutoConfig.from_pretrained(path, local_files_only=True)
        layer_ids = inputs.choose_layers(
            config.target.layer_ids, config.target.captured_layers, count=model.get_text_config().num_hidden_layers
        )
    except inputs.LayerError as error:
        raise ConfigError(f"{error.key}: {error}") from None
    except Exception as error:  # whatever it makes of a file that is not what it expects
        raise ConfigError(f"target.path: cannot read the sizes of {path}: {' '.join(str(error).split())}") from error
    shape = shape_for(model, config.drafter, captured=len(layer_ids))
    lines = [f"target threads: {', '.join(devices.target)}; drafters: {', '.join(devices.drafter)}"]
    if config.engine in ENGINES:
        several = f"{len(devices.drafter)} processes, each with a target and a drafter on its device"
        lines.append(f"engine: {config.engine}, {several}")
    if absent := devices.absent(gpus):
        lines.append(f"not on this machine: {', '.join(absent)} (planned all the same)")
    compiled = [form for name in dict.fromkeys(devices.drafter) for form in forms(config, torch.device(name))]
    lines += ["", f"compiled before the first step, and nothing after it ({len(compiled)} functions of one form each):"]
    if compiled:
        lines += table(
            ["device", "kind", "shape", "mode", "passes"],
            [[form.device, form.kind, form.shape, form.mode, form.passes] for form in compiled],
        )  # fmt: skip
    else:
        lines.append("  nothing: the CPU runs everything as it is written")
    recorded = [name for name in dict.fromkeys(devices.target) if name != "cpu" and config.cuda_graphs != "off"]
    if recorded and config.target.compile != "off":
        rows, lengths = config.batch_size // len(config.devices.drafter), ", ".join(map(str, config.data.lengths))
        lines.append(
            f"  and the target's layer, for the graph of its forward alone: {rows} rows of {lengths} tokens on"
            f" {', '.join(recorded)}"
        )
    lines += ["", "memory at the peak, predicted (GiB):"]
    parameters = inputs.parameter_count(path)
    rows = [
        [name, *(f"{value / GIB:.2f}" for value in (
            one.target, one.frozen_ends, one.drafters, one.queues, one.work, one.peak))]
        for name, one in memory(config, model, shape, layer_ids=layer_ids, parameters=parameters).items()
    ]  # fmt: skip
    lines += table(["device", "target", "frozen ends", "drafters", "queues", "a step's work", "peak"], rows)
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)]  # fmt: skip
