"""What of a round is compiled where it is recorded as a CUDA graph: all that does not depend on the context's length.

Left to itself a round of a small target is a thousand kernels and more of a few microseconds each, and its time is that
of their number. Compiled are the target's decoder layers, the drafter's, and the arithmetic around them; each once for
a shape [rows, slots], whatever the layer and the length of the context, since attention is one kernel to the compiler
(`model/remembering.py`). What is drawn stays as it is: a sort of the vocabulary takes longer than what surrounds it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainer.model.remembering import numbered
from trainer.model.target import compiling, decoder_layers, layers_compiled


class AsWritten:
    """Nothing is compiled."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a call returns of a `function` without side effects, of tensors, modules and constants."""
        return function(*args)

    def layers_of(self, _model: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, a forward of the model runs its decoder layers this way."""
        return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled(AsWritten):
    """What torch cannot compile whole is an error, of any kind, of the first call."""

    backend: str = "inductor"

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        with compiling(), numbered():
            return _compiled(function, self.backend)(*args)

    def layers_of(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        for number, layer in enumerate(decoder_layers(model)):
            if any(getattr(module, "layer_idx", number) != number for module in layer.modules()):
                raise RuntimeError(f"{type(model).__name__} numbers its layers in a way of its own")
        return layers_compiled(model, self.backend)


@functools.cache
def _compiled(function: Callable[..., Any], backend: str) -> Any:
    return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)
