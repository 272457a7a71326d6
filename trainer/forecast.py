"""`python -m trainer plan`: what a run would compile, and how much memory it would take on each device.

Nothing is loaded, compiled or trained, and no GPU is needed: sizes come from the target's files, and a drafter's
activations from a forward and backward over tensors without content (torch's `meta` device), in which what autograd
would keep is added up. What is compiled keeps less than that, so the peak is an upper bound as far as activations go;
the allocator's own losses and the CUDA context (about half a GiB) come on top. Of several buckets the longest has the
most of everything, and so the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer import inputs
from trainer.blocks import Blocks
from trainer.config import Config, ConfigError, expand_path
from trainer.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.kernels import plain
from trainer.loss import PLAIN, block_loss, chunks
from trainer.target import arithmetic_dtype, drafter_dtype, shape_for

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A function that is compiled for one device and shape; it has this one form."""

    device: str
    kind: str
    shape: str
    mode: str = "train"
    """Evaluation compiles nothing: there is none yet."""
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


class _AttentionThatKeeps:
    """Keeps for the backward what FlexAttention does: its inputs, its output and a number for each query."""

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = torch.empty_like(query)
            ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            query, key, value, *_ = ctx.saved_tensors
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def mask(self, blocks: Blocks, context_length: int) -> None:
        return None

    def __call__(self, query_BHTD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: Any) -> Tensor:
        out: Tensor = self._Function.apply(query_BHTD, key_BGKD, value_BGKD)  # type: ignore[no-untyped-call]
        return out


def kept_bytes(shape: DrafterShape, config: Config, *, vocabulary: int, dtype: torch.dtype, rows: int, length: int
               ) -> int:  # fmt: skip
    """What autograd keeps of a drafter's forward over `rows` rows of `length` tokens, weights and inputs left out."""
    drafter, count = config.drafter, config.anchors_at(length)
    with torch.device("meta"):
        module = Drafter(shape)
        module.to(dtype)
        table = torch.empty(vocabulary, shape.hidden, dtype=dtype)
        features = torch.empty(rows, length, shape.captured * shape.hidden, dtype=dtype)
        anchors = torch.empty(rows, count, dtype=torch.long)
        slots = torch.empty(rows, count * drafter.block_size, dtype=torch.long)
        supervised = torch.empty(rows, count, drafter.block_size - 1)
        blocks = Blocks(
            anchors_BN=anchors, valid_BN=anchors.bool(), starts_BN=anchors, positions_BS=features[..., 0].long(),
            tokens_BT=slots, positions_BT=slots,
            labels_BNk=supervised.long(), weights_BNk=supervised,
        )  # fmt: skip
    given = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), table, features, *blocks.tensors())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    ends = FrozenEnds(embedding_VH=table, head_VH=table)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(features, blocks, ends, plain(_AttentionThatKeeps()))
        block_loss(
            out, blocks, table, weight_sum=1.0, chunk_rows=config.loss.chunk_rows,
            head_loss=PLAIN[config.loss.kernel != "chunked"], alpha=config.loss.pace_alpha,
        )  # fmt: skip
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in given)


def memory(config: Config, model: Any, shape: DrafterShape, *, parameters: int) -> dict[str, Memory]:
    """By device. `model` is the target's configuration, `parameters` the size of its weights."""
    text = model.get_text_config()
    found: dict[str, Memory] = {}
    share = config.batch_size // len(config.devices.drafter)
    # The longest bucket has the most of everything.
    length = config.data.sequence_length
    tokens = share * length
    widest = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    targets: dict[str, torch.dtype] = {}
    for name in config.devices.target:
        dtype = arithmetic_dtype(config.target.dtype, torch.device(name))
        here = found.setdefault(name, Memory())
        if name not in targets:
            here.target = parameters * dtype.itemsize
        targets[name] = dtype
        # The widest layer's, and the captured ones, first apart and then side by side.
        here.work += tokens * (3 * widest + (4 + 2 * shape.captured) * text.hidden_size) * dtype.itemsize
        if config.data.packing:
            # Who sees whom: a few bytes for each pair while it is put together, and a number where attention takes it.
            here.work += tokens * length * (3 + dtype.itemsize)
    ends_there: set[str] = set()
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in Drafter(shape).parameters())
    for name in config.devices.drafter:
        device, here = torch.device(name), found.setdefault(name, Memory())
        dtype = drafter_dtype(config.drafter.dtype, device)
        if name not in ends_there and targets.get(name) != dtype:
            tied = getattr(text, "tie_word_embeddings", False)
            here.frozen_ends += (1 if tied else 2) * text.vocab_size * text.hidden_size * dtype.itemsize
        ends_there.add(name)
        # Weights, gradients, two moments and a moving average in float32, and what the module computes with.
        copy = 0 if dtype == torch.float32 else dtype.itemsize
        average = 0 if config.optimizer.ema is None else 4
        here.drafters += weights * (16 + average + copy)
        first = targets[config.devices.target[0]]
        feature = shape.captured * text.hidden_size * first.itemsize
        here.queues += (config.queue_depth + 2) * tokens * feature
        if device.type == "cuda" and config.cuda_graphs != "off":
            # Each graph has inputs of its own, and the target's, of which there is one a shape, what it makes.
            here.queues += 2 * share * sum(config.data.lengths) * feature
        kept = kept_bytes(shape, config, vocabulary=text.vocab_size, dtype=dtype, rows=share, length=length)
        supervised = share * config.drafter.anchors * (config.drafter.block_size - 1)
        size, _ = chunks(supervised, config.loss.chunk_rows)
        logits = size * text.vocab_size * (dtype.itemsize + 8)
        here.work += max(kept + logits, kept // config.drafter.layers + weights * dtype.itemsize)
    return found


def forecast(config: Config) -> str:
    """The whole answer, as a text. Raises `ConfigError` for a target whose sizes cannot be told."""
    from transformers import AutoConfig

    gpus = torch.cuda.device_count()
    devices = config.devices.on(gpus, batch_size=config.batch_size)
    config = config.model_copy(update={"devices": devices})
    path = expand_path(config.target.path, key="target.path")
    try:
        model = AutoConfig.from_pretrained(path, local_files_only=True)
        layer_ids = inputs.choose_layers(
            config.target.layer_ids, config.target.captured_layers, count=model.get_text_config().num_hidden_layers
        )
    except inputs.LayerError as error:
        raise ConfigError(f"{error.key}: {error}") from None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"target.path: cannot read the sizes of {path}: {' '.join(str(error).split())}") from error
    shape = shape_for(model, config.drafter, captured=len(layer_ids))
    lines = [f"target threads: {', '.join(devices.target)}; drafters: {', '.join(devices.drafter)}"]
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
    lines += ["", "memory at the peak, predicted (GiB):"]
    parameters = inputs.parameter_count(path)
    rows = [
        [name, *(f"{value / GIB:.2f}" for value in (
            one.target, one.frozen_ends, one.drafters, one.queues, one.work, one.peak))]
        for name, one in memory(config, model, shape, parameters=parameters).items()
    ]  # fmt: skip
    lines += table(["device", "target", "frozen ends", "drafters", "queues", "a step's work", "peak"], rows)
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)]  # fmt: skip
