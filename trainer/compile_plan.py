"""What compiles, when, and that nothing compiles later.

Each (device, shape) that training will meet is one unit: a bucket of the data on a device. `warm_up` runs forward *and*
backward of every unit, one after the other, on the main thread before a worker exists, and then forbids compiling, in
two ways that see different things: torch's stance refuses a call that no compiled code fits, and names the guard; the
`Watch` refuses every start of the compiler, the lazy one of a backward in an autograd thread too. So no thread can ever
trace while another calls a compiled kernel, which is what kills drafters elsewhere (docs/compile-race.md).
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from trainer.config import ConfigError

RECOMPILE_LIMIT = 64
"""Every device is a guard of its own; at torch's 8, further units would fall back to slow code without an error."""


class SeveralForms(RuntimeError):
    """A function has been compiled for several sets of guards; threads that call it would disturb each other."""


class LateCompile(RuntimeError):
    """Something would have been compiled while workers run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    device: str
    rows: int
    context_length: int
    anchors: int
    block_size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of its micro-batches; see `kernels.Shape`."""
        return self.rows, self.context_length, self.anchors

    def __str__(self) -> str:
        return f"device={self.device} shape={self.rows}x{self.context_length}+{self.anchors}x{self.block_size}"


def plan(
    devices: Sequence[torch.device], *, rows: int, context_length: int, anchors: int, block_size: int
) -> list[Unit]:
    """One unit per distinct device among `devices`, those on which something compiles, for micro-batches of one
    shape."""
    return [
        Unit(device=name, rows=rows, context_length=context_length, anchors=anchors, block_size=block_size)
        for name in dict.fromkeys(str(device) for device in devices)
    ]


class Watch:
    """Counts every start of the compiler in this process, and, once sealed, refuses it."""

    def __init__(self) -> None:
        self.compiles = 0
        self.sealed = False

    def open(self) -> None:
        from torch._dynamo.callback import callback_handler

        self.sealed = False
        torch.compiler.set_stance("default")
        if self._starting not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._starting)

    def seal(self) -> None:
        torch.compiler.set_stance("fail_on_recompile")
        self.sealed = True

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Allow compiling inside, for what is no part of a run."""
        was = self.sealed
        self.open()
        try:
            yield
        finally:
            if was:
                self.seal()

    def refuse_if_sealed(self, what: str) -> None:
        """Raises `LateCompile` for `what`, which would have to be compiled, after the warm-up."""
        if self.sealed:
            raise LateCompile(f"{threading.current_thread().name}: {what} is not in the compile plan")

    def _starting(self, what: Any = None) -> None:
        self.compiles += 1
        if self.sealed:
            trigger = getattr(getattr(what, "callback_trigger", None), "name", "DYNAMO").lower()
            name = threading.current_thread().name
            raise LateCompile(
                f"{name}: torch began to compile ({trigger}) after the warm-up: while other workers run, that can kill"
                " them; a shape, a setting or a function is not in the compile plan"
            )


watch = Watch()


NEEDED = (
    "torch.compiler.set_stance", "torch._dynamo.callback.callback_handler.register_start_callback",
    "torch._dynamo.eval_frame._debug_get_cache_entry_list", "torch._dynamo.config.recompile_limit",
    "torch._dynamo.config.automatic_dynamic_shapes", "torch.nn.attention.flex_attention.flex_attention",
)  # fmt: skip
"""What the plan is made of; some of it is no promise of torch's."""


def check_torch() -> None:
    """Raises `ConfigError` where this torch lacks what the plan needs: without it a late compile would go unseen."""
    if missing := [name for name in NEEDED if not _is_there(name)]:
        raise ConfigError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, by which threads are kept from compiling; install"
            " one from 2.11 on that has it"
        )


def _is_there(dotted: str) -> bool:
    module, *attributes = dotted.split(".")
    found: Any = importlib.import_module(module)
    for number, attribute in enumerate(attributes, start=1):
        if not hasattr(found, attribute):
            try:
                importlib.import_module(".".join([module, *attributes[:number]]))
            except ImportError:
                return False
        found = getattr(found, attribute, None)
    return found is not None


def warm_up(units: Sequence[Unit], run_unit: Callable[[Unit], Mapping[str, CodeType]], *, say: Callable[[str], None]
            ) -> None:  # fmt: skip
    """Run every unit once, forward and backward, then forbid compiling. Call before any worker starts.

    `run_unit` returns the code of what it has had compiled, by name."""
    if not units:
        say("phase=compile_warmup units=0 (nothing compiles on the CPU)")
        return
    watch.open()
    for number, unit in enumerate(units, start=1):
        started, before = time.monotonic(), watch.compiles
        codes = run_unit(unit)
        if unit.device != "cpu":
            torch.cuda.synchronize(unit.device)
        seconds, count = time.monotonic() - started, watch.compiles - before
        say(f"phase=compile_warmup unit={number}/{len(units)} {unit} compiled={count} seconds={seconds:.1f}")
        _check_forms(codes)
    watch.seal()


def _check_forms(codes: Mapping[str, CodeType]) -> None:
    """A search through the list of one is undisturbed by others that put what they found at its head."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    for name, code in codes.items():
        if (count := len(_debug_get_cache_entry_list(code))) > 1:
            raise SeveralForms(f"{name} was compiled {count} times: give each form a function of its own (kernels.py)")


def with_own_code(function: FunctionType, name: str) -> FunctionType:
    """The same function with a code object of its own, by which torch keeps what it has compiled."""
    code = function.__code__.replace(co_name=name)
    own = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def settle_thread(device: torch.device, *, cpu_threads: int, compiles: bool) -> None:
    """Set what torch keeps per thread; first thing in every worker, and before a warm-up.

    Compiled code is guarded by these settings: a thread in which one differs would have to compile again, which after
    the warm-up is an error that names the guard.
    """
    torch.set_num_threads(cpu_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if (current := torch.cuda.current_device()) != (device.index or 0):
            raise RuntimeError(f"this thread is to work on {device} and is on cuda:{current}")
    if not compiles:
        return
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = RECOMPILE_LIMIT
    dynamo.automatic_dynamic_shapes = False
    dynamo.optimize_ddp = False  # it would cut a layer where DDP cuts the gradients
