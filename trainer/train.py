"""READ FIRST: a training run from top to bottom; the loop is `Training.drafter_thread`.

`train` loads the data and the target, resumes, warms up what compiles (`warmup.py`), and starts the workers: a loader
and the target threads, which fill a channel for each share of a step (`feed.py`), and one drafter thread per replica.
All replicas take an optimizer step together; between two meetings of theirs replica 0 alone judges and logs the step
*before*, whose figures have reached the host by now, so that no device ever waits for a thread. Where something hangs
on this very step (a checkpoint, the last step, a signal) it waits for this one's figures too.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import compile_plan, kept, regroup, starting
from trainer.checkpoint import Checkpoint
from trainer.clock import Timer
from trainer.config import Config, expand_path
from trainer.data.order import Cursor
from trainer.data.rows import Rows, load_rows
from trainer.decode.acceptance import Acceptance
from trainer.decode.in_training import evaluations_for
from trainer.feed import Feed
from trainer.micro_batch import MicroBatch
from trainer.model.drafter import DrafterShape
from trainer.model.target import Target, drafter_shape, load_targets, load_tokenizer, see_that_documents_stay_apart
from trainer.nonfinite import Refusals, first_trouble
from trainer.pipeline import Aborted, Crew, Worker
from trainer.replica import Replica
from trainer.replicas import Replicas, check_equal, weight_hash
from trainer.report.reporter import Reporter
from trainer.report.stages import Stages
from trainer.report.tally import Tally
from trainer.saves import Rhythm, Saves, what_must_stay
from trainer.schedule import learning_rate
from trainer.setup import make_replicas, on_this_machine, report_data
from trainer.starting import Start
from trainer.steps import Figures, Share, Step
from trainer.stopping import StopRequest
from trainer.warmup import Warmup, settle
from trainer.watchdog import NoProgress, Watchdog, stacks, who_holds_up

FAILED_WORKERS_TIMEOUT_S = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    code: int
    stopped: bool = False
    stuck: list[str]
    """Workers that would not end."""


def train(config: Config, reporter: Reporter, stop: StopRequest, *, must_resume: bool = False) -> Ending:
    """Train to the last step, or to the step that a signal interrupts. Raises `ConfigError` before training starts."""
    return run(prepare(config, reporter, stop, must_resume=must_resume))


def run(training: Training) -> Ending:
    """The steps that are left of it."""
    config, reporter, stop = training.config, training.reporter, training.stop
    if training.steps_done >= config.steps:
        reporter.say(f"nothing to do: step {training.steps_done} of {config.steps} is done; raise steps to go on")
        return Ending(code=0, stuck=[])
    reporter.track(config.tracking, config.model_dump(), steps_done=training.steps_done)
    # From here on a signal lets the step finish; the handler itself ends the process until then.
    stop.training = True
    reporter.phase("train")
    ending = training.run()
    if ending.code == 0:
        reporter.say(what_next(config, reporter.identity.directory, steps_done=training.steps_done))
    return ending


def what_next(config: Config, directory: Path, *, steps_done: int) -> str:
    """For whoever reads the end of a log."""
    if steps_done < config.steps:
        how = "the same command goes on from there" if config.resume == "auto" else "train --resume goes on from there"
        return f"stopped with {steps_done} of {config.steps} steps done: {how}"
    return f"all {config.steps} steps are done: python -m trainer export {directory} --to DIR makes what servers load"


def prepare(config: Config, reporter: Reporter, stop: StopRequest, *, must_resume: bool = False,
            make: Callable[..., Training] | None = None) -> Training:  # fmt: skip
    """Everything before the first step: data, target, replicas, resume, and warming up what compiles. `make` is what
    makes the `Training`, if it is to be another one."""
    config = on_this_machine(config, reporter)
    devices = [torch.device(name) for name in (*config.devices.target, *config.devices.drafter)]
    compile_plan.settle_thread(devices[0], cpu_threads=config.cpu_threads.target, compiles=False)
    reporter.heartbeat.gpu_memory_bytes = lambda: {
        str(device): torch.cuda.memory_allocated(device) for device in devices if device.type == "cuda"
    }

    # First what may take long once, and what is wrong most often: no GPU waits for it.
    reporter.phase("data")
    rows = load_rows(
        config.data, load_tokenizer(expand_path(config.target.path, key="target.path")),
        mask_token_id=config.drafter.mask_token_id, seed=config.seed,
        cache=kept.token_cache(config.data, reporter.identity.directory, os.environ), say=reporter.say,
    )  # fmt: skip
    report_data(config.data, rows, reporter)
    reporter.phase("load_target")
    targets = load_targets(config.target, [torch.device(name) for name in config.devices.target])
    shape = drafter_shape(targets[0], config.drafter)
    if config.data.packing:
        see_that_documents_stay_apart(targets[0])
    training = (make or Training)(config, reporter, stop, targets, rows, shape)
    training.go_on(must_resume=must_resume)

    reporter.phase("compile_warmup")
    training.warmup.compile()
    if training.evaluations is not None:
        training.evaluations.get_ready()
    training.get_ready()
    return training


class Training:
    """The state that the workers of a run share, and the loops that they run.

    Made, restored and warmed up on the main thread. Afterwards each target thread owns its target, drafter thread
    `rank` owns `members[rank]`, and all the rest changes only in `_between_steps`, while every drafter waits for the
    leader, which is the first of them. An error in any worker ends the run: it is reported with that worker's name, and
    `run` returns code 1; unless `on_worker_death: degrade` lets the others go on. Where several `processes` work on a
    run, this one is number `rank` of them (`distributed/`).
    """

    def __init__(self, config: Config, reporter: Reporter, stop: StopRequest, targets: list[Target], rows: Rows,
                 shape: DrafterShape, *, rank: int = 0, processes: int = 1) -> None:  # fmt: skip
        self.config, self.reporter, self.stop, self.rows = config, reporter, stop, rows
        self.rank, self.processes, self.shape = rank, processes, shape
        self.count = len(config.devices.drafter)
        """Shares of a step that are done here; one for each drafter, as long as none is lost."""
        self.targets = dict(enumerate(targets, start=rank * len(targets)))
        self.members = self._make_members(targets, shape)
        # On one device there is nothing to gain: it is busy with one thing or the other.
        if config.sync == "grads" and len(set(config.devices.drafter)) > 1:
            for member in self.members.values():
                member.exchange_early()
        self.timer = Timer()
        for member in self.members.values():
            member.timer = self.timer
        self.warmup = Warmup(config, reporter, rows, self.targets, self.members, processes=processes)
        self.refusals = Refusals(config, reporter, rows)
        self.lost: list[str] = []
        self.rhythm = Rhythm(config)
        self.saves = Saves(config, reporter, what_must_stay(config, targets[0], rows, shape))
        self.steps_done = 0
        self.cursor = Cursor()
        self.tally = Tally(config, self.targets, self.members, processes=processes)
        self._begun: dict[int, Share] = {}
        self.evaluations = evaluations_for(config, reporter, targets[0], shape) if rank == 0 else None
        self._accepted: dict[int, Acceptance] = {}
        """By step that has been evaluated and not judged."""
        self._unjudged: list[Step] = []
        """Begun, in order; at most this step and the one before."""

    def _make_members(self, targets: list[Target], shape: DrafterShape) -> dict[int, Replica]:
        return make_replicas(self.config, targets, shape)

    # --- the workers ---

    def run(self) -> Ending:
        """Start the workers, and wait until they are done, stopped, or one has failed that cannot be done without."""
        now = time.monotonic()
        self.tally.start(now)
        self.watchdog = Watchdog(self.config.watchdog, now=now)
        while True:
            crew, stuck = self._run_crew()
            if crew.failed is None:
                stopped = self.rhythm.stop_at is not None and self.rhythm.stop_at < self.config.steps
                return Ending(code=0, stopped=stopped, stuck=stuck)
            if stuck or not self._go_on_without(crew):
                return Ending(code=1, stuck=stuck)

    def _run_crew(self) -> tuple[Crew, list[str]]:
        """All workers that there are, from the step that is next; returns when they have ended, or would not."""
        ranks = sorted(self.members)
        self.leader = ranks[0]
        self.replicas = Replicas(len(ranks), [self.members[rank].device for rank in ranks])
        owners = [self.members[ranks[share % len(ranks)]] for share in range(self.count)]
        self.feed = Feed(
            self.config, self.rows, self.targets, owners, first=self.steps_done + 1, cursor=self.cursor,
            rank=self.rank, processes=self.processes,
        )  # fmt: skip
        crew = Crew(self.reporter, abort=self._abort)
        names = {f"target-{number}": target.device for number, target in self.targets.items()}
        crew.start(f"loader-{self.rank}", self.feed.load)
        for number in self.targets:
            crew.start(f"target-{number}", functools.partial(self.feed.run_target, number))
        # Everybody is named before a drafter, who looks at all of them, begins.
        gate = threading.Event()
        drafters = [
            crew.start(f"drafter-{rank}", functools.partial(self.drafter_thread, rank, place, gate))
            for place, rank in enumerate(ranks)
        ]
        on_device = [name for name, device in names.items() if device.type == "cuda"]
        self.tally.crew(self.feed, Stages(crew.workers, on_device=on_device, now=time.monotonic()))
        gate.set()
        for thread in drafters:
            while thread.is_alive() and crew.failed is None:
                # Short joins: the main thread is where signal handlers run, and says what they found.
                thread.join(0.1)
                if self.stop.requested:
                    self.reporter.phase("stopping")
                self._watch(crew)
        self.feed.close()
        return crew, crew.wait(timeout_s=FAILED_WORKERS_TIMEOUT_S)

    def drafter_thread(self, rank: int, place: int, gate: threading.Event, worker: Worker) -> None:
        """Train replica `rank`, the one at `place` among those that are left, a step at a time with the others."""
        config, member, alone = self.config, self.members[rank], len(self.members) == 1
        gate.wait()
        settle(config, member)
        average = functools.partial(member.average, self.replicas, place)
        share_doubts = functools.partial(member.share_doubts, self.replicas, place)
        with member.stream():
            for step in range(self.steps_done + 1, config.steps + 1):
                worker.step = step
                lr = learning_rate(step, config=config.optimizer, steps=config.steps)
                met = not alone and config.sync == "params" and self.rhythm.agrees_after(step)
                taken: list[MicroBatch] = []
                figures = member.step(
                    self._shares(place, step, worker, taken), lr=lr, hashed=self.rhythm.hashes_after(step),
                    average=average if config.sync == "grads" and not alone else None,
                    share_doubts=share_doubts if config.sync == "params" and not alone else None,
                    after=functools.partial(member.meet_halfway, self.replicas, place) if met else None,
                )  # fmt: skip
                self._note(worker.name, taken, figures)
                self.replicas.meet()
                if rank == self.leader:
                    worker.doing = "judges the step before"
                    self._between_steps(step, lr)
                self.replicas.meet()
                if self.rhythm.stop_at == step:
                    return

    def _shares(self, place: int, step: int, worker: Worker, taken: list[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches of `step` that are for the drafter at `place`."""
        for share in range(place, self.count, len(self.members)):
            try:
                batch = self.feed.get(share)
            except Aborted:
                self.replicas.abort()  # nobody is to wait for this one in the step that it cannot take
                raise
            assert batch.step == step, f"{worker.name} got the batch of step {batch.step} at step {step}"
            taken.append(batch)
            worker.doing = "is in forward and backward"
            yield batch
        worker.doing = "is in averaging and optimizer"

    def _note(self, worker: str, taken: list[MicroBatch], figures: Figures) -> None:
        """That a worker has begun its share of a step."""
        share = Share.of(worker, taken, figures)
        self._begun[share.rank] = share

    # --- between two steps ---

    def _between_steps(self, step: int, lr: float) -> None:
        """The leader, while the other threads wait and the devices work: judge the step before, or this one too if
        something hangs on it; then save and stop if it is time."""
        self._unjudged.append(Step(number=step, lr=lr, shares=[self._begun[rank] for rank in sorted(self._begun)]))
        if step < self.config.steps and self.rhythm.stop_at is None and self._is_to_stop():
            self.reporter.phase("stopping")
            if (last := self.rhythm.stop_after(step)) > step:
                self.reporter.say(f"stops after step={last}, where the drafters agree on their weights")
        saving = self.rhythm.saves_after(step)
        evaluating = self.rhythm.evaluates_after(step)
        if evaluating:
            self._evaluate(step)
        log = saving or evaluating
        while self._unjudged and (log or len(self._unjudged) > 1 or self._unjudged[0].arrived):
            self._judge(self._unjudged.pop(0), log=log)
        if saving and self._begun[self.leader].figures.hash is None:
            self._see_that_all_agree(step)
        if saving:
            self._save()

    def _is_to_stop(self) -> bool:
        return self.stop.requested

    def _evaluate(self, step: int) -> None:
        assert self.evaluations is not None
        started = time.monotonic()
        self._accepted[step] = self.evaluations.evaluate(self.members[self.leader], step=step)
        self.tally.decay.paused(time.monotonic() - started)

    def _see_that_all_agree(self, step: int) -> None:
        """For a checkpoint that nobody knew of when the step began."""
        hashes = {f"drafter-{rank}": int(weight_hash(self.members[rank].flat.weights)) for rank in sorted(self.members)}
        check_equal(hashes, step=step)

    def _judge(self, step: Step, *, log: bool) -> None:
        """Wait for a step's figures; see that they are finite and the replicas equal; count it and log it."""
        step.wait()
        if step.refused:
            look_again = functools.partial(self._look_again, step.number)
            self.refusals.add(step, last_checkpoint=self.saves.last, look_again=look_again)
        check_equal(step.hashes, step=step.number)
        self.steps_done, self.cursor = step.number, step.cursor
        now = time.monotonic()
        change = self.tally.add(step, now)
        self.watchdog.stepped(now)
        if log or step.number % self.config.log_every == 0:
            accepted = self._accepted.pop(step.number, None)
            self.reporter.step(
                self.tally.of(step, now, lost=self.lost, skipped=self.refusals.count, accepted=accepted)
            )  # fmt: skip
        if change:
            self.reporter.speed(step.number, change)
        self.reporter.advanced(step.number)

    def _look_again(self, step: int, share: Share) -> tuple[str, list[int]]:
        """Where in a share of `step`, the one after those that are done, the first thing is that is not finite."""
        ranks, rank = sorted(self.members), share.rank
        try:
            for member in self.members.values():
                member.wait()  # nobody is to fetch the gradients that will be overwritten
            for number, (made_by, _) in zip(range(ranks.index(rank), self.count, len(ranks)), share.made, strict=True):
                batch = self.feed.again(step, self.cursor, number, made_by)
                if found := first_trouble(self.members[rank], batch, self.targets[made_by].layer_ids):
                    return found
        except Exception as error:  # as much memory as that may not be there
            return f"where could not be found out ({' '.join(str(error).split()) or repr(error)})", share.rows
        return "done once more everything is finite, which points to the hardware", share.rows

    def _save(self) -> None:
        self._save_of(self.members[min(self.members)])

    def _save_of(self, member: Any) -> None:
        started = time.monotonic()
        self.saves.save(
            member, step=self.steps_done, cursor=self.cursor, skipped=self.refusals.count, tokens=self.tally.tokens
        )  # fmt: skip
        self.tally.decay.paused(time.monotonic() - started)

    # --- when something goes wrong ---

    def _watch(self, crew: Crew) -> None:
        """If no step ends for too long: say what every thread does, and end the run if it is to be."""
        away = self.reporter.is_checkpointing or self.reporter.heartbeat.phase == "evaluate"
        what = self.watchdog.look(time.monotonic(), away=away)
        if what is None or crew.failed is not None:
            return
        culprit, said = self._tell_who_does_what(what, crew)
        if self.config.watchdog.action == "stop":
            said += "; where it hangs is in the log above (watchdog.action: report would go on waiting)"
            crew.fail(culprit, NoProgress(culprit, said))

    def _tell_who_does_what(self, what: str, crew: Crew) -> tuple[str, str]:
        """Returns who holds up the others, and what was said."""
        workers = list(crew.workers.values())
        culprit = who_holds_up(workers)
        said = f"{what} after step {self.steps_done}: {culprit}; {', '.join(map(str, workers))}"
        self.reporter.no_progress(said, stacks(), worker=culprit.name, step=self.steps_done)
        return culprit.name, said

    def _go_on_without(self, crew: Crew) -> bool:
        """Whether the run goes on although a worker has failed; then everything is ready for the others."""
        name = crew.failed
        assert name is not None
        stages = {"drafter": self.members, "target": self.targets}
        if why := regroup.why_not(self.config, crew, stages):
            if self.config.on_worker_death == "degrade":
                self.reporter.say(f"the run ends with {name}: {why}")
            return False
        stage, _, number = name.rpartition("-")
        try:
            while self._unjudged:
                self._judge(self._unjudged.pop(0), log=False)
            del stages[stage][int(number)]
            agreed_at = regroup.agree(self.config, self.members)
        except Exception as error:  # the device of the one that failed may have taken others with it
            self.reporter.exception(getattr(error, "worker", None), error)
            return False
        self.lost.append(name)
        self.refusals.go_on(self.members[min(self.members)].refused)
        while self.steps_done < agreed_at:
            _, self.cursor = self.rows.take(self.cursor, self.config.batch_size)
            self.steps_done += 1
        self.rhythm.stop_at = None
        self._begun.clear()
        left = [*(f"target-{number}" for number in self.targets), *(f"drafter-{rank}" for rank in self.members)]
        self.reporter.say(f"degraded: without {', '.join(self.lost)}, after {agreed_at} steps; {', '.join(left)} go on")
        self.reporter.event("degraded", lost=self.lost, left=left, step=agreed_at)
        self.get_ready()
        self.watchdog.again()
        if self.steps_done == self.config.steps:
            self._save()
        return True

    def _abort(self, failed: str) -> None:
        self.feed.close()
        # Where the run may go on, drafters whom nothing has happened to end the step that they are in.
        if self.config.on_worker_death == "stop" or failed.startswith("drafter-"):
            self.replicas.abort()

    # --- around the run ---

    def begin_with(self, start: Start) -> None:
        """Train a drafter on that is there already; everything but its weights is as at the beginning of any run."""
        for member in self.members.values():
            member.begin_with(start.weights)
        self.saves.start = start.record()
        self.reporter.say(f"starts from {start.path} ({start.what}); the optimizer begins anew")
        self.reporter.event("start", **self.saves.start)

    def go_on(self, *, must_resume: bool) -> None:
        """From the latest checkpoint, if there is one. Raises `ConfigError` where that may not be, or where those to
        come have no room."""
        if found := self.saves.find(must_resume=must_resume):
            self.restore(found)
        elif start := self._start():
            self.begin_with(start)
        self._see_that_there_is_room()

    def _start(self) -> Start | None:
        return starting.find(self.config, self.targets[self.rank], self.shape, say=self.reporter.say)

    def _see_that_there_is_room(self) -> None:
        self.saves.check_room(self.members[self.rank].state_bytes, steps_done=self.steps_done)

    def restore(self, found: Checkpoint) -> None:
        """Go on from `found` as if the run had never ended."""
        self.refusals.go_on(found.state.get("skipped", 0))
        for member in self.members.values():
            member.restore(
                found.weights, found.optimizer, found.averages, steps_done=found.step, refused=self.refusals.count,
                begun_with_weights=self.saves.start is not None,
            )  # fmt: skip
        self.steps_done = found.step
        self.cursor, self.tally.tokens = Cursor(**found.state["cursor"]), found.state.get("tokens", 0)
        self.reporter.say(f"resume from step-{found.step} epoch={self.cursor.epoch} row={self.cursor.position}")
        self.reporter.event("resume", step=found.step, path=self.saves.last)

    def get_ready(self) -> None:
        """Whatever depends on how many drafters there are, before they start: also what is recorded as CUDA graphs."""
        alone = len(self.members) == 1
        for member in self.members.values():
            member.scale = 1.0 if self.config.sync == "grads" else float(len(self.members))
        self.warmup.record(
            averaged=self.config.sync == "grads" and not alone, several=self.count > len(self.members)
        )  # fmt: skip
