"""The two ways to attend under a block mask: FlexAttention on CUDA, and its twin over SDPA on the CPU.

The device alone chooses, once, when a replica is made: FlexAttention has no backward on the CPU, and asking whether
something is compiling would choose wrongly in one thread while another compiles. Both evaluate the same
`blocks.visibility`. The compiled kernels exist once per process, here; `compile_plan.py` makes sure they are warm
before a second thread calls them.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.blocks import Blocks, visibility


class Attention(Protocol):
    def mask(self, blocks: Blocks, context_length: int) -> Any:
        """What `__call__` needs to know of who sees whom, for all layers of a step."""

    def __call__(self, query_BHTD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: Any) -> Tensor:
        """Attention of T queries to K = S+T keys, G key heads serving H query heads; shape as the queries."""


class DenseAttention:
    """SDPA with the whole mask written out: any device, small shapes; the reference for the other one."""

    def mask(self, blocks: Blocks, context_length: int) -> Tensor:
        rows, queries = blocks.tokens_BT.shape
        device = blocks.tokens_BT.device
        row = torch.arange(rows, device=device)[:, None, None, None]
        query = torch.arange(queries, device=device)[:, None]
        key = torch.arange(context_length + queries, device=device)
        return visibility(blocks, context_length)(row, torch.zeros_like(row), query, key)

    def __call__(self, query_BHTD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: Any) -> Tensor:
        groups = query_BHTD.shape[1] // key_BGKD.shape[1]
        key, value = key_BGKD.repeat_interleave(groups, dim=1), value_BGKD.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(query_BHTD, key, value, attn_mask=mask)


class SparseAttention:
    """FlexAttention: skips every 128x128 tile of the mask in which nothing is seen."""

    def mask(self, blocks: Blocks, context_length: int) -> Any:
        rows, queries = blocks.tokens_BT.shape
        make_mask, _ = _compiled_kernels()
        visible = visibility(blocks, context_length)
        return make_mask(visible, rows, None, queries, context_length + queries, device=blocks.tokens_BT.device.type)

    def __call__(self, query_BHTD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: Any) -> Tensor:
        _, attend = _compiled_kernels()
        grouped = query_BHTD.shape[1] != key_BGKD.shape[1]
        return attend(query_BHTD, key_BGKD, value_BGKD, block_mask=mask, enable_gqa=grouped)


@functools.cache
def _compiled_kernels() -> tuple[Any, Any]:
    """(create_block_mask, flex_attention), compiled for static shapes; one pair for all threads and devices."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Inductor would build a bitonic sort for the mask's tiny index sort, one tuning of which takes minutes.
    no_triton_sort: dict[str, Any] = {"triton.persistent_reductions": False}
    return (
        torch.compile(create_block_mask, dynamic=False, options=no_triton_sort),
        torch.compile(flex_attention, dynamic=False),
    )


def attention_for(device: torch.device) -> Attention:
    return SparseAttention() if device.type == "cuda" else DenseAttention()
