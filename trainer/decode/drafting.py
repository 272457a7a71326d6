"""The drafter while decoding: what it keeps of the context, and the block that it proposes.

The same layers as in training (`model/drafter.py`), asked for one block at the end of each row: keys and values of the
context are made once, when the target has read a token, and remembered; slots see the context before their anchor, and
each other.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.decode.compiling import AsWritten
from trainer.decode.memory import GoingOn, Memory, through
from trainer.kernels import Rope
from trainer.model.drafter import Drafter, FrozenEnds, Layer
from trainer.model.remembering import attend, run_layer


class Drafting:
    """`drafter` for a fixed number of rows. It computes in the type of `ends`."""

    def __init__(self, drafter: Drafter, ends: FrozenEnds, *, block_size: int, mask_token_id: int, rows: int,
                 capacity: int) -> None:  # fmt: skip
        self.drafter, self.ends, self.block_size = drafter, ends, block_size
        shape, device = drafter.shape, ends.head_VH.device
        self.memory = Memory(
            layers=shape.layers, rows=rows, kv_heads=shape.kv_heads, capacity=capacity, head_dim=shape.head_dim,
            device=device, dtype=ends.head_VH.dtype,
        )  # fmt: skip
        self._masks_Bk = torch.full((rows, block_size - 1), mask_token_id, device=device)

    def read(self, features_BTF: Tensor, rope: Rope, positions_BT: Tensor, *, way: AsWritten) -> None:
        """Remember the context that the target's `features_BTF` tell of: of all rows, at `positions_BT`."""
        self.memory.write(way.run(_context, self.drafter, features_BTF, rope), positions_BT)

    def read_prompts(self, features_BTF: Tensor, positions_BT: Tensor, rows_B: Tensor) -> None:
        """The same of some rows, from their beginning."""
        rope = self.drafter.rope(positions_BT, self.ends.head_VH.dtype)
        self.memory.write_rows(_context(self.drafter, features_BTF, rope), rows_B)

    def rope(self, positions_BK: Tensor, *, way: AsWritten) -> Rope:
        """Of a block's slots, for `propose` and `read`."""
        found: Rope = way.run(Drafter.rope, self.drafter, positions_BK, self.ends.head_VH.dtype)
        return found

    def propose(self, tokens_B: Tensor, rope: Rope, positions_BK: Tensor, length: int, *, way: AsWritten) -> Tensor:
        """Logits [B, K-1, V] of slots 1..K-1 of the blocks at `positions_BK`, whose slot 0 is `tokens_B`; `length`
        tokens are looked at, at most, block included. Where they stand is remembered what the slots are asked with,
        until `read` writes over it."""
        drafter, ends = self.drafter, self.ends
        slots_BKH = F.embedding(torch.cat((tokens_B[:, None], self._masks_Bk), dim=1), ends.embedding_VH)
        sees_BK = positions_BK[:, -1:].expand_as(positions_BK)
        with through(GoingOn(self.memory, positions_BK, length, sees_BT=sees_BK)):
            for number, layer in enumerate(drafter.layers):
                slots_BKH = run_layer(number, functools.partial(way.run, _layer), layer, slots_BKH, rope)
        return F.linear(drafter.norm(slots_BKH[:, 1:]), ends.head_VH)


def _context(drafter: Drafter, features_BTF: Tensor, rope: Rope) -> Tensor:
    """What all layers remember of it [layers, 2, B, key heads, T, head size]."""
    context_BTH = drafter.hidden_norm(drafter.fc(features_BTF.to(rope[0].dtype)))
    found = [one for layer in drafter.layers for one in layer.self_attn.context_keys(context_BTH, rope)]
    return torch.stack(found).unflatten(0, (-1, 2))


def _layer(layer: Layer, slots_BKH: Tensor, rope: Rope) -> Tensor:
    result: Tensor = layer(slots_BKH, slots_BKH[:, :0], rope, _attend, None)
    return result


def _attend(query_BHKD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, _mask: None) -> Tensor:
    return attend(query_BHKD, key_BGKD, value_BGKD).transpose(1, 2)
