"""A layer as it is compiled for CUDA, as far as memory goes: what it keeps for its backward, not what it computes.

torch's own partitioner decides which of a layer's intermediate results are kept and which are computed again; it is
asked here as the compiler asks it, over tensors without content, with an attention that keeps what FlexAttention keeps.
Between two products everything is fused, so that of what comes and goes inside only the largest product is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer.kernels import Kernels, Rope, plain
from trainer.model.loss import HeadLoss
from trainer.plan.live_bytes import LiveBytes

PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default")


def kernels(live: LiveBytes, head_loss: HeadLoss) -> Kernels:
    """Counted by `live`. Raises whatever torch does where it has no such partitioner."""
    attend = _attention_op()

    class Attention:
        def mask(self, blocks: Any, context_length: int) -> None:
            return None

        def __call__(self, query_BHTD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: Any) -> Tensor:
            out: Tensor = attend(query_BHTD, key_BGKD, value_BGKD)[0]
            return out

    attention = Attention()
    made: dict[bool, Callable[..., Tensor]] = {}

    def layer(module: Any, slots_BTH: Tensor, context_BSH: Tensor, rope: Rope, mask: Any) -> Tensor:
        named = dict(module.named_parameters())
        first = not slots_BTH.requires_grad
        if first not in made:
            def written(slots: Tensor, context: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
                given = dict(zip(named, weights, strict=True))
                out: Tensor = torch.func.functional_call(module, given, (slots, context, (cos, sin), attention, None))
                return out

            made[first] = _partitioned(written, live)
        return made[first](slots_BTH, context_BSH, *rope, *named.values())

    as_written = plain(attention, _fused_loss() if head_loss.fused else head_loss)
    return Kernels(
        attention=as_written.attention, first_layer=layer, layer=layer, head_loss=as_written.head_loss
    )  # fmt: skip


def _partitioned(written: Callable[..., Tensor], live: LiveBytes) -> Callable[..., Tensor]:
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compiled(graph: Any, _examples: Any) -> Any:
        products = [node for node in graph.graph.nodes if str(node.target) in PRODUCTS]
        largest = max(map(_bytes, products), default=0)

        def run(*inputs: Any) -> Any:
            with _disable_current_modes():
                outputs = graph.forward(*inputs)
            there = {one.untyped_storage()._cdata for one in inputs if isinstance(one, Tensor)}
            live.made(one for one in outputs if isinstance(one, Tensor) and one.untyped_storage()._cdata not in there)
            live.passing(largest)
            return outputs

        return make_boxed_func(run)

    function: Callable[..., Tensor] = aot_function(
        written, fw_compiler=compiled, bw_compiler=compiled, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip

    traced: list[bool] = []

    def call(*inputs: Any) -> Tensor:
        if not traced:
            traced.append(True)
            # At its first call it is traced, which makes what a run never has.
            with live.paused():
                function(*inputs)
        return function(*inputs)

    return call


def _bytes(node: Any) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _fused_loss() -> HeadLoss:
    """Of a chunk there are its logits and their gradient, both in the type of the arithmetic."""

    def chunk(hidden_CH: Tensor, head_VH: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = hidden_CH @ head_VH.T
        by_logits_CV = torch.empty_like(logits_CV)
        return torch.empty_like(labels_C, dtype=torch.float32), by_logits_CV @ head_VH

    return HeadLoss(chunk=chunk, last_chunk=chunk, fused=True)


@functools.cache
def _attention_op() -> Callable[..., Sequence[Tensor]]:
    """An operation that autograd and the partitioner cannot look into: like FlexAttention it keeps its inputs, its
    output and a number for each query."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)

    def back(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
             ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    forward = torch.library.custom_op("specctl_plan::attend", attend, mutates_args=())
    backward = torch.library.custom_op("specctl_plan::attend_backward", back, mutates_args=())
    forward.register_fake(attend)
    backward.register_fake(back)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    forward.register_autograd(
        lambda ctx, gradient, _: backward(gradient, *ctx.saved_tensors), setup_context=keep
    )  # fmt: skip
    return forward
