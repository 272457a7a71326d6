"""What a run says of itself, and to whom: the one place that records, prints and tracks it.

`Reporter` takes it from any thread and passes it on: to the records of the run's directory (`records.py`), to whoever
looks at the terminal or the log (`console.py`), and to TensorBoard and the like (`tracking.py`).
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.report.console import Console, console_for
from trainer.report.records import Records, RunIdentity
from trainer.report.throughput import SpeedChange
from trainer.report.tracking import Tracking
from trainer.sections import TrackingConfig

SHARES = ("busy", "wait_input", "wait_room", "wait_peers")
TRACKERS_CLOSE_S = 15.0
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStep:
    """One worker between two logged steps. `busy` and the waits are shares of the time between them."""

    name: str
    loss: float | None = None
    """None for all but drafters, who alone take a step."""
    tok_s: float | None = None
    mfu: float | None = None
    """Of its device, which others may use too."""
    busy: float = 0.0
    wait_input: float = 0.0
    wait_room: float = 0.0
    wait_peers: float = 0.0
    """For other drafters, to whom it is all the same what this one waits for."""

    @property
    def stage(self) -> str:
        return self.name.rpartition("-")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """One optimizer step, as it is logged. Rates are of the whole run without its warm-up."""

    step: int
    steps: int
    """Of the whole run."""
    loss: float
    tok_s: float
    positions_s: float = 0.0
    """Supervised slots a second."""
    recent_tok_s: float | None = None
    """See `throughput.Decay`."""
    mfu: float | None = None
    lr: float
    grad_norm: float
    slot_p: list[float | None] = field(default_factory=list)
    """See `Step.slot_probabilities`."""
    tau: float | None = None
    """Of an evaluation after this step; see `decode.acceptance`."""
    kept: list[float | None] = field(default_factory=list)
    """By slot, in the same: the share of verifications in which it stayed."""
    epoch: int = 0
    tokens: int = 0
    """That this process has trained on so far."""
    queued: int
    queue_size: int
    step_s: float | None = None
    compiles: int = 0
    memory_peak_bytes: dict[str, int] = field(default_factory=dict)
    """By device; on the CPU of the whole process."""
    workers: list[WorkerStep] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Workers that have failed, and without which the run goes on."""
    skipped: int = 0
    """Steps so far that have changed nothing, because a loss or gradient was not finite."""

    def mean(self, stage: str, share: str) -> float:
        """Of all workers of a stage."""
        shares = [float(getattr(worker, share)) for worker in self.workers if worker.stage == stage]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def bottleneck(self) -> str:
        """The stage that waits least for the others: what is faster elsewhere changes nothing."""
        stages = dict.fromkeys(worker.stage for worker in self.workers)
        return min(stages, key=lambda stage: self.mean(stage, "wait_input") + self.mean(stage, "wait_room"))

    @property
    def left_s(self) -> float | None:
        return None if self.step_s is None else self.step_s * (self.steps - self.step)

    def record(self) -> dict[str, Any]:
        """The run's line of metrics.jsonl."""
        return {
            "loss": self.loss, "tok_s": self.tok_s, "positions_s": self.positions_s, "recent_tok_s": self.recent_tok_s,
            "mfu": self.mfu, "lr": self.lr, "grad_norm": self.grad_norm, "worker": None, "epoch": self.epoch,
            "tokens": self.tokens, "queued": self.queued, "queue_size": self.queue_size, "compiles": self.compiles,
            "memory_peak_bytes": self.memory_peak_bytes, "bottleneck": self.bottleneck,
            "skipped": self.skipped, **_by_slot("slot_p_", self.slot_p),
            **({} if self.tau is None else {"tau": self.tau, **_by_slot("kept_", self.kept)}),
            **({"lost": self.lost} if self.lost else {}),
        }  # fmt: skip

    def scalars(self) -> dict[str, float]:
        """For trackers, by their usual names; what is not known is not there."""
        found: dict[str, float | None] = {
            "train/loss": self.loss, "train/lr": self.lr, "train/grad_norm": self.grad_norm, "train/epoch": self.epoch,
            "train/tokens": self.tokens, "speed/tok_s": self.tok_s, "speed/recent_tok_s": self.recent_tok_s,
            "speed/positions_s": self.positions_s, "speed/mfu": self.mfu,
            "speed/queue": self.queued / max(self.queue_size, 1), "speed/compiles": self.compiles,
            "train/skipped": self.skipped,
            **_by_slot("slot_p/", self.slot_p), "eval/tau": self.tau, **_by_slot("eval/kept_", self.kept),
            **{f"memory_gib/{name.replace(':', '')}": size / GIB for name, size in self.memory_peak_bytes.items()},
            **{f"{share}/{worker.name}": getattr(worker, share) for worker in self.workers for share in SHARES},
            **{f"loss/{worker.name}": worker.loss for worker in self.workers},
        }  # fmt: skip
        return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _by_slot(name: str, values: list[float | None]) -> dict[str, float | None]:
    return {f"{name}{slot}": value for slot, value in enumerate(values, start=1)}


def stacks_told(what: str, stacks: Mapping[str, str]) -> str:
    """By thread, for people."""
    told = [f"watchdog: {what}; what the threads do:"]
    for name, stack in stacks.items():
        told += [f"  in {name}:", *("    " + line for line in stack.rstrip().splitlines())]
    return "\n".join(told)


class Reporter:
    """Says what happens, from any thread."""

    def __init__(self, identity: RunIdentity, *, console: Console | None = None) -> None:
        self.identity = identity
        self.records = Records(identity)
        self.heartbeat = self.records.heartbeat
        self.console = console or console_for(os.environ)
        self.tracking: Tracking | None = None

    def open(self) -> None:
        """Raises `ConfigError` where no directory can be for the records, or another training is at work there."""
        self.records.open(complain=self.complain)
        self.console.open()

    def track(self, config: TrackingConfig, settings: Mapping[str, Any], *, steps_done: int) -> None:
        """Tell trackers too from now on. `settings` is the whole configuration, for people."""
        self.tracking = Tracking(
            config, self.identity, settings, steps_done=steps_done, say=self.say, event=self.event
        )  # fmt: skip

    def ended(self, *, code: int, stopped: bool, **facts: Any) -> list[str]:
        """The last record of this process. Returns the trackers that would not end, as `stuck` workers are."""
        stuck = self.tracking.close(code=code, timeout_s=TRACKERS_CLOSE_S) if self.tracking else []
        self.console.close()
        self.heartbeat.stop()
        self.event("ended", code=code, stopped=stopped, **facts)
        self.records.close()
        return stuck

    def last_words(self, stopped: bool, code: int) -> None:
        """`ended` from a signal handler, right before the process is gone: waits for no lock for long."""
        self.console.last_words(b"phase=stopping\n" if stopped else b"")
        if stopped:
            self.heartbeat.phase = "stopping"
            self.event("phase", phase="stopping")
            # The heartbeat's own thread lets go of the lock; this one, if it was interrupted holding it, does not.
            self.heartbeat.write(lock_timeout_s=1.0)
        self.event("ended", code=code, stopped=stopped)

    # --- what happens ---

    def say(self, line: str) -> None:
        """One plain line on stdout."""
        self.console.say(line)

    def complain(self, line: str) -> None:
        self.console.complain(line)

    def event(self, name: str, **facts: Any) -> None:
        """A line of events.jsonl."""
        self.records.event(name, **facts)

    def phase(self, name: str, **facts: Any) -> None:
        """Enter a phase: a line, an event, a heartbeat. Nothing follows on `stopping`."""
        if not self.heartbeat.enter(name):
            return
        self.console.phase(name, " ".join([f"phase={name}", *(f"{key}={value}" for key, value in facts.items())]))
        self.event("phase", phase=name, **facts)
        self.heartbeat.write()

    def step(self, done: RunStep) -> None:
        """Log a step."""
        self.records.metric(done.step, **done.record())
        self.record_workers(done)
        self.console.step(done)
        if self.tracking:
            self.tracking.log(done.step, done.scalars())

    def record_workers(self, done: RunStep) -> None:
        for worker in done.workers:
            lr = None if worker.loss is None else done.lr
            shares = {name: round(getattr(worker, name), 4) for name in SHARES}
            mfu = {} if worker.mfu is None else {"mfu": worker.mfu}
            self.records.metric(
                done.step, loss=worker.loss, tok_s=worker.tok_s, lr=lr, grad_norm=None, worker=worker.name, **shares,
                **mfu,
            )  # fmt: skip

    def no_progress(self, what: str, stacks: Mapping[str, str], **facts: Any) -> None:
        """What every thread does, as lines and as an event."""
        self.say(stacks_told(what, stacks))
        self.event("no_progress", message=what, stacks=dict(stacks), **facts)

    def speed(self, step: int, change: SpeedChange) -> None:
        """The run has become slower, or has recovered."""
        self.say(f"{change.kind}: after step {step}: {change}")
        self.event(change.kind, step=step, tok_s=change.tok_s, median_tok_s=change.median_tok_s)

    def advanced(self, step: int) -> None:
        """A step is done, logged or not."""
        self.heartbeat.stepped(step)

    @property
    def is_checkpointing(self) -> bool:
        return self.heartbeat.checkpointing

    def checkpointing(self, now: bool) -> None:
        self.heartbeat.checkpointing = now
        self.heartbeat.write()

    def exception(self, worker: str | None, error: BaseException, *, step: int | None = None, doing: str | None = None
                  ) -> None:  # fmt: skip
        """On stderr, Python's own form of an exception in a thread, or (None) in the main program; and the event."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        # The log first: it is read by people, and the records may be what cannot be written.
        self.console.write_error(f"Exception in thread {worker}:\n{text}" if worker else text)
        where = {key: value for key, value in (("step", step), ("doing", doing)) if value is not None}
        self.event("exception", worker=worker, type=name, message=str(error), traceback=text, **where)
