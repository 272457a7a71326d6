"""How many bytes of tensors are alive while something runs, now and at the most, on devices that keep no such account.

Every operation's result is looked at as it is made: storages that are new are added, and taken off again when the last
tensor lets go of them. So it is exact for what torch's operations make (an operation's scratch memory is not seen), on
the CPU for a real step, and on the `meta` device for one that is only planned: `work.py` and the doctor's
measurement count the same way. Counts what this thread does, autograd on the CPU included.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside a `with`. What was there before is not counted, whatever becomes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._paused = False
        self._sizes: dict[int, int] = {}
        """Of the storages that are alive, by their address; those from before have none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._add(tensor, made_here=False)
        made = function(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._add(tensor, made_here=True)
        return made

    def made(self, tensors: Iterable[Tensor]) -> None:
        """Count these too, which were made where nobody looked."""
        for tensor in tensors if not self._paused else ():
            self._add(tensor, made_here=True)

    def passing(self, size: int) -> None:
        """So many bytes more were there for a moment."""
        if not self._paused:
            self.peak = max(self.peak, self.now + size)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """As if nothing happened inside."""
        self._paused = True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._paused = False

    def _add(self, tensor: Tensor, *, made_here: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = self._sizes[key] = storage.nbytes() if made_here else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def bytes_of(*tensors: Tensor) -> int:
    """Of their storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
