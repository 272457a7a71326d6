"""How an engine's rounds get onto its device: as CUDA graphs, compiled or as they are written, or kernel by kernel.

What cannot be had is done without, and told: compiled code first, then graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.decode.compiling import AsWritten, Compiled
from trainer.graphs import Graphs

Work = Callable[[int, AsWritten], Tensor]
"""A round over so many tokens of context, and in which way."""


class Rounds:
    """Of one engine, on its `stream`; for contexts of these `lengths`. On the CPU there is no stream, and nothing is
    recorded."""

    def __init__(self, lengths: Sequence[int], stream: Any, *, graphs: bool, compiled: bool) -> None:
        self.lengths = lengths
        self.way = AsWritten()
        """Of rounds that were not recorded."""
        self.preparing_s = 0.0
        """What `prepare` did took so long."""
        self._graphs = Graphs(stream) if stream is not None and graphs else None
        self._compiles = compiled

    @property
    def recorded(self) -> bool:
        """Whether they are launched as CUDA graphs."""
        return self._graphs is not None and all(length in self._graphs for length in self.lengths)

    @property
    def compiled(self) -> bool:
        """Whether these were compiled."""
        return self.recorded and self._compiles

    def prepare(self, work: Work) -> list[str]:
        """Record `work` for all lengths of context, on the current stream. Returns what torch cannot, and why, if so:
        rounds are then slower. Compiles, so that it belongs on the main thread while no other runs."""
        started, said = time.perf_counter(), []
        if self._graphs is not None and self._compiles:
            try:
                self._record(self._graphs, work, Compiled())
            except Exception as error:  # whatever torch makes of a model that it has never seen
                self._compiles = False
                self._graphs.clear()
                said.append(f"rounds are not compiled, slower: {_reason(error)}")
        if self._graphs is not None and not self._compiles:
            try:
                self._record(self._graphs, work, self.way)
            except (RuntimeError, torch.AcceleratorError) as error:
                self._graphs = None
                said.append(f"no CUDA graphs, every kernel is launched by itself, much slower: {_reason(error)}")
        self.preparing_s = time.perf_counter() - started
        return said

    def _record(self, graphs: Graphs, work: Work, way: AsWritten) -> None:
        for length in self.lengths:
            work(length, way)  # what compiles does so here, and libraries make their workspaces
            graphs.record(length, {}, lambda _inputs, length=length: work(length, way))
        graphs.stream.synchronize()

    def launch(self, length: int, work: Work) -> Tensor:
        """A round, on the current stream; `work` where it is not recorded."""
        if self._graphs is not None and length in self._graphs:
            made: Tensor = self._graphs.launch(length, {})
            return made
        return work(length, self.way)


def _reason(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
