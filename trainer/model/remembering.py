"""What was read before, for models that go on from it: whoever decodes lends them a memory, and they attend through it.

To torch.compile such an attention is one kernel that it does not look into (`attend`): which memory it is, which layer
of it, and how much of that is looked at are told beside the call, so that one compiled layer does for all of them, and
for contexts of every length.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Keys and values of earlier tokens; see `decode/memory.py`."""

    def attend(self, layer: int, query_BHTD: Tensor, kv_2BGTD: Tensor, *, scale: float | None) -> Tensor:
        """Attention [B, T, H, D], in this order in memory, to what is remembered, once these keys and values are."""


class _Here(threading.local):
    memory: Memory | None = None
    layer: int = 0
    """That is being computed."""
    numbered: bool = False
    """Whether somebody outside says which layer that is; else the layer itself does, by what compiled code would be
    one layer's own."""


here = _Here()


# What compiled code asks is a constant of it, found out by calling these: what torch 2.11 reads of a `threading.local`
# by itself is its class's, of no thread. So code that is compiled in one case must not be called in the other.


@torch.compiler.assume_constant_result
def lent() -> bool:
    """Whether a memory is lent to this thread."""
    return here.memory is not None


@torch.compiler.assume_constant_result
def is_numbered() -> bool:
    """Whether this thread is inside `numbered`."""
    return here.numbered


@contextlib.contextmanager
def remembering(memory: Memory) -> Iterator[None]:
    """What this thread asks of models inside attends through `memory`: no cache of transformers', which every version
    names otherwise, and none of whose rows may be of different lengths."""
    here.memory = memory
    try:
        yield
    finally:
        here.memory = None


@contextlib.contextmanager
def numbered() -> Iterator[None]:
    """Inside, `run_layer` is how layers are run, and their attention is a kernel of its own."""
    was, here.numbered = here.numbered, True
    try:
        yield
    finally:
        here.numbered = was


def run_layer(number: int, layer: Any, *args: Any, **options: Any) -> Any:
    """Call `layer`, which is the one of this number."""
    here.layer = number
    return layer(*args, **options)


def attend(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention [B, T, H, D] of the layer that is being computed, through the memory that is lent."""
    query_BHTD, kv_2BGTD = query_BHTD.contiguous(), torch.stack((key_BGTD, value_BGTD))
    found: Tensor = (_attend if is_numbered() else _through_memory)(query_BHTD, kv_2BGTD, scale)
    return found


def _through_memory(query_BHTD: Tensor, kv_2BGTD: Tensor, scale: float | None) -> Tensor:
    assert here.memory is not None
    return here.memory.attend(here.layer, query_BHTD, kv_2BGTD, scale=scale)


@torch.library.custom_op("trainer::attend", mutates_args=(), schema="(Tensor query, Tensor kv, float? scale) -> Tensor")
def _attend(query: Tensor, kv: Tensor, scale: float | None) -> Tensor:
    return _through_memory(query, kv, scale)


@_attend.register_fake
def _shape(query: Tensor, _kv: Tensor, _scale: float | None) -> Tensor:
    rows, heads, tokens, size = query.shape
    return query.new_empty(rows, tokens, heads, size)
