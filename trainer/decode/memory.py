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

from trainer.model.remembering import remembering


class Memory:
    """`capacity` tokens of each row, in each layer of one model: [layers, keys and values, rows, key heads, capacity,
    head size]."""

    def __init__(self, *, layers: int, rows: int, kv_heads: int, capacity: int, head_dim: int, device: torch.device,
                 dtype: torch.dtype) -> None:  # fmt: skip
        # Zeros, since what is hidden is still multiplied, and nothing times nan would be nan.
        self.kept = torch.zeros(layers, 2, rows, kv_heads, capacity, head_dim, device=device, dtype=dtype)

    def write(self, kv_2BGTD: Tensor, positions_BT: Tensor, *, layer: int | None = None) -> None:
        """Of all rows, at a position of its own for each token; of one layer, or of all at once [layers, 2, ...]."""
        kept = self.kept if layer is None else self.kept[layer]
        kept.scatter_(-2, positions_BT[:, None, :, None].expand_as(kv_2BGTD), kv_2BGTD)

    def write_rows(self, kv_2BGTD: Tensor, rows_B: Tensor, *, layer: int | None = None) -> None:
        """Of some rows, from their beginning."""
        kept = self.kept if layer is None else self.kept[layer]
        kept[..., : kv_2BGTD.shape[-2], :].index_copy_(-4, rows_B, kv_2BGTD)


class Reading:
    """The target reads prompts from their beginning, into `rows_B` of its memory; behind a prompt's end is padding,
    which nothing before it sees."""

    def __init__(self, memory: Memory, rows_B: Tensor) -> None:
        self._memory, self._rows_B = memory, rows_B

    def attend(self, layer: int, query_BHTD: Tensor, kv_2BGTD: Tensor, *, scale: float | None) -> Tensor:
        self._memory.write_rows(kv_2BGTD, self._rows_B, layer=layer)
        key_BGTD, value_BGTD = kv_2BGTD.unbind()
        grouped = query_BHTD.shape[1] != key_BGTD.shape[1]
        out_BHTD = F.scaled_dot_product_attention(
            query_BHTD, key_BGTD, value_BGTD, is_causal=True, scale=scale, enable_gqa=grouped
        )  # fmt: skip
        return out_BHTD.transpose(1, 2).contiguous()


class GoingOn:
    """A model reads the next T tokens of every row, which stand at `positions_BT`, and sees `length` tokens at most,
    each all up to itself; or up to `sees_BT`, where a block's slots see each other."""

    def __init__(self, memory: Memory, positions_BT: Tensor, length: int, *, sees_BT: Tensor | None = None) -> None:
        self._memory, self._positions_BT, self._length = memory, positions_BT, length
        place = torch.arange(length, device=positions_BT.device)
        self._seen_B1TL = (place <= (positions_BT if sees_BT is None else sees_BT)[:, :, None])[:, None]
        self._bias: Tensor | None = None

    def attend(self, layer: int, query_BHTD: Tensor, kv_2BGTD: Tensor, *, scale: float | None) -> Tensor:
        self._memory.write(kv_2BGTD, self._positions_BT, layer=layer)
        key_BGLD, value_BGLD = self._memory.kept[layer, :, :, :, : self._length].unbind()
        sharing = query_BHTD.shape[1] // key_BGLD.shape[1]
        if self._bias is None:  # the same in all layers
            zero = torch.zeros((), device=query_BHTD.device, dtype=query_BHTD.dtype)
            self._bias = zero.masked_fill(~self._seen_B1TL, -torch.inf).repeat(1, 1, sharing, 1)
        # Query heads of one key head become further queries of it: a copy of all keys for each of them is what a long
        # context cannot afford.
        queries = query_BHTD.unflatten(1, (-1, sharing)).flatten(2, 3)
        out = F.scaled_dot_product_attention(queries, key_BGLD, value_BGLD, attn_mask=self._bias, scale=scale)
        return out.unflatten(2, (sharing, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()


@contextmanager
def through(memory: Reading | GoingOn) -> Iterator[None]:
    with torch.no_grad(), remembering(memory):
        yield
