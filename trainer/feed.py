"""From rows to micro-batches on the drafters' devices: one loader thread, and any number of target threads.

A step is cut into equal *shares*, as many as the configuration has drafters. The loader draws a step's anchors, lays
out its blocks, and hands share `i` of step `s` to a target thread by the number `s * shares + i` alone; that one runs
the target on it and puts the result into the channel of its share, which its drafter empties. So the same batches come
out in the same order with one target thread or several, and everything between two stages is bounded.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer import compile_plan
from trainer.clock import Span, mark
from trainer.config import Config
from trainer.data.order import Cursor
from trainer.data.rows import Rows
from trainer.micro_batch import MicroBatch
from trainer.model.blocks import Blocks, generator_for, lay_out, pick_anchors
from trainer.model.flops import TargetCost, drafter_flop_of
from trainer.model.target import Target
from trainer.pipeline import Channel, Worker
from trainer.replica import Replica
from trainer.report.throughput import Amount, Throughput


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One share of one step, before the target has seen it; in memory from which a GPU can be filled meanwhile."""

    step: int
    share: int
    rows: list[int]
    ids_BS: Tensor
    blocks: Blocks
    weight_sum: float
    amount: Amount
    cursor: Cursor
    whole: Sequence[tuple[list[int], Amount]]
    """See `MicroBatch`."""


def step_blocks(config: Config, ids_BS: Tensor, loss_mask_BS: Tensor, starts_BS: Tensor, *, step: int) -> Blocks:
    """The blocks of a step's rows. A row's anchors depend on (seed, step, row), not on how rows are shared out."""
    drafter, count = config.drafter, config.anchors_at(ids_BS.shape[1])
    drawn = [
        pick_anchors(mask_S, count, generator_for(config.seed, "anchors", step, row), starts_S=starts_S)
        for row, (mask_S, starts_S) in enumerate(zip(loss_mask_BS, starts_BS, strict=True))
    ]
    anchors_BN, valid_BN = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    return lay_out(
        ids_BS, loss_mask_BS, anchors_BN, valid_BN, starts_BS=starts_BS,
        block_size=drafter.block_size, mask_token_id=drafter.mask_token_id, gamma=config.loss.gamma(drafter.block_size),
    )  # fmt: skip


def target_inputs(config: Config, ids_BS: Tensor, blocks: Blocks) -> Sequence[Tensor]:
    """What `Target.features` needs to know of these rows."""
    return (ids_BS, blocks.positions_BS) if config.data.packing else (ids_BS,)


class Feed:
    """What lies between the data and the drafters from step `first` on. `owners[i]` is the replica that share i is for,
    `targets` the target of each target thread by its number. Of `processes` that work on a run, each with as many
    owners, this one is number `rank`, and its shares come after those of the ones before."""

    def __init__(self, config: Config, rows: Rows, targets: Mapping[int, Target], owners: Sequence[Replica], *,
                 first: int, cursor: Cursor, rank: int = 0, processes: int = 1) -> None:  # fmt: skip
        self.config, self.rows, self.targets, self.owners = config, rows, targets, owners
        self._count, self._offset = len(owners) * processes, len(owners) * rank
        self.first, self._cursor = first, cursor
        self._timer = owners[0].timer
        self._pinned = any(replica.device.type == "cuda" for replica in owners)
        self._works: dict[int, Channel[Work | None]] = {number: Channel(config.queue_depth) for number in targets}
        self._shares: list[Channel[MicroBatch]] = [Channel(config.queue_depth, first=first) for _ in owners]
        target = next(iter(targets.values()))
        self._cost = TargetCost.of(target.trunk, layers=target.depth)
        self.throughputs = {number: Throughput(workers=1, now=time.monotonic()) for number in targets}

    # --- what the threads do ---

    def load(self, worker: Worker) -> None:
        """Lay out step after step, to the last one."""
        compile_plan.settle_thread(torch.device("cpu"), cpu_threads=1, compiles=False)
        channels, cursor = list(self._works.values()), self._cursor
        for step in range(self.first, self.config.steps + 1):
            worker.step, worker.doing = step, "draws anchors"
            with self._timer.measure("data", torch.device("cpu"), step):
                works, cursor = self._lay_out(step, cursor)
            for work in works:
                channels[(step * len(works) + work.share) % len(channels)].put(work)
        for channel in channels:
            channel.put(None)

    def run_target(self, number: int, worker: Worker) -> None:
        """Run the target of thread `number` on what the loader has for it, and hand the features on."""
        target, works = self.targets[number], self._works[number]
        compile_plan.settle_thread(target.device, cpu_threads=self.config.cpu_threads.target, compiles=False)
        with target.stream():
            while (work := works.get()) is not None:
                worker.step, worker.doing = work.step, "runs the target"
                batch = self._made(work, target, number)
                self.throughputs[number].add([work.amount], now=time.monotonic())
                self._shares[work.share].put(batch, work.step)

    def again(self, step: int, cursor: Cursor, share: int, made_by: int) -> MicroBatch:
        """A micro-batch that was there before, made once more by the model of the same target thread; from any thread.
        `cursor` is where the data stood before the step."""
        works, _ = self._lay_out(step, cursor)
        target = self.targets[made_by].again()
        with target.stream():
            batch = self._made(works[share], target, made_by)
        if batch.ready is not None:
            batch.ready.synchronize()  # the target's features go with the target
        return batch

    def _made(self, work: Work, target: Target, number: int) -> MicroBatch:
        begin = mark(target.device)
        with self._timer.measure("target forward", target.device, work.step):
            features_BSF = target.features(*target_inputs(self.config, work.ids_BS, work.blocks))
        made, owner = Span(begin=begin, end=mark(target.device)), self.owners[work.share]
        with target.handing_over(features_BSF, owner.device):
            batch = owner.accept(
                step=work.step, rows=work.rows, features_BSF=features_BSF, blocks=work.blocks,
                weight_sum=work.weight_sum, amount=work.amount, cursor=work.cursor, made=made, made_by=number,
            )  # fmt: skip
        return dataclasses.replace(batch, whole=work.whole)

    def get(self, share: int) -> MicroBatch:
        return self._shares[share].get()

    def close(self) -> None:
        """Whoever waits here, or will, leaves through `Aborted`."""
        for channel in (*self._works.values(), *self._shares):
            channel.close()

    @property
    def queued(self) -> int:
        """Micro-batches that drafters could take."""
        return sum(len(channel) for channel in self._shares)

    @property
    def room(self) -> int:
        return sum(channel.size for channel in self._shares)

    # --- one step ---

    def _lay_out(self, step: int, cursor: Cursor) -> tuple[list[Work], Cursor]:
        indices, cursor = self.rows.take(cursor, self.config.batch_size)
        ids_BS, loss_mask_BS, starts_BS = self.rows.cut(indices, self.rows.padded_to(indices))
        blocks = step_blocks(self.config, ids_BS, loss_mask_BS, starts_BS, step=step)
        weight_sum = blocks.weights_BNk.sum().item()
        size = self.config.batch_size // self._count
        parts = [slice(share * size, (share + 1) * size) for share in range(self._count)]
        whole = [
            (indices[part].tolist(), self._amount(blocks.rows(part), self.rows.lengths_R[indices[part]]))
            for part in parts
        ]  # fmt: skip
        works = []
        for share in range(len(self.owners)):
            part, (rows, amount) = parts[self._offset + share], whole[self._offset + share]
            works.append(Work(
                step=step, share=share, rows=rows, ids_BS=self._pin(ids_BS[part]),
                blocks=blocks.rows(part).each(self._pin),
                weight_sum=weight_sum, amount=amount, cursor=cursor, whole=whole,
            ))  # fmt: skip
        return works, cursor

    def _amount(self, blocks: Blocks, lengths_B: Tensor) -> Amount:
        owner = self.owners[0]
        vocabulary = owner.ends.head_VH.shape[0]
        return Amount(
            tokens=int(lengths_B.sum()), positions=int(blocks.weights_BNk.count_nonzero()),
            target_flop=self._cost.flop(blocks.positions_BS),
            drafter_flop=drafter_flop_of(blocks, owner.drafter.shape, vocabulary=vocabulary),
        )  # fmt: skip

    def _pin(self, tensor: Tensor) -> Tensor:
        """Here, where nobody waits for it; a copy from memory that may be paged out would hold up its thread."""
        return tensor.pin_memory() if self._pinned else tensor
