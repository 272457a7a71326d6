"""READ FIRST: a training run from top to bottom; the loop is `Training.drafter_thread`.

`train` loads the target and the data, resumes, warms up what compiles, and starts the workers: one target thread that
fills a channel per drafter (`Training.target_thread`), and one drafter thread per replica. All replicas take an
optimizer step together; between two meetings of theirs replica 0 alone logs the step, saves, and decides whether the
run stops here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from dataclasses import dataclass

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
from trainer.replica import MicroBatch
from trainer.replicas import Replicas, prove_equal
from trainer.setup import check_devices, check_room, find_resume, make_replicas, report_data, what_must_stay
from trainer.stopping import StopRequest
from trainer.target import Target, drafter_shape, load_target

FAILED_WORKERS_TIMEOUT_S = 8.0


class NonFinite(ArithmeticError):
    """A loss or gradient is nan or infinite; neither the weights nor another replica has been touched by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    code: int
    stopped: bool = False
    stuck: list[str]
    """Workers that would not end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one replica contributed to a step. `loss` is its part of the step's loss."""

    loss: float
    weight: float
    tokens: int


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
    compile_plan.settle_thread(devices[0], cpu_threads=config.cpu_threads.target)
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
    units = compile_plan.plan(
        devices[1:], rows=training.share, context_length=config.data.sequence_length,
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
        self.shares: list[Share | None] = [None] * self.count
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
        compile_plan.settle_thread(self.target.device, cpu_threads=self.config.cpu_threads.target)
        cursor = self.cursor
        for step in range(self.steps_done + 1, self.config.steps + 1):
            indices, cursor = self.rows.take(cursor, self.config.batch_size)
            ids_BS, loss_mask_BS = self.rows.ids_RS[indices], self.rows.loss_mask_RS[indices]
            blocks = self._blocks(ids_BS, loss_mask_BS, step=step)
            weight_sum = blocks.weights_BNk.sum().item()
            for rank, (member, channel) in enumerate(zip(self.members, self.channels, strict=True)):
                part = slice(rank * self.share, (rank + 1) * self.share)
                batch = member.accept(
                    step=step, rows=indices[part].tolist(), features_BSF=self.target.features(ids_BS[part]),
                    blocks=blocks.rows(part), weight_sum=weight_sum,
                    tokens=int(self.rows.lengths_R[indices[part]].sum()), cursor=cursor,
                )  # fmt: skip
                self.target_throughput.add([batch.tokens], now=time.monotonic())
                channel.put(batch)

    def drafter_thread(self, rank: int) -> None:
        """Train replica `rank`, a step at a time, together with the others."""
        member, channel = self.members[rank], self.channels[rank]
        compile_plan.settle_thread(member.device, cpu_threads=self.config.cpu_threads.drafter)
        for step in range(self.steps_done + 1, self.config.steps + 1):
            batch = channel.get()
            assert batch.step == step, f"drafter-{rank} got the batch of step {batch.step} at step {step}"
            loss = member.loss_and_gradients(batch)
            grad_norm = member.gradient_norm()
            self._check_finite(f"drafter-{rank}", batch, loss, grad_norm)
            if self.count > 1:
                self.replicas.average(rank, member.flat.gradients)
                grad_norm = member.gradient_norm()
                self._check_finite("all drafters together", batch, loss, grad_norm)
            member.optimizer.clip(grad_norm)
            lr = learning_rate(step, config=self.config.optimizer, steps=self.config.steps)
            member.optimizer.step(lr)

            self.shares[rank] = Share(loss=loss, weight=batch.weight / batch.weight_sum, tokens=batch.tokens)
            self.replicas.meet()
            if rank == 0:
                self._finish_step(batch, lr=lr, grad_norm=grad_norm)
            self.replicas.meet()
            if self.stopped_at == step:
                return

    # --- between two steps ---

    def _finish_step(self, batch: MicroBatch, *, lr: float, grad_norm: float) -> None:
        """Replica 0, while the others wait: prove the replicas equal, count, log, save, stop."""
        step = batch.step
        last = step == self.config.steps
        stopping = self.stop.requested and not last
        saving = step % self.config.checkpoint_every == 0 or last or stopping
        if saving or step % self.config.replica_check_every == 0:
            prove_equal([member.flat.weights for member in self.members], step=step)
        self.steps_done, self.cursor = step, batch.cursor
        shares = [share for share in self.shares if share is not None]
        self.throughput.add([share.tokens for share in shares], now=time.monotonic())
        if step % self.config.log_every == 0 or last or stopping:
            self._log(step, shares, lr=lr, grad_norm=grad_norm)
        self.reporter.advanced(step)
        if stopping:
            self.reporter.phase("stopping")
        if saving:
            self._save()
        if stopping:
            self.stopped_at = step

    def _log(self, step: int, shares: list[Share], *, lr: float, grad_norm: float) -> None:
        now = time.monotonic()
        since_s = max(now - self._logged_at, 1e-9)
        waited_target = sum(channel.get_wait_s for channel in self.channels)
        waited_drafter = sum(channel.put_wait_s for channel in self.channels)
        rates = self.throughput.tok_s()
        self.reporter.step(RunStep(
            step=step,
            loss=sum(share.loss for share in shares),
            tok_s=sum(rates),
            lr=lr,
            grad_norm=grad_norm,
            queued=sum(len(channel) for channel in self.channels),
            queue_size=sum(channel.size for channel in self.channels),
            wait_target=min((waited_target - self._waited_target) / since_s / self.count, 1.0),
            wait_drafter=min((waited_drafter - self._waited_drafter) / since_s, 1.0),
            workers=[
                WorkerStep(name="target-0", tok_s=sum(self.target_throughput.tok_s())),
                # A replica whose blocks all were padding contributed nothing; its own mean would be 0/0.
                *(WorkerStep(name=f"drafter-{rank}", loss=share.loss / max(share.weight, 1e-12), tok_s=rate)
                  for rank, (share, rate) in enumerate(zip(shares, rates, strict=True))),
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

    def _check_finite(self, worker: str, batch: MicroBatch, loss: float, grad_norm: float) -> None:
        """Before the optimizer, and before another replica reads the gradients."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFinite(
                f"{worker}: loss {loss}, gradient norm {grad_norm} at step {batch.step} (data rows {batch.rows});"
                f" stopped before the optimizer step; last good checkpoint: {self.last_checkpoint}"
            )

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

    def warm_up(self, unit: compile_plan.Unit) -> None:
        """Forward and backward of one unit of the compile plan, exactly as a drafter thread does it."""
        member = next(member for member in self.members if str(member.device) == unit.device)
        compile_plan.settle_thread(member.device, cpu_threads=self.config.cpu_threads.drafter)
        ids_BS, loss_mask_BS = self.rows.ids_RS[: self.share], self.rows.loss_mask_RS[: self.share]
        features_BSF = self.target.features(ids_BS)
        member.loss_and_gradients(member.accept(
            step=0, rows=[], features_BSF=features_BSF, blocks=self._blocks(ids_BS, loss_mask_BS, step=0),
            weight_sum=1.0, tokens=0, cursor=self.cursor,
        ))  # fmt: skip

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
