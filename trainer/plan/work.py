"""What a worker's step takes beyond what lives on its device anyway, found without the device.

The trainer's own functions, and the target's own model, run over tensors without content (torch's `meta` device), and
what would be alive is counted as it comes and goes (`live_bytes.py`). Only attention is another one: it makes what the
real one makes, on that kind of device; and layers that are compiled for CUDA keep what they keep when they are compiled
(`compiled_layer.py`), or, where this torch cannot tell, all that they would as they are written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer import compile_plan
from trainer.config import Config
from trainer.kernels import Kernels, plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import Blocks
from trainer.model.causal import documents_mask
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.model.loss import PLAIN, HeadLoss, block_loss
from trainer.model.target import decoder_layers
from trainer.optim import FlatWeights
from trainer.plan import compiled_layer, engines
from trainer.plan.engines import ENGINES
from trainer.plan.live_bytes import LiveBytes, bytes_of
from trainer.replicas import HASH_CHUNK, weight_hash

PLANNED = "planned"
"""Name of the target's attention while it is planned."""


class _FlexThatKeeps:
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


class _DenseOnCpu(DenseAttention):
    """With the kernel that the CPU takes for SDPA: left to choose, torch takes another one for `meta`."""

    def attend(self, query_BHTD: Tensor, key_BHKD: Tensor, value_BHKD: Tensor, mask: Tensor) -> Tensor:
        added = torch.where(mask, 0.0, -torch.inf).to(query_BHTD.dtype)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: Tensor = kernel(query_BHTD, key_BHKD, value_BHKD, attn_mask=added)[0]
        return out


def micro_batch(shape: DrafterShape, config: Config, *, dtype: torch.dtype, rows: int, length: int
                ) -> tuple[Tensor, Blocks]:  # fmt: skip
    """Features, in the target's type, and blocks, without content."""
    count, size = config.anchors_at(length), config.drafter.block_size
    with torch.device("meta"):
        anchors_BN = torch.empty(rows, count, dtype=torch.long)
        slots_BT = torch.empty(rows, count * size, dtype=torch.long)
        weights_BNk = torch.empty(rows, count, size - 1)
        blocks = Blocks(
            anchors_BN=anchors_BN, valid_BN=torch.empty(rows, count, dtype=torch.bool),
            starts_BN=torch.empty_like(anchors_BN), positions_BS=torch.empty(rows, length, dtype=torch.long),
            tokens_BT=slots_BT, positions_BT=torch.empty_like(slots_BT),
            labels_BNk=torch.empty(weights_BNk.shape, dtype=torch.long), weights_BNk=weights_BNk,
        )  # fmt: skip
        return torch.empty(rows, length, shape.captured * shape.hidden, dtype=dtype), blocks


def batch_bytes(features_BSF: Tensor, blocks: Blocks) -> int:
    return bytes_of(features_BSF, *blocks.tensors())


def drafter_work(shape: DrafterShape, config: Config, device: torch.device, *, vocabulary: int, dtype: torch.dtype,
                 features_dtype: torch.dtype, rows: int, length: int) -> int:  # fmt: skip
    """Bytes that one drafter's step takes at the most, for a micro-batch of `rows` rows of `length` tokens."""
    features_BSF, blocks = micro_batch(shape, config, dtype=features_dtype, rows=rows, length=length)
    drafter = Drafter.without_content(shape)
    with torch.device("meta"):
        table = torch.empty(vocabulary, shape.hidden, dtype=dtype)
    if config.engine in ENGINES:
        drafter = engines.module(shape, config, dtype)
    flat = None if config.engine in ENGINES else FlatWeights(drafter, dtype)
    if flat is not None and config.sync == "grads" and len(set(config.devices.drafter)) > 1:
        flat.collect_early(lambda: None)
    ends = FrozenEnds(embedding_VH=table, head_VH=table)

    def at_most(kernels_by: Callable[[LiveBytes, HeadLoss], Kernels]) -> int:
        live = LiveBytes()
        kernels = kernels_by(live, PLAIN[config.loss.kernel != "chunked"])
        with live:
            _forward_backward(drafter, flat, features_BSF.to(dtype), blocks, ends, kernels, config)
        return live.peak

    if device.type == "cpu":
        step = at_most(_on_cpu)
    else:
        try:
            with compile_plan.watch.lifted():
                step = at_most(compiled_layer.kernels)
        except Exception:  # it is made of parts of torch that are no promise of torch's
            for parameter in drafter.parameters():
                parameter.grad = None
            if flat is not None:
                flat.drop()
            step = at_most(_as_written)
    if flat is None:
        return step + engines.passing(shape, config, dtype)
    with LiveBytes() as hashing:
        weight_hash(flat.weights, chunk=HASH_CHUNK[device.type])
    return max(step, hashing.peak)


def exchange_room(shape: DrafterShape, config: Config) -> int:
    """Bytes that a device takes for what it fetches from the others of what is to be added up (`exchange.py`):
    gradients part by part, weights whole."""
    count = len(set(config.devices.drafter))
    if count == 1:
        return 0
    flat = FlatWeights(Drafter.without_content(shape))
    sizes = [len(flat.weights)]
    if config.sync == "grads":
        flat.collect_early(lambda: None)
        sizes = [part.high - part.low for part in flat.parts]
    # Two devices fetch all of it, more a share from each of the others.
    return 4 * max(sizes) if count == 2 else 4 * (count - 1) * -(-max(sizes) // count)


def _on_cpu(_live: LiveBytes, head_loss: HeadLoss) -> Kernels:
    return plain(_DenseOnCpu(), head_loss)


def _as_written(_live: LiveBytes, head_loss: HeadLoss) -> Kernels:
    return plain(_FlexThatKeeps(), head_loss)


def _forward_backward(drafter: Drafter, flat: FlatWeights | None, features_BSF: Tensor, blocks: Blocks,
                      ends: FrozenEnds, kernels: Kernels, config: Config) -> None:  # fmt: skip
    """As `Replica._forward_backward`."""
    slots_BTH = drafter(features_BSF, blocks, ends, kernels)
    loss, *_ = block_loss(
        slots_BTH, blocks, ends.head_VH, weight_sum=1.0, chunk_rows=config.loss.chunk_rows,
        head_loss=kernels.head_loss, alpha=config.loss.pace_alpha,
    )  # fmt: skip
    loss.backward()
    if flat is not None:
        flat.collect()


def target_work(model_config: Any, *, layer_ids: list[int], dtype: torch.dtype, rows: int, length: int, packing: bool
                ) -> int:  # fmt: skip
    """Bytes that a forward of the target takes at the most. Raises whatever the model raises, if it looks at what its
    tensors hold."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(PLANNED, _planned)
    with torch.device("meta"):
        # What is registered there is looked up in the configuration, which is the caller's.
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config), dtype=dtype, attn_implementation=PLANNED
        ).eval()  # fmt: skip
        ids_BS = torch.empty(rows, length, dtype=torch.long)
    outputs: dict[int, Tensor] = {}
    for layer_id in layer_ids:
        def keep(_layer: Any, _inputs: Any, output: Any, layer_id: int = layer_id) -> None:
            outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        decoder_layers(model)[layer_id].register_forward_hook(keep)
    with torch.no_grad(), LiveBytes() as live:
        given = {"input_ids": ids_BS}
        if packing:
            given |= {"position_ids": ids_BS, "attention_mask": documents_mask(ids_BS)}
        model.base_model(**given, use_cache=False)
        features = torch.cat([outputs[layer_id] for layer_id in layer_ids], dim=-1)
        del features
    return live.peak


def _planned(_module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_options: Any
             ) -> tuple[Tensor, None]:  # fmt: skip
    """What SDPA makes of it."""
    made = [query.new_empty(query.shape[:-1], dtype=torch.float32)]
    if attention_mask is not None:
        groups = query.shape[1] // key.shape[1]
        made += [part.repeat_interleave(groups, dim=1) for part in (key, value) if groups > 1]
        made.append(torch.where(attention_mask, 0.0, -torch.inf).to(query.dtype))
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    del made
    return out, None
