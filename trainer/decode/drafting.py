"""The drafter while decoding: what it keeps of the context, and the block that it proposes.

The same layers as in training (`model/drafter.py`), asked for one block at the end of each row: keys and values of the
context are made once, when the target has read a token, and remembered; slots see the context before their anchor, and
each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.decode.memory import Memory, attend_grouped, bias
from trainer.model.drafter import Drafter, FrozenEnds


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

    def read(self, features_BTF: Tensor, positions_BT: Tensor, *, rows_B: Tensor | None = None) -> None:
        """Remember the context that the target's `features_BTF` tell of: of all rows, at `positions_BT`; or of some,
        from their beginning."""
        drafter, dtype = self.drafter, self.ends.head_VH.dtype
        context_BTH = drafter.hidden_norm(drafter.fc(features_BTF.to(dtype)))
        rope = drafter.rope(positions_BT, dtype)
        for number, layer in enumerate(drafter.layers):
            key, value = layer.self_attn.context_keys(context_BTH, rope)
            if rows_B is None:
                self.memory.write(number, key, value, positions_BT)
            else:
                self.memory.write_rows(number, key, value, rows_B)

    def propose(self, tokens_B: Tensor, anchors_B: Tensor, length: int) -> Tensor:
        """Logits [B, K-1, V] of slots 1..K-1 of the block whose slot 0 is `tokens_B` at `anchors_B`; `length` tokens of
        context are looked at, at most."""
        drafter, ends = self.drafter, self.ends
        slot = torch.arange(self.block_size, device=anchors_B.device)
        rope = drafter.rope(anchors_B[:, None] + slot, ends.head_VH.dtype)
        slots_BKH = F.embedding(torch.cat((tokens_B[:, None], self._masks_Bk), dim=1), ends.embedding_VH)
        before_BL = torch.arange(length, device=anchors_B.device) < anchors_B[:, None]
        seen_BL = torch.cat((before_BL, before_BL.new_ones(len(before_BL), self.block_size)), dim=1)
        seen_B1KL = seen_BL[:, None, None].expand(-1, -1, self.block_size, -1)
        added = bias(seen_B1KL, sharing=drafter.shape.heads // drafter.shape.kv_heads, dtype=slots_BKH.dtype)
        for number, layer in enumerate(drafter.layers):
            slots_BKH = layer(slots_BKH, slots_BKH[:, :0], rope, self._attend(number, length), added)
        return F.linear(drafter.norm(slots_BKH[:, 1:]), ends.head_VH)

    def _attend(self, layer: int, length: int) -> Any:
        keys, values = (kept[layer, :, :, :length] for kept in (self.memory.keys, self.memory.values))

        def attend(query_BHKD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, added: Tensor) -> Tensor:
            key, value = torch.cat((keys, key_BGKD), dim=2), torch.cat((values, value_BGKD), dim=2)
            return attend_grouped(query_BHKD, key, value, added)

        return attend
