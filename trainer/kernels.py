"""The hot functions of a step, and which of them are compiled: the drafter's layers, the block mask, the head's loss.

The device alone chooses, once, when a replica is made; asking whether something is compiling would choose wrongly in
one thread while another compiles. On CUDA whole layers are compiled, with FlexAttention inside. On the CPU everything
runs as it is written, over FlexAttention's twin, since FlexAttention has no backward there; `aot_eager` traces it all
the same, as on a GPU but without generating code, so that the rules of the compile plan can be broken, and tested, on
any machine.

Threads share compiled functions: a layer's weights are inputs of its compiled form, so one serves all layers of all
replicas on a device. But no function is ever compiled *twice*. torch keeps the compiled forms of a function in a list
that a call searches while others reorder it, and a call that is passed by in that shuffle finds nothing that fits
(docs/compile-race.md). So whatever would be another form (another device, another shape of a micro-batch, the first
layer, whose input needs no gradient, a shorter last chunk) is a function of its own here, and `compile_plan.py` checks
that each has one form.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer import compile_plan
from trainer.model import liger
from trainer.model.attention import Attention, DenseAttention, SparseAttention
from trainer.model.loss import PLAIN, HeadLoss

Rope = tuple[Tensor, Tensor]
RunLayer = Callable[[Any, Tensor, Tensor, Rope, Any], Tensor]


Shape = tuple[int, int, int]
"""Of a micro-batch: rows, context length, anchors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One set, for micro-batches of one shape."""

    attention: Attention
    first_layer: RunLayer
    """(layer, slots [B, T, H], context [B, S, H], rope, mask) -> slots; the slots need no gradient."""
    layer: RunLayer
    """The same for the layers after it."""
    head_loss: HeadLoss
    compiled: dict[str, types.CodeType] = field(default_factory=dict)
    """The code of what torch.compile was given, by a name for people; empty where nothing is compiled."""


class KernelSets:
    """A device's sets, one for each shape of a micro-batch; one for all where nothing is compiled."""

    def __init__(self, device: torch.device, backend: str | None, head_loss: HeadLoss) -> None:
        self.device, self._head_loss = device, head_loss
        self.compiles = backend is not None
        self._backend = backend
        self._sets: dict[Shape, Kernels] = {}
        self._plain = plain(DenseAttention(), head_loss)
        self._lock = threading.Lock()

    def of(self, shape: Shape) -> Kernels:
        """The set for `shape`. What compiles is made by the warm-up; a shape that it has not met is a `LateCompile`."""
        if self._backend is None:
            return self._plain
        if found := self._sets.get(shape):
            return found
        with self._lock:
            if shape not in self._sets:
                compile_plan.watch.refuse_if_sealed(f"a micro-batch of {named(shape)} on {self.device}")
                self._sets[shape] = _compiled(f"on {self.device} for {named(shape)}", self._backend, self._head_loss)
            return self._sets[shape]


def named(shape: Shape) -> str:
    rows, length, anchors = shape
    return f"{rows} x ({length} tokens, {anchors} anchors)"


@functools.cache
def kernels_for(device: torch.device, *, compile_on_cpu: str = "off", loss_kernel: str = "auto") -> KernelSets:
    """Those of a device, which its replicas share. `compile_on_cpu` is off or aot_eager; on CUDA everything is
    compiled, whatever it says. `loss_kernel` as in the configuration."""
    head_loss = liger.head_loss() if loss_kernel == "liger" else PLAIN[loss_kernel != "chunked"]
    if device.type == "cuda":
        return KernelSets(device, "inductor", head_loss)
    return KernelSets(device, None if compile_on_cpu == "off" else compile_on_cpu, head_loss)


def plain(attention: Attention, head_loss: HeadLoss = PLAIN[True]) -> Kernels:
    """Nothing compiled."""

    def layer(module: Any, slots_BTH: Tensor, context_BSH: Tensor, rope: Rope, mask: Any) -> Tensor:
        result: Tensor = module(slots_BTH, context_BSH, rope, attention, mask)
        return result

    return Kernels(attention=attention, first_layer=layer, layer=layer, head_loss=head_loss)


def _compiled(where: str, backend: str, head_loss: HeadLoss) -> Kernels:
    codes: dict[str, types.CodeType] = {}

    def compiled(name: str, function: Any, **options: Any) -> Any:
        own = compile_plan.with_own_code(function, name)
        codes[f"{name} {where}"] = own.__code__
        return torch.compile(own, dynamic=False, fullgraph=True, backend=backend, **options)

    attention: Attention = SparseAttention(compiled) if backend == "inductor" else DenseAttention()
    as_written = plain(attention)
    return Kernels(
        attention=attention,
        first_layer=compiled("first_layer", as_written.layer),
        layer=compiled("layer", as_written.layer),
        head_loss=head_loss if not head_loss.compiles else dataclasses.replace(
            head_loss, chunk=compiled("chunk_loss", head_loss.chunk),
            last_chunk=compiled("last_chunk_loss", head_loss.last_chunk),
        ),
        compiled=codes,
    )
