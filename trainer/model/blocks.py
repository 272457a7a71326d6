"""Which blocks a step trains: anchors, what stands in each block's slots, what each slot may see and must predict.

The target thread draws anchors and lays the blocks out on the CPU; `attention.py` turns `visibility` into a mask. A
block of B slots starts at its anchor: slot 0 is the real token there, slots 1..B-1 are the mask token and predict the
tokens at anchor+1..anchor+B-1. A block sees context strictly before its anchor, and itself; because at decoding time
the anchor has no target feature yet. A row may hold several documents, one behind the other: positions count from a
document's start, and a block neither sees nor predicts anything outside its own. Shapes: B_ rows, S sequence, N
anchors, K slots of a block, T = N*K.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks of some rows of one step; all tensors are on one device."""

    anchors_BN: Tensor
    """Sorted within a row, valid ones first."""
    valid_BN: Tensor
    """False where a row had too few places for an anchor; such a block trains nothing."""
    starts_BN: Tensor
    """Where in the row the anchor's document begins."""
    positions_BS: Tensor
    """Of the context."""
    tokens_BT: Tensor
    positions_BT: Tensor
    """Of the slots."""
    labels_BNk: Tensor
    """Of slots 1..K-1; slot 0 is not supervised."""
    weights_BNk: Tensor

    def to(self, device: torch.device) -> Blocks:
        return self.each(lambda tensor: bring(tensor, device))

    def rows(self, part: slice) -> Blocks:
        return self.each(lambda tensor: tensor[part])

    def each(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        return Blocks(**{name: change(tensor) for name, tensor in self.named().items()})

    def tensors(self) -> list[Tensor]:
        return list(self.named().values())

    def named(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def block_size(self) -> int:
        return self.tokens_BT.shape[1] // self.anchors_BN.shape[1]


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. A copy to CUDA may still be going on: the device's own stream orders what reads it."""
    if device.type == "cpu":
        # Nothing orders a copy to the CPU: whoever reads it there would be ahead of it.
        return tensor.to(device)
    # From memory that may be paged out, the copy would hold up its thread.
    return (tensor.pin_memory() if tensor.device.type == "cpu" else tensor).to(device, non_blocking=True)


def generator_for(*parts: int | str) -> torch.Generator:
    """A generator of its own for each (seed, step, row): nothing a step draws depends on what was drawn before, on the
    number of workers, or on threads."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def pick_anchors(loss_mask_S: Tensor, count: int, generator: torch.Generator, *, starts_S: Tensor | None = None
                 ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`count` anchors of one row and their validity: positions that are trained on and so is the next one of the same
    document, drawn without replacement, sorted. What is missing is padded with position 0 and validity False, behind
    the others. `starts_S` as in `lay_out`."""
    eligible = loss_mask_S[:-1] & loss_mask_S[1:]
    if starts_S is not None:
        eligible &= starts_S[:-1] == starts_S[1:]
    keys = torch.rand(eligible.shape, generator=generator).masked_fill(~eligible, -1.0)
    drawn, positions = keys.topk(count)
    length = loss_mask_S.shape[0]
    ordered = torch.where(drawn >= 0, positions, length).sort().values
    valid = ordered < length
    return torch.where(valid, ordered, 0), valid


def lay_out(ids_BS: Tensor, loss_mask_BS: Tensor, anchors_BN: Tensor, valid_BN: Tensor, *, block_size: int,
            mask_token_id: int, gamma: float, starts_BS: Tensor | None = None) -> Blocks:  # fmt: skip
    """The blocks at `anchors_BN`. Slot k weighs exp(-(k-1)/gamma); a slot past the trained stretch that its anchor
    stands in weighs nothing, since nothing behind a gap can be drafted from before it, and the end of a document is
    one. `starts_BS` is where in the row each token's document begins; left out, a row is one document."""
    rows, length = ids_BS.shape
    starts_BS = torch.zeros_like(ids_BS) if starts_BS is None else starts_BS.long()
    starts_BN = starts_BS.gather(1, anchors_BN)
    where_BNK = anchors_BN[:, :, None] + torch.arange(block_size)
    inside_BNK = where_BNK.clamp(max=length - 1).view(rows, -1)

    tokens_BNK = torch.full(where_BNK.shape, mask_token_id)
    tokens_BNK[:, :, 0] = torch.where(valid_BN, ids_BS.gather(1, anchors_BN), mask_token_id)

    trained_BNK = loss_mask_BS.gather(1, inside_BNK).view(where_BNK.shape) & (where_BNK < length)
    trained_BNK &= starts_BS.gather(1, inside_BNK).view(where_BNK.shape) == starts_BN[:, :, None]
    unbroken_BNk = trained_BNK[:, :, 1:].int().cumprod(dim=2).bool()
    decay_k = torch.exp(-torch.arange(block_size - 1) / gamma)
    return Blocks(
        anchors_BN=anchors_BN,
        valid_BN=valid_BN,
        starts_BN=starts_BN,
        positions_BS=torch.arange(length) - starts_BS,
        tokens_BT=tokens_BNK.view(rows, -1),
        positions_BT=(where_BNK - starts_BN[:, :, None]).view(rows, -1),
        labels_BNk=ids_BS.gather(1, inside_BNK).view(where_BNK.shape)[:, :, 1:].contiguous(),
        weights_BNk=(unbroken_BNk & valid_BN[:, :, None]) * decay_k,
    )


def visibility(blocks: Blocks, context_length: int) -> MaskFunction:
    """The mask as a function of (row, head, query, key), for single indices and for tensors of them that broadcast.

    Keys 0..S-1 are the context, then come the T slots themselves. Context is seen by its place alone, from the start of
    the anchor's document up to the anchor; a padding block sees only itself, which keeps every softmax row filled.
    """
    anchors_BN, starts_BN, valid_BN = blocks.anchors_BN, blocks.starts_BN, blocks.valid_BN
    size = blocks.block_size

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // size
        before = (key >= starts_BN[row, block]) & (key < anchors_BN[row, block])
        context = (key < context_length) & before & valid_BN[row, block]
        own = (key >= context_length) & ((key - context_length) // size == block)
        return context | own

    return visible
