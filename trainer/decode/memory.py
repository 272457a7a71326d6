"""Keys and values of what has been read so far, of several rows at once, each of a length of its own.

Everything has one shape from the beginning to the end, so that a CUDA graph may be recorded over it: rows never move,
keys are written where their tokens stand, and what lies behind a row's end is hidden by the mask until it is written
over. Cropping back what was drafted in vain is therefore nothing but a smaller length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.causal import remembering


class Memory:
    """`capacity` tokens of each row, in each layer of one model: [layers, rows, key heads, capacity, head size]."""

    def __init__(self, *, layers: int, rows: int, kv_heads: int, capacity: int, head_dim: int, device: torch.device,
                 dtype: torch.dtype) -> None:  # fmt: skip
        shape = (layers, rows, kv_heads, capacity, head_dim)
        # Zeros, since what is hidden is still multiplied, and nothing times nan would be nan.
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))

    def write(self, layer: int, key_BGTD: Tensor, value_BGTD: Tensor, positions_BT: Tensor) -> None:
        """Of all rows, at a position of its own for each token."""
        where = positions_BT[:, None, :, None].expand_as(key_BGTD)
        self.keys[layer].scatter_(2, where, key_BGTD)
        self.values[layer].scatter_(2, where, value_BGTD)

    def write_rows(self, layer: int, key_BGTD: Tensor, value_BGTD: Tensor, rows_B: Tensor) -> None:
        """Of some rows, from their beginning."""
        length = key_BGTD.shape[2]
        self.keys[layer, :, :, :length].index_copy_(0, rows_B, key_BGTD)
        self.values[layer, :, :, :length].index_copy_(0, rows_B, value_BGTD)


class Reading:
    """The target reads prompts from their beginning, into `rows_B` of its memory; behind a prompt's end is padding,
    which nothing before it sees."""

    def __init__(self, memory: Memory, rows_B: Tensor) -> None:
        self._memory, self._rows_B = memory, rows_B

    def attend(self, layer: int, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, *, scale: float | None
               ) -> Tensor:  # fmt: skip
        self._memory.write_rows(layer, key_BGTD, value_BGTD, self._rows_B)
        grouped = query_BHTD.shape[1] != key_BGTD.shape[1]
        out_BHTD = F.scaled_dot_product_attention(
            query_BHTD, key_BGTD, value_BGTD, is_causal=True, scale=scale, enable_gqa=grouped
        )  # fmt: skip
        return out_BHTD.transpose(1, 2)


class GoingOn:
    """The target reads the next T tokens of every row, which stand at `positions_BT`, and sees `length` tokens at
    most."""

    def __init__(self, memory: Memory, positions_BT: Tensor, length: int) -> None:
        self._memory, self._positions_BT, self._length = memory, positions_BT, length
        place = torch.arange(length, device=positions_BT.device)
        self._seen_B1TL = (place <= positions_BT[:, :, None])[:, None]
        self._bias: Tensor | None = None

    def attend(self, layer: int, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, *, scale: float | None
               ) -> Tensor:  # fmt: skip
        self._memory.write(layer, key_BGTD, value_BGTD, self._positions_BT)
        key, value = (kept[layer, :, :, : self._length] for kept in (self._memory.keys, self._memory.values))
        if self._bias is None:  # the same in all layers
            sharing = query_BHTD.shape[1] // key_BGTD.shape[1]
            self._bias = bias(self._seen_B1TL, sharing=sharing, dtype=query_BHTD.dtype)
        return attend_grouped(query_BHTD, key, value, self._bias, scale=scale).transpose(1, 2)


def bias(seen_B1TL: Tensor, *, sharing: int, dtype: torch.dtype) -> Tensor:
    """What `attend_grouped` adds to scores in this type, where so many query heads share a key head: made once, for all
    layers."""
    added = torch.zeros((), device=seen_B1TL.device, dtype=dtype).masked_fill(~seen_B1TL, -torch.inf)
    return added.repeat(1, 1, sharing, 1)


def attend_grouped(query_BHTD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, bias_B1QL: Tensor, *,
                   scale: float | None = None) -> Tensor:  # fmt: skip
    """Attention [B, H, T, D] of H query heads to G key heads. Query heads of one key head become further queries of it:
    a copy of all keys for each of them is what a long context cannot afford."""
    groups, sharing = key_BGLD.shape[1], query_BHTD.shape[1] // key_BGLD.shape[1]
    queries = query_BHTD.unflatten(1, (groups, sharing)).flatten(2, 3)
    out = F.scaled_dot_product_attention(queries, key_BGLD, value_BGLD, attn_mask=bias_B1QL, scale=scale)
    return out.reshape(query_BHTD.shape)


@contextmanager
def through(memory: Reading | GoingOn) -> Iterator[None]:
    with torch.no_grad(), remembering(memory):
        yield
