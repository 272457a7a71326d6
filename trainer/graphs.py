"""Work of a device as CUDA graphs: what one call of a function tells the device is recorded, and launched as a whole.

A small drafter's step is hundreds of kernels that take microseconds each; the threads that launch them share one GIL,
so that three drafters together are no faster than one. Recorded, a step is two launches: forward and backward of a
micro-batch, and the optimizer (`replica.py`); the target's forward is one (`target.py`). In between, replicas exchange
their gradients.

All is recorded on the main thread, one after the other, while no worker runs: a recording forbids other threads of the
process what they may be about to do. What was recorded reads and writes the same memory each time it is launched: what
it works on is copied into its own inputs first, and whoever owns the graph alone launches it, on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]


class Graphs:
    """The graphs of one owner, on one device, by a key. Never two at once run, so they share their memory."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._graphs: dict[Hashable, tuple[Any, Inputs, Any]] = {}
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None

    def record(self, key: Hashable, inputs: Inputs, work: Callable[[Inputs], Any]) -> None:
        """Record `work` on copies of `inputs`, which the current stream has made. It has been called before, so that
        nothing compiles and all that it needs is there. Raises `RuntimeError` for what cannot be recorded."""
        own = {name: tensor.clone() for name, tensor in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # thread_local: other threads, autograd's own too, go on being allowed what this one is not.
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            made = work(own)
        self._graphs[key] = graph, own, made

    def launch(self, key: Hashable, inputs: Inputs) -> Any:
        """On the current stream, which is the owner's. Returns what `work` did: the same tensors each time."""
        graph, own, made = self._graphs[key]
        if own:
            torch._foreach_copy_(list(own.values()), [inputs[name] for name in own])
        graph.replay()
        return made
