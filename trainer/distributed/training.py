"""Training in several processes: `train.Training` with a target and a drafter in each, which torch keeps in step.

All processes load the data and the target, lay out every step alike and do their own share of it. What a step came to
is gathered, so that each judges it by the same figures and all decide alike: to stop, to save, to give up.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import Checkpoint
from trainer.config import Config, ConfigError
from trainer.distributed.ranks import Ranks, own_devices
from trainer.distributed.replica import GatheredFigures, RankReplica
from trainer.distributed.reporting import LeadingReporter
from trainer.distributed.world import World, join
from trainer.kernels import kernels_for
from trainer.micro_batch import MicroBatch
from trainer.model.blocks import generator_for
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.target import Target, drafter_dtype
from trainer.pipeline import Aborted, Crew, Worker
from trainer.replicas import check_equal
from trainer.report.reporter import Reporter
from trainer.steps import Figures, Share
from trainer.stopping import StopRequest
from trainer.train import Ending, Training, prepare, run


def train(config: Config, reporter: Reporter, stop: StopRequest, ranks: Ranks, *, must_resume: bool = False) -> Ending:
    """As `train.train` does, in each process. Raises `ConfigError` before training starts."""
    devices = own_devices(config, ranks, gpus=torch.cuda.device_count())
    config = config.model_copy(update={"devices": devices})
    world = join(ranks, torch.device(devices.drafter[0]))
    assert isinstance(reporter, LeadingReporter)
    world.watch(reporter.gone)
    try:
        make = functools.partial(RankTraining, world)
        ending = run(prepare(config, reporter, stop, must_resume=must_resume, make=make))
    except Exception as error:
        gone = world.failure_elsewhere(error) is not None
        if not gone and not isinstance(error, ConfigError):  # that one is said first
            world.tell_failure(f"process {ranks.rank}")
        if not gone or isinstance(error, ConfigError):  # which all may find out, none by the others' going
            raise
        return Ending(code=1, stuck=[])  # what broke here is that the other has gone, and that one has said why
    if ending.code == 0:
        world.leave()
    return ending


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What all processes hold together, in the one that leads; of it a checkpoint is made as of a replica."""

    state_bytes: int
    _weights: dict[str, Tensor]
    _moments: dict[str, Tensor]
    _averages: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def moments(self) -> dict[str, Tensor]:
        return self._moments

    def averages(self) -> dict[str, Tensor]:
        return self._averages


class RankTraining(Training):
    """One process's part of it, on one device."""

    def __init__(self, world: World, config: Config, reporter: Reporter, stop: StopRequest, targets: list[Target],
                 *data: Any) -> None:  # fmt: skip
        self.world = world
        super().__init__(
            config, reporter, stop, targets, *data, rank=world.ranks.rank, processes=world.ranks.size
        )  # fmt: skip
        self.refusals.no_culprit = "the loss of each process is finite, gradients are not"
        self._figures: list[GatheredFigures] = []
        """Of the last two steps that have begun here."""

    def _make_members(self, targets: list[Target], shape: DrafterShape) -> dict[int, RankReplica]:
        config, device = self.config, torch.device(self.config.devices.drafter[0])
        kernels = kernels_for(device, compile_on_cpu=config.compile_on_cpu, loss_kernel=config.loss.kernel)
        drafter = Drafter.fresh(shape, generator_for(config.seed, "weights"))
        member = RankReplica(
            drafter, targets[0].ends.to(device, drafter_dtype(config.drafter.dtype, device)), kernels, config, device,
            ranks=self.world.ranks, asked_to_stop=lambda: self.stop.requested,
        )  # fmt: skip
        return {self.rank: member}

    # --- the workers ---

    def run(self) -> Ending:
        self.stop.listen()
        ending = super().run()
        return dataclasses.replace(ending, code=1) if self.world.failure_elsewhere() else ending

    def drafter_thread(self, rank: int, place: int, gate: threading.Event, worker: Worker) -> None:
        try:
            super().drafter_thread(rank, place, gate, worker)
        except Exception as error:
            if not hasattr(error, "worker") and self.world.failure_elsewhere(error):
                raise Aborted from error  # the other has gone in the midst of what all do together
            raise

    def _note(self, worker: str, taken: list[MicroBatch], figures: Figures) -> None:
        assert isinstance(figures, GatheredFigures)
        own = Share.of(worker, taken, figures)
        for rank, (rows, amount) in enumerate(taken[0].whole):
            self._begun[rank] = own if rank == self.rank else Share(
                worker=f"drafter-{rank}", figures=figures.by_rank[rank], rows=rows, amount=amount, cursor=own.cursor,
                made=[],
            )  # fmt: skip
        self._figures = [*self._figures[-1:], figures]

    # --- between two steps ---

    def _is_to_stop(self) -> bool:
        """By what all knew when they began the step before: it is the same for all, and here by now."""
        if len(self._figures) < 2:
            return False
        self._figures[0].wait()
        return bool(self._figures[0].stops_R.any())

    def _evaluate(self, step: int) -> None:
        if self.evaluations is not None:
            super()._evaluate(step)
        else:
            self.members[self.rank].served()

    def _see_that_all_agree(self, step: int) -> None:
        member = self.members[self.rank]
        if not member.shards:
            hashes = self.world.from_all(int(member.hash()))
            check_equal({f"drafter-{rank}": own for rank, own in enumerate(hashes)}, step=step)

    def _look_again(self, step: int, share: Share) -> tuple[str, list[int]]:
        return "where is only looked for in one process (engine: threads)", share.rows

    def _save(self) -> None:
        member = self.members[self.rank]
        whole = Snapshot(
            state_bytes=member.state_bytes, _weights=member.weights(), _moments=member.moments(),
            _averages=member.averages(),
        )  # fmt: skip
        if self.world.ranks.leads:
            self._save_of(whole)

    # --- when something goes wrong ---

    def _watch(self, crew: Crew) -> None:
        super()._watch(crew)
        if crew.failed is None and (other := self.world.failure_elsewhere()):
            if (quiet_s := self.watchdog.quiet_s) > self.config.watchdog.least_s / 2:
                # Whoever gave up had to wait, and cannot know for whom of the others.
                self._tell_who_does_what(f"no step for {quiet_s:.1f} s when {other} gave up", crew)
            crew.fail(other, Aborted())  # which that one's own process reports

    def _abort(self, failed: str) -> None:
        if self.world.failure_elsewhere() is None:
            self.world.tell_failure(failed)
        super()._abort(failed)

    # --- around the run ---

    def go_on(self, *, must_resume: bool) -> None:
        """From the checkpoint that the process that leads finds; the others need not see it."""
        self.world.see_that_all_have(self.saves.must_keep)
        there: list[Checkpoint] = []

        def find() -> Checkpoint | None:
            there.extend(filter(None, [self.saves.find(must_resume=must_resume)]))
            return dataclasses.replace(there[0], weights={}, optimizer={}, averages={}) if there else None

        if found := self.world.from_leader(find):
            self.saves.start = found.state.get("start")
            self.restore(there[0] if there else found)
        elif start := self._start():
            self.begin_with(start)
        self.world.see_that_all_have({"weights to start from": self.saves.start})
        self.world.from_leader(self._see_that_there_is_room)

    def get_ready(self) -> None:
        self.warmup.record(averaged=True, several=False)
