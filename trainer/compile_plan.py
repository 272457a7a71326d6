"""What compiles, when, and that nothing compiles later.

Each (device, shape) that training will meet is one unit. `warm_up` runs forward *and* backward of every unit, one
after the other, on the main thread before a worker exists, and then forbids compiling: so no thread can ever trace
while another calls a compiled kernel, which is what kills drafters elsewhere. On the CPU nothing compiles, and the
plan is empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

RECOMPILE_LIMIT = 64
"""Every device is a guard of its own; at torch's 8, further units would fall back to slow code without an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    device: str
    rows: int
    context_length: int
    anchors: int
    block_size: int

    def __str__(self) -> str:
        return f"device={self.device} shape={self.rows}x{self.context_length}+{self.anchors}x{self.block_size}"


def plan(
    devices: Sequence[torch.device], *, rows: int, context_length: int, anchors: int, block_size: int
) -> list[Unit]:
    """One unit per distinct CUDA device: all micro-batches of a run have one shape."""
    names = dict.fromkeys(str(device) for device in devices if device.type == "cuda")
    return [
        Unit(device=name, rows=rows, context_length=context_length, anchors=anchors, block_size=block_size)
        for name in names
    ]


def warm_up(units: Sequence[Unit], run_unit: Callable[[Unit], None], *, say: Callable[[str], None]) -> None:
    """Run every unit once, forward and backward, then forbid compiling. Call before any worker starts."""
    if not units:
        say("phase=compile_warmup units=0 (nothing compiles on the CPU)")
        return
    for number, unit in enumerate(units, start=1):
        started = time.monotonic()
        run_unit(unit)
        torch.cuda.synchronize(unit.device)
        say(f"phase=compile_warmup unit={number}/{len(units)} {unit} seconds={time.monotonic() - started:.1f}")
    torch.compiler.set_stance("fail_on_recompile")


def settle_thread(device: torch.device, *, cpu_threads: int) -> None:
    """Set what torch keeps per thread; first thing in every worker, and before a warm-up.

    Compiled code is guarded by these settings: a thread in which one differs would have to compile again, which after
    the warm-up is an error that names the guard.
    """
    torch.set_num_threads(cpu_threads)
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = RECOMPILE_LIMIT
    dynamo.automatic_dynamic_shapes = False
