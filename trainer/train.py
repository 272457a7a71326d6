"""READ FIRST: a training run from top to bottom; the loop is `Training.drafter_thread`.

`train` loads the target and the data, resumes, warms up what compiles, and starts the workers: one target thread that
fills a channel per drafter (`Training.target_thread`), and one drafter thread per replica. All replicas take an
optimizer step together; between two meetings of theirs replica 0 alone judges and logs the step *before*, whose figures
have reached the host by now, so that no device ever waits for a thread. Where something hangs on this very step
(a checkpoint, the last step, a signal) it waits for this one's figures too.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType

import torch
from torch import Tensor

from trainer import checkpoint, compile_plan
from trainer.blocks import Blocks, generator_for, lay_out, pick_anchors
from trainer.checkpoint import Checkpoint
from trainer.config import Config
from trainer.data import Cursor, Rows, load_rows
from trainer.drafter import DrafterShape
from trainer.metrics import Reporter, RunStep, Throughput, WorkerStep
from trainer.optim import learning_rate
from trainer.pipeline import Channel, Crew
from trainer.replica import MicroBatch, Replica
from trainer.replicas import Replicas, check_equal
from trainer.setup import check_devices, check_room, find_resume, make_replicas, report_data, what_must_stay
from trainer.steps import Share, Step
from trainer.stopping import StopRequest
from trainer.target import Target, drafter_shape, load_target

FAILED_WORKERS_TIMEOUT_S = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    code: int
    stopped: bool = False
    stuck: list[str]
    """Workers that would not end."""


def train(config: Config, reporter: Reporter, stop: StopRequest, *, must_resume: bool = False) -> Ending:
    """Train to the last step, or to the step that a signal interrupts. Raises `ConfigError` before training starts."""
    training = prepare(config, reporter, stop, must_resume=must_resume)
    if training.steps_done >= config.steps:
        reporter.say(f"nothing to do: step {training.steps_done} of {config.steps} is done; raise steps to go on")
        return Ending(code=0, stuck=[])
    # From here on a signal lets the step finish; the handler itself ends the process until then.
    stop.training = True
    reporter.phase("train")
    return training.run()


def prepare(config: Config, reporter: Reporter, stop: StopRequest, *, must_resume: bool = False) -> Training:
    """Everything before the first step: target, data, replicas, resume, and warming up what compiles."""
    devices = [torch.device(name) for name in (*config.devices.target, *config.devices.drafter)]
    check_devices(devices)
    compile_plan.settle_thread(devices[0], cpu_threads=config.cpu_threads.target, compiles=False)
    reporter.gpu_memory_bytes = lambda: {
        str(device): torch.cuda.memory_allocated(device) for device in devices if device.type == "cuda"
    }

    reporter.phase("load_target")
    target = load_target(config.target, devices[0])
    shape = drafter_shape(target, config.drafter)
    reporter.phase("data")
    rows = load_rows(config.data, target.tokenizer, mask_token_id=config.drafter.mask_token_id, seed=config.seed)
    report_data(rows, reporter)
    training = Training(config, reporter, stop, target, rows, shape)
    # The weights and the optimizer's two moments, all float32.
    check_room(training.root, 3 * training.members[0].flat.weights.nbytes)
    if found := find_resume(config, reporter, training.must_keep, must_resume=must_resume):
        training.restore(found)

    reporter.phase("compile_warmup")
    compiling = [member.device for member in training.members if member.kernels.compiled]
    units = compile_plan.plan(
        compiling, rows=training.share, context_length=config.data.sequence_length,
        anchors=config.drafter.anchors, block_size=config.drafter.block_size,
    )  # fmt: skip
    compile_plan.warm_up(units, training.warm_up, say=reporter.say)
    return training


class Training:
    """The state that the workers of a run share, and the loops that they run.

    Made, restored and warmed up on the main thread. Afterwards the target thread owns `target`, drafter thread `rank`
    owns `members[rank]`, and all the rest changes only in `_finish_step`, while every drafter waits for replica 0. An
    error in any worker ends the run: it is reported with that worker's name, and `run` returns code 1.
    """

    def __init__(self, config: Config, reporter: Reporter, stop: StopRequest, target: Target, rows: Rows,
                 shape: DrafterShape) -> None:  # fmt: skip
        self.config, self.reporter, self.stop, self.target, self.rows = config, reporter, stop, target, rows
        self.root = reporter.identity.directory / "checkpoints"
        self.count = len(config.devices.drafter)
        self.share = config.batch_size // self.count
        self.replicas = Replicas(self.count)
        self.channels: list[Channel[MicroBatch]] = [Channel(config.queue_depth) for _ in range(self.count)]
        self.members = make_replicas(config, target, shape)
        self.must_keep = what_must_stay(config, target, rows, shape)
        self.steps_done = 0
        self.cursor = Cursor()
        self.last_checkpoint = "none"
        self.stopped_at: int | None = None
        self._begun: list[Share | None] = [None] * self.count
        self._unjudged: list[Step] = []
        """Begun, in order; at most this step and the one before."""
        self._logged_at = self._waited_target = self._waited_drafter = 0.0

    # --- the workers ---

    def run(self) -> Ending:
        """Start the workers, and wait until they are done, stopped, or one has failed."""
        self._logged_at = now = time.monotonic()
        self.throughput = Throughput(workers=self.count, now=now)
        self.target_throughput = Throughput(workers=1, now=now)
        crew = Crew(self.reporter, abort=self._abort)
        crew.start("target-0", self.target_thread)
        drafters = [
            crew.start(f"drafter-{rank}", functools.partial(self.drafter_thread, rank)) for rank in range(self.count)
        ]
        for thread in drafters:
            while thread.is_alive() and crew.failed is None:
                # Short joins: the main thread is where signal handlers run, and says what they found.
                thread.join(0.1)
                if self.stop.requested:
                    self.reporter.phase("stopping")
        self._close_channels()
        stuck = crew.wait(timeout_s=FAILED_WORKERS_TIMEOUT_S)
        return Ending(code=1 if crew.failed else 0, stopped=self.stopped_at is not None, stuck=stuck)

    def target_thread(self) -> None:
        """Run the target on each step's rows and hand every drafter its share: rows rank*share and following."""
        target = self.target
        compile_plan.settle_thread(target.device, cpu_threads=self.config.cpu_threads.target, compiles=False)
        cursor = self.cursor
        with target.stream():
            for step in range(self.steps_done + 1, self.config.steps + 1):
                indices, cursor = self.rows.take(cursor, self.config.batch_size)
                ids_BS, loss_mask_BS = self.rows.ids_RS[indices], self.rows.loss_mask_RS[indices]
                blocks = self._blocks(ids_BS, loss_mask_BS, step=step)
                weight_sum = blocks.weights_BNk.sum().item()
                for rank, (member, channel) in enumerate(zip(self.members, self.channels, strict=True)):
                    part = slice(rank * self.share, (rank + 1) * self.share)
                    batch = member.accept(
                        step=step, rows=indices[part].tolist(), features_BSF=target.features(ids_BS[part]),
                        blocks=blocks.rows(part), weight_sum=weight_sum,
                        tokens=int(self.rows.lengths_R[indices[part]].sum()), cursor=cursor,
                    )  # fmt: skip
                    self.target_throughput.add([batch.tokens], now=time.monotonic())
                    channel.put(batch)

    def drafter_thread(self, rank: int) -> None:
        """Train replica `rank`, a step at a time, together with the others."""
        config, member, channel = self.config, self.members[rank], self.channels[rank]
        self._settle(member)
        average = functools.partial(self.replicas.average, rank) if self.count > 1 else None
        with member.stream():
            for step in range(self.steps_done + 1, config.steps + 1):
                batch = channel.get()
                assert batch.step == step, f"drafter-{rank} got the batch of step {batch.step} at step {step}"
                lr = learning_rate(step, config=config.optimizer, steps=config.steps)
                hashed = step % config.replica_check_every == 0 or self._saves_at(step)
                figures = member.step(batch, lr=lr, average=average, hashed=hashed)

                self._begun[rank] = Share(batch=batch, figures=figures)
                self.replicas.meet()
                if rank == 0:
                    self._between_steps(step, lr)
                self.replicas.meet()
                if self.stopped_at == step:
                    return

    # --- between two steps ---

    def _between_steps(self, step: int, lr: float) -> None:
        """Replica 0, while the other threads wait and the devices work: judge the step before, or this one too if
        something hangs on it; then save and stop if it is time."""
        self._unjudged.append(Step(number=step, lr=lr, shares=[share for share in self._begun if share is not None]))
        stopping = self.stop.requested and step < self.config.steps
        if stopping:
            self.reporter.phase("stopping")
        saving = stopping or self._saves_at(step)
        while self._unjudged and (saving or len(self._unjudged) > 1 or self._unjudged[0].arrived):
            self._judge(self._unjudged.pop(0), log=saving)
        if saving:
            self._save()
        if stopping:
            self.stopped_at = step

    def _saves_at(self, step: int) -> bool:
        return step % self.config.checkpoint_every == 0 or step == self.config.steps

    def _judge(self, step: Step, *, log: bool) -> None:
        """Wait for a step's figures; see that they are finite and the replicas equal; count it and log it."""
        step.wait()
        step.check_finite(last_checkpoint=self.last_checkpoint)
        check_equal(step.hashes, step=step.number)
        self.steps_done, self.cursor = step.number, step.cursor
        self.throughput.add([share.batch.tokens for share in step.shares], now=time.monotonic())
        if log or step.number % self.config.log_every == 0:
            self._log(step)
        self.reporter.advanced(step.number)

    def _log(self, step: Step) -> None:
        now = time.monotonic()
        since_s = max(now - self._logged_at, 1e-9)
        waited_target = sum(channel.get_wait_s for channel in self.channels)
        waited_drafter = sum(channel.put_wait_s for channel in self.channels)
        rates = self.throughput.tok_s()
        self.reporter.step(RunStep(
            step=step.number,
            loss=step.loss,
            tok_s=sum(rates),
            lr=step.lr,
            grad_norm=step.norm,
            queued=sum(len(channel) for channel in self.channels),
            queue_size=sum(channel.size for channel in self.channels),
            wait_target=min((waited_target - self._waited_target) / since_s / self.count, 1.0),
            wait_drafter=min((waited_drafter - self._waited_drafter) / since_s, 1.0),
            workers=[
                WorkerStep(name="target-0", tok_s=sum(self.target_throughput.tok_s())),
                *(WorkerStep(name=f"drafter-{rank}", loss=share.own_mean, tok_s=rate)
                  for rank, (share, rate) in enumerate(zip(step.shares, rates, strict=True))),
            ],
        ))  # fmt: skip
        self._logged_at, self._waited_target, self._waited_drafter = now, waited_target, waited_drafter

    def _save(self) -> None:
        started = time.monotonic()
        self.reporter.phase("checkpoint")
        self.reporter.checkpointing(True)
        member = self.members[0]
        path = checkpoint.save(self.root, Checkpoint(
            step=self.steps_done,
            weights=member.flat.named(member.flat.weights),
            optimizer=member.moments(),
            state={"cursor": dataclasses.asdict(self.cursor), "must_keep": self.must_keep,
                   "may_change": self.config.what_a_resume_may_change(), "config": self.config.model_dump(),
                   "torch": torch.__version__},
        ))  # fmt: skip
        checkpoint.prune(self.root, keep=self.config.keep_checkpoints)
        self.last_checkpoint = str(path)
        seconds = time.monotonic() - started
        self.reporter.say(f"checkpoint step-{self.steps_done} saved in {seconds:.2f} s: {path}")
        self.reporter.event("checkpoint", step=self.steps_done, path=str(path), seconds=round(seconds, 3))
        self.reporter.checkpointing(False)
        self.reporter.phase("train")

    # --- around the run ---

    def restore(self, found: Checkpoint) -> None:
        """Go on from `found` as if the run had never ended."""
        for member in self.members:
            member.restore(found.weights, found.optimizer, steps_done=found.step)
        self.steps_done = found.step
        self.cursor = Cursor(**found.state["cursor"])
        self.last_checkpoint = str(self.root / f"step-{found.step}")
        self.reporter.say(f"resume from step-{found.step} epoch={self.cursor.epoch} row={self.cursor.position}")
        self.reporter.event("resume", step=found.step, path=self.last_checkpoint)

    def warm_up(self, unit: compile_plan.Unit) -> Mapping[str, CodeType]:
        """Forward and backward of one unit of the compile plan, exactly as a drafter thread does it."""
        member = next(member for member in self.members if str(member.device) == unit.device)
        self._settle(member)
        ids_BS, loss_mask_BS = self.rows.ids_RS[: self.share], self.rows.loss_mask_RS[: self.share]
        with self.target.stream():
            batch = member.accept(
                step=0, rows=[], features_BSF=self.target.features(ids_BS),
                blocks=self._blocks(ids_BS, loss_mask_BS, step=0), weight_sum=1.0, tokens=0, cursor=self.cursor,
            )  # fmt: skip
        with member.stream():
            member.loss_and_gradients(batch)
        return member.kernels.compiled

    def _settle(self, member: Replica) -> None:
        compile_plan.settle_thread(
            member.device, cpu_threads=self.config.cpu_threads.drafter, compiles=bool(member.kernels.compiled)
        )

    def _blocks(self, ids_BS: Tensor, loss_mask_BS: Tensor, *, step: int) -> Blocks:
        """The blocks of a step's rows. A row's anchors depend on (seed, step, row), not on how rows are shared out."""
        config = self.config.drafter
        drawn = [
            pick_anchors(mask_S, config.anchors, generator_for(self.config.seed, "anchors", step, row))
            for row, mask_S in enumerate(loss_mask_BS)
        ]
        anchors_BN, valid_BN = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        return lay_out(
            ids_BS, loss_mask_BS, anchors_BN, valid_BN,
            block_size=config.block_size, mask_token_id=config.mask_token_id, gamma=config.gamma,
        )  # fmt: skip

    def _abort(self) -> None:
        self._close_channels()
        self.replicas.abort()

    def _close_channels(self) -> None:
        for channel in self.channels:
            channel.close()
