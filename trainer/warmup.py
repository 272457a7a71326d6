"""Before a worker starts: every shape that the run will meet is compiled on every device, then recorded as CUDA graphs.

All on the main thread, one after the other, on micro-batches made as the target threads make them. `train.prepare` has
it compiled once (`compile_plan.py`); what is recorded depends on how many drafters there are, so that a run that has
lost one records again.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import CodeType

import torch
from torch import Tensor

from trainer import compile_plan
from trainer.config import Config, ConfigError
from trainer.data.order import Cursor
from trainer.data.rows import Rows
from trainer.feed import step_blocks, target_inputs
from trainer.micro_batch import MicroBatch
from trainer.model.blocks import Blocks
from trainer.model.target import Target
from trainer.replica import Replica
from trainer.report.reporter import Reporter
from trainer.report.throughput import Amount
from trainer.setup import keep_compiled_code


def settle(config: Config, member: Replica) -> None:
    """Make this thread one in which `member` trains."""
    compile_plan.settle_thread(
        member.device, cpu_threads=config.cpu_threads.drafter, compiles=member.kernels.compiles
    )  # fmt: skip


class Warmup:
    """`targets` and `members` are this process's own, by number and by rank: those that are left when it is asked. It
    is one of `processes` that are alike."""

    def __init__(self, config: Config, reporter: Reporter, rows: Rows, targets: Mapping[int, Target],
                 members: Mapping[int, Replica], *, processes: int = 1) -> None:  # fmt: skip
        self.config, self.reporter, self.rows = config, reporter, rows
        self.targets, self.members = targets, members
        compiling = [member.device for member in members.values() if member.kernels.compiles]
        self.share = config.batch_size // (len(config.devices.drafter) * processes)
        self.units = [unit for length in config.data.lengths for unit in compile_plan.plan(
            compiling, rows=self.share, context_length=length,
            anchors=config.anchors_at(length), block_size=config.drafter.block_size,
        )]  # fmt: skip

    def compile(self) -> None:
        """Everything, and forbid it afterwards. Raises `ConfigError` where this torch cannot be kept from it."""
        if self.units:
            compile_plan.check_torch()
        compiles_target = self.config.target.compile != "off" and self.config.cuda_graphs != "off"
        on = [torch.device(unit.device) for unit in self.units]
        on += [target.device for target in self.targets.values() if compiles_target]
        if any(device.type == "cuda" for device in on):
            keep_compiled_code(self.config, self.reporter, os.environ)
        compile_plan.warm_up(self.units, self._compile, say=self.reporter.say)

    def _compile(self, unit: compile_plan.Unit) -> Mapping[str, CodeType]:
        """Forward and backward of one unit of the compile plan, exactly as a drafter thread does it."""
        member = next(member for member in self.members.values() if str(member.device) == unit.device)
        settle(self.config, member)
        batch = self._batch(unit, member)
        with member.stream():
            member.loss_and_gradients(batch)
        return member.kernels.of(unit.shape).compiled

    def record(self, *, averaged: bool, several: bool) -> None:
        """What GPUs do in a step, unless the configuration forbids it: see `Replica.record`, `Target.record`."""
        if self.config.cuda_graphs == "off":
            return
        for number, target in self.targets.items():
            if target.device.type == "cuda":
                compile_plan.settle_thread(target.device, cpu_threads=1, compiles=False)
                # Of all buckets: also where drafters are on the CPU, for whom there are no units.
                batches = [self._rows(length)[0] for length in self.config.data.lengths]
                name = f"target-{number}"
                self._record(name, functools.partial(self._record_target, name, target, batches))
        for rank, member in self.members.items():
            if member.device.type == "cuda":
                settle(self.config, member)
                own = [self._batch(unit, member) for unit in self.units if unit.device == str(member.device)]
                self._record(
                    f"drafter-{rank}", functools.partial(member.record, own, averaged=averaged, several=several)
                )

    def _record(self, name: str, record: Callable[[], None]) -> None:
        record_or_say(name, record, reporter=self.reporter, wanted=self.config.cuda_graphs)

    def _record_target(self, name: str, target: Target, batches: Sequence[Sequence[Tensor]]) -> None:
        if self.config.target.compile != "off":
            try:
                with compile_plan.watch.lifted():  # no worker runs, and none will call what is compiled here
                    return target.record(batches, compiled=True)
            except Exception as error:  # whatever torch makes of a model that it has never seen
                why = (str(error).strip() or repr(error)).splitlines()[0]
                self.reporter.say(f"phase=compile_warmup graphs={name} layers are not compiled: {why}")
        return target.record(batches)

    def _rows(self, length: int) -> tuple[Sequence[Tensor], Blocks]:
        """What the target is given for a micro-batch of rows of this length, and its blocks."""
        # Any rows will do, cut to the length; there may be fewer of them than a share has.
        ids_BS, loss_mask_BS, starts_BS = self.rows.cut(torch.arange(self.share) % len(self.rows), length)
        blocks = step_blocks(self.config, ids_BS, loss_mask_BS, starts_BS, step=0)
        return target_inputs(self.config, ids_BS, blocks), blocks

    def _batch(self, unit: compile_plan.Unit, member: Replica) -> MicroBatch:
        inputs, blocks = self._rows(unit.context_length)
        target = next(iter(self.targets.values()))
        with target.stream():
            return member.accept(
                step=0, rows=[], features_BSF=target.features(*inputs), blocks=blocks, weight_sum=1.0, amount=Amount(),
                cursor=Cursor(),
            )  # fmt: skip


def record_or_say(name: str, record: Callable[[], None], *, reporter: Reporter, wanted: str) -> None:
    """Let worker `name` record what its device does; where torch cannot, the run goes on kernel by kernel, and says so,
    or ends with a `ConfigError` if graphs are `wanted` "on"."""
    started = time.monotonic()
    try:
        record()
        torch.cuda.synchronize()
    except (RuntimeError, torch.AcceleratorError) as error:
        why = (str(error).strip() or repr(error)).splitlines()[0]
        if wanted == "on":
            torch_, hint = f"torch {torch.__version__}", "cuda_graphs: auto would train without"
            raise ConfigError(f"cuda_graphs: {torch_} cannot record the work of {name}: {why}; {hint}") from error
        reporter.say(f"phase=compile_warmup graphs={name} none: every kernel is launched by itself, much slower: {why}")
        reporter.event("no_graphs", worker=name, why=why)
    else:
        reporter.say(f"phase=compile_warmup graphs={name} seconds={time.monotonic() - started:.1f}")
