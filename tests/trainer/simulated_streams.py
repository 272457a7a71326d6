"""CUDA streams on the CPU that are as late as CUDA's may be: what they are told is put off, and every two operations on
the same memory of which nothing says which comes first are named.

A CPU does everything in the order in which it was told, and an idle GPU mostly does: there, order that nobody asked for
is no fault that a test could find. `Machine.installed` puts streams and events of its own in the place of torch.cuda's.
What they are told with `Machine.tensor`s is looked at twice: `races` follows from who waits for whom (vector clocks),
and takes no luck; `run` does it all in one of the orders that are allowed, for the values. There is one device: of what
torch orders by itself in a copy between two there is nothing. Memory is CUDA's: given away, in the order of the stream
on which it was made, as soon as its last tensor is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import trainer

TRAINER, TESTS = str(Path(trainer.__file__).parent), str(Path(__file__).parent)
CUDA = torch.device("cuda", 0)
Clock = Counter[int]  # how many operations of each stream have come before


def site() -> str:
    """Where in the trainer this is told, from the inside outwards; or else where in a test."""
    told = [(frame.f_code.co_filename, f"{frame.f_code.co_name}:{line}") for frame, line in traceback.walk_stack(None)]
    tests = [place for file, place in told if file.startswith(TESTS) and file != __file__]
    return " < ".join([place for file, place in told if file.startswith(TRAINER)] or tests[:1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    said: str
    stream: int
    clock: Clock  # with itself
    run: Callable[[], Any]


class Machine:
    """A device with its streams. `dropped`: a `site` at which waiting for an event does nothing."""

    def __init__(self, *, dropped: str | None = None) -> None:
        self.dropped = dropped
        self.waits: set[str] = set()
        """The sites at which streams are told to wait."""
        self.races: set[tuple[str, str]] = set()
        """Two operations each, the one that was told first first: in no order, on the same memory, not both reading."""
        self._operations: list[Operation] = []
        self._memories: list[Tensor] = []
        self._touched: dict[int, list[tuple[Operation, int, int, bool]]] = defaultdict(list)
        """By storage: the operation, from which to which address, whether it writes."""
        self._numbers = itertools.count()
        self._here = threading.local()
        self._telling = threading.RLock()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("current_stream", "set_stream", "stream"):
                patch.setattr(torch.cuda, name, getattr(self, name))
            patch.setattr(torch.cuda, "Stream", lambda _device: Stream(self))
            patch.setattr(torch.cuda, "Event", lambda external=False: Event())
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            yield

    def current_stream(self, _device: Any = None) -> Stream:
        return self._here.stream

    def set_stream(self, stream: Stream | None) -> None:
        self._here.stream = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        self.set_stream(stream)
        yield
        self.set_stream(before)

    def tensor(self, values: Tensor) -> Late:
        return self.make("tensor", values.clone(), lambda: values)

    def make(self, name: str, room: Tensor, fill: Callable[[], Tensor], reads: Sequence[Tensor] = ()) -> Late:
        self._memories.append(room)
        self.tell(name, lambda: room.copy_(fill()), reads=reads, writes=[room])
        return Late(room, Memory(self, room))

    def tell(self, name: str, run: Callable[[], Any], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (),
             stream: Stream | None = None) -> None:  # fmt: skip
        with self._telling:
            stream = stream or self.current_stream()
            stream.clock[stream.number] += 1
            said = f"{name} on stream {stream.number} at {site()}"
            told = Operation(said=said, stream=stream.number, clock=stream.clock.copy(), run=run)
            self._operations.append(told)
            for tensor, writing in (*((one, False) for one in reads), *((one, True) for one in writes)):
                assert tensor.is_contiguous(), "what lies in between would count as touched"
                low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                touched = self._touched[tensor.untyped_storage().data_ptr()]
                for other, start, end, written in touched:
                    after = told.clock[other.stream] >= other.clock[other.stream]
                    if (writing or written) and low < end and start < high and not after:
                        self.races.add((other.said, told.said))
                touched.append((told, low, high, writing))

    def run(self, seed: int) -> None:
        """All that was told, in an order that streams and events allow: the same streams hurry for a while."""
        draw, done, queues = random.Random(seed), Clock(), defaultdict[int, list[Operation]](list)
        for memory in self._memories:
            memory.fill_(math.nan)
        for one in reversed(self._operations):
            queues[one.stream].append(one)
        order = sorted(queues)
        for number in range(len(self._operations)):
            if number == 0 or draw.random() < 0.05:
                draw.shuffle(order)
            heads = (queues[stream][-1] for stream in order if queues[stream])
            one = next(one for one in heads if (one.clock - done).total() == 1)  # all before it is done
            queues[one.stream].pop().run()
            done[one.stream] += 1


class Stream:
    def __init__(self, machine: Machine) -> None:
        self.number, self.clock, self._machine = next(machine._numbers), Clock(), machine

    def wait_event(self, event: Event) -> None:
        """For where it was recorded last before now."""
        self._machine.waits.add(site())
        if site() != self._machine.dropped:
            self.clock |= event.clock


class Event:
    clock = Clock()

    def record(self, stream: Stream) -> None:
        self.clock = stream.clock.copy()


class Memory:
    """Held by all tensors in it."""

    def __init__(self, machine: Machine, room: Tensor) -> None:
        self.machine, self._room, self._stream = machine, room, machine.current_stream()

    def __del__(self) -> None:
        room = self._room
        self.machine.tell("free", lambda: room.fill_(math.nan), writes=[room], stream=self._stream)


class Late(Tensor):
    """A tensor on the machine; `content` is what it holds after `run`."""

    device = CUDA
    content: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, content: Tensor, memory: Memory) -> Late:
        made = Tensor._make_wrapper_subclass(cls, content.shape, dtype=content.dtype)
        made.content, made.memory = content, memory
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "device"}  # which a CPU's torch lacks
        return super().__torch_function__(func, types, args, given)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, given = tree_map(lambda one: one.content if isinstance(one, Late) else one, (args, kwargs or {}))
        memory = next(one.memory for one in tree_leaves(args) if isinstance(one, Late))
        if func.is_view:
            return tree_map(lambda view: Late(view, memory), func(*own, **given))
        touched: dict[bool, list[Tensor]] = {False: [], True: []}
        for argument, values in zip(func._schema.arguments, own, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            touched[writes] += [one for one in tree_leaves(values) if isinstance(one, Tensor)]
        name, work = func.overloadpacket.__name__, lambda: func(*own, **given)
        if touched[True]:
            memory.machine.tell(name, work, reads=touched[False], writes=touched[True])
            return args[0] if func._schema.returns else None
        room = work()  # of the shape; what is in it comes later
        if name == "empty_like":
            return memory.machine.make(name, room, lambda: torch.full_like(room, math.nan))
        return memory.machine.make(name, room, work, touched[False])
