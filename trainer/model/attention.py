"""The two ways to attend under a block mask: FlexAttention on CUDA, and its twin over SDPA on the CPU.

Both evaluate the same `blocks.visibility`. `kernels.py` chooses between them and compiles what calls them:
FlexAttention outside a compiled function would write the whole score matrix out, so it refuses to run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.blocks import Blocks, visibility


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
        return self.attend(query_BHTD, key, value, mask)

    def attend(self, query_BHTD: Tensor, key_BHKD: Tensor, value_BHKD: Tensor, mask: Tensor) -> Tensor:
        """With as many key heads as query heads."""
        return F.scaled_dot_product_attention(query_BHTD, key_BHKD, value_BHKD, attn_mask=mask)


class SparseAttention:
    """FlexAttention: skips every 128x128 tile of the mask in which nothing is seen. Only inside a compiled function."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        """`compiled(name, function, **options)` compiles."""
        from torch.nn.attention import flex_attention as torchs  # slow to import, and of no use on the CPU

        def make_mask(visible: Any, rows: int, queries: int, keys: int, device: str) -> Any:
            return torchs.create_block_mask(visible, rows, None, queries, keys, device=device)

        # Inductor would build a bitonic sort for the mask's tiny index sort, one tuning of which takes minutes.
        no_triton_sort: dict[str, Any] = {"triton.persistent_reductions": False}
        # As written it would make the whole mask first. One mask serves all heads.
        self._make_mask = compiled("make_mask", make_mask, options=no_triton_sort)
        self._attend = torchs.flex_attention

    def mask(self, blocks: Blocks, context_length: int) -> Any:
        rows, queries = blocks.tokens_BT.shape
        # With its number: of a device without one, a trace takes some tensors for the current device's, some for the
        # first's.
        device = str(blocks.tokens_BT.device)
        return self._make_mask(visibility(blocks, context_length), rows, queries, context_length + queries, device)

    def __call__(self, query_BHTD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: Any) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            raise RuntimeError("FlexAttention was called outside a compiled function: it would run as dense attention")
        grouped = query_BHTD.shape[1] != key_BGKD.shape[1]
        return self._attend(
            query_BHTD, key_BGKD, value_BGKD, block_mask=mask, enable_gqa=grouped,
            # Few slots would get the kernel for decoding, which is made for other masks.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )  # fmt: skip
