"""Everything a run says: plain lines on stdout, and the records of the run directory (the contract with specctl).

The only module that prints. With specctl around it (four SPECCTL_ variables) the records go into the run directory it
names; without, into the configuration's `output_dir`, in the same form. A step line is `key=value`, one line per worker
(the target's without a step: it takes none) and then one for the run; `events.jsonl`, `metrics.jsonl` grow by one write
per line, `heartbeat.json` is replaced whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import ConfigError

HEARTBEAT_MIN_S = 0.5
HEARTBEAT_MAX_S = 2.0
SHARES = ("busy", "wait_input", "wait_room", "wait_peers")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Whose records these are. `nonce` tells this attempt's from those of any other."""

    directory: Path
    run_id: str
    attempt: int = 1
    nonce: str = ""


def identity_from_environment(environment: Mapping[str, str]) -> RunIdentity | None:
    """What specctl says of this run; None without specctl. Raises `ConfigError` for half of it."""
    directory = environment.get("SPECCTL_RUN_DIR")
    if not directory:
        return None
    names = ("SPECCTL_RUN_ID", "SPECCTL_ATTEMPT", "SPECCTL_NONCE")
    if missing := [name for name in names if not environment.get(name)]:
        raise ConfigError(f"SPECCTL_RUN_DIR is set, but {', '.join(missing)} is not; unset it to run without specctl")
    run_id, attempt, nonce = (environment[name] for name in names)
    if not attempt.isdecimal():
        raise ConfigError(f"SPECCTL_ATTEMPT must be a number, is {attempt!r}")
    if not Path(directory).is_dir():
        raise ConfigError(f"SPECCTL_RUN_DIR is no directory: {directory}")
    return RunIdentity(directory=Path(directory), run_id=run_id, attempt=int(attempt), nonce=nonce)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStep:
    """One worker between two logged steps. `busy` and the waits are shares of the time between them."""

    name: str
    loss: float | None = None
    """None for all but drafters, who alone take a step."""
    tok_s: float | None = None
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
    """One optimizer step, as it is logged."""

    step: int
    loss: float
    tok_s: float
    lr: float
    grad_norm: float
    queued: int
    queue_size: int
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


class Throughput:
    """Target tokens per second over the whole run, by worker; the first steps, which warm up, are left out.

    Until the warm-up is over the figure is that of the steps so far, so that it is never zero after a step.
    """

    def __init__(self, *, workers: int, now: float, warmup_steps: int = 2) -> None:
        self._counted = [0] * workers, now, now
        """Tokens by worker, since when, until when: exchanged as a whole, since another thread may be reading."""
        self._warmup_steps = warmup_steps
        self._steps = 0

    def add(self, tokens: list[int], *, now: float) -> None:
        """One more step: its tokens by worker."""
        counted, start, until = self._counted
        if self._steps == self._warmup_steps:
            counted, start = [0] * len(tokens), until
        self._steps += 1
        self._counted = [old + new for old, new in zip(counted, tokens, strict=True)], start, now

    def tok_s(self) -> list[float]:
        """By worker; their sum is the run's."""
        counted, start, until = self._counted
        return [tokens / max(until - start, 1e-9) for tokens in counted]


def _figure(name: str, value: float, form: str) -> str:
    """Of a step line; of a step that was skipped there is none, which is no nan to take for a broken run."""
    return f" {name}={value:{form}}" if math.isfinite(value) else ""


def complain(line: str) -> None:
    """One plain line on stderr."""
    print(f"trainer: {line}", file=sys.stderr, flush=True)


class Reporter:
    """Says what happens, from any thread. `gpu_memory_bytes` is asked at each heartbeat."""

    def __init__(self, identity: RunIdentity) -> None:
        self.identity = identity
        self.gpu_memory_bytes: Callable[[], dict[str, int]] = dict
        self._print_lock = threading.Lock()
        self._phase_lock = threading.Lock()
        self._heartbeat_lock = threading.Lock()
        self._phase = ""
        self._step = 0
        self._checkpointing = False
        self._heartbeat_at = 0.0
        self._unwritten: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def open(self) -> None:
        """Make the directory and start the heartbeat. Raises `ConfigError` where no directory can be."""
        try:
            self.identity.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir: cannot make {self.identity.directory}: {error.strerror}") from None
        self._thread.start()

    def ended(self, *, code: int, stopped: bool, **facts: Any) -> None:
        """The last record of this process."""
        self._closing.set()
        self._thread.join(HEARTBEAT_MAX_S)
        self._write_heartbeat()
        self.event("ended", code=code, stopped=stopped, **facts)

    def last_words(self, stopped: bool, code: int) -> None:
        """`ended` from a signal handler, right before the process is gone: waits for no lock for long."""
        if stopped:
            self._phase = "stopping"
            os.write(1, b"phase=stopping\n")
            self.event("phase", phase="stopping")
            # The heartbeat's own thread lets go of the lock; this one, if it was interrupted holding it, does not.
            self._write_heartbeat(lock_timeout_s=1.0)
        self.event("ended", code=code, stopped=stopped)

    # --- lines ---

    def say(self, line: str) -> None:
        """One plain line on stdout."""
        with self._print_lock:
            print(line, flush=True)

    def complain(self, line: str) -> None:
        with self._print_lock:
            complain(line)

    def phase(self, name: str, **facts: Any) -> None:
        """Enter a phase: a line, an event, a heartbeat. Nothing follows on `stopping`."""
        with self._phase_lock:
            if self._phase in (name, "stopping"):
                return
            self._phase = name
        self.say(" ".join([f"phase={name}", *(f"{key}={value}" for key, value in facts.items())]))
        self.event("phase", phase=name, **facts)
        self._write_heartbeat()

    def step(self, done: RunStep) -> None:
        """Log a step: a line per worker (the loader has none), then one for the run."""
        step = f"step={done.step}"
        lost = {"lost": done.lost} if done.lost else {}
        self._metric(
            done.step, loss=done.loss, tok_s=done.tok_s, lr=done.lr, grad_norm=done.grad_norm, worker=None,
            bottleneck=done.bottleneck, skipped=done.skipped, **lost,
        )  # fmt: skip
        for worker in done.workers:
            lr = None if worker.loss is None else done.lr
            shares = {name: round(getattr(worker, name), 4) for name in SHARES}
            self._metric(
                done.step, loss=worker.loss, tok_s=worker.tok_s, lr=lr, grad_norm=None, worker=worker.name, **shares
            )  # fmt: skip
        lines = [
            f"worker={one.name} tok/s={one.tok_s:.1f}" if one.loss is None
            else f"{step} worker={one.name}{_figure('loss', one.loss, '.4f')} tok/s={one.tok_s:.1f}"
            for one in done.workers if one.tok_s is not None
        ]  # fmt: skip
        lines.append(
            f"{step}{_figure('loss', done.loss, '.4f')} tok/s={done.tok_s:.1f} lr={done.lr:.2e}"
            f"{_figure('grad_norm', done.grad_norm, '.2f')}"
            f" queue={done.queued}/{done.queue_size}"
            f" wait_target={done.mean('drafter', 'wait_input'):.0%} wait_drafter={done.mean('target', 'wait_room'):.0%}"
            f" bottleneck={done.bottleneck}" + (f" skipped={done.skipped}" if done.skipped else "")
            + (f" lost={','.join(done.lost)}" if done.lost else "")
        )
        self.say("\n".join(lines))

    def no_progress(self, what: str, stacks: Mapping[str, str], **facts: Any) -> None:
        """What every thread does, as lines and as an event."""
        told = [f"watchdog: {what}; what the threads do:"]
        for name, stack in stacks.items():
            told += [f"  in {name}:", *("    " + line for line in stack.rstrip().splitlines())]
        self.say("\n".join(told))
        self.event("no_progress", message=what, stacks=dict(stacks), **facts)

    def advanced(self, step: int) -> None:
        """A step is done, logged or not: the heartbeat says so, at most twice a second."""
        self._step = step
        if time.monotonic() - self._heartbeat_at >= HEARTBEAT_MIN_S:
            self._write_heartbeat()

    @property
    def is_checkpointing(self) -> bool:
        return self._checkpointing

    def checkpointing(self, now: bool) -> None:
        self._checkpointing = now
        self._write_heartbeat()

    def exception(self, worker: str | None, error: BaseException, *, step: int | None = None, doing: str | None = None
                  ) -> None:  # fmt: skip
        """On stderr, Python's own form of an exception in a thread, or (None) in the main program; and the event."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        # The log first: it is read by people, and the records may be what cannot be written.
        with self._print_lock, contextlib.suppress(OSError):
            sys.stderr.write(f"Exception in thread {worker}:\n{text}" if worker else text)
            sys.stderr.flush()
        where = {key: value for key, value in (("step", step), ("doing", doing)) if value is not None}
        self.event("exception", worker=worker, type=name, message=str(error), traceback=text, **where)

    # --- records ---

    def event(self, name: str, **facts: Any) -> None:
        self._append("events.jsonl", {**self._stamp(), "event": name, **facts})

    def _metric(self, step: int, **facts: Any) -> None:
        # JSON has no nan.
        facts = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                 for key, value in facts.items()}  # fmt: skip
        self._append("metrics.jsonl", {**self._stamp(), "step": step, **facts})

    def _stamp(self) -> dict[str, Any]:
        return {
            "time": time.time(), "source": "trainer", "attempt": self.identity.attempt, "nonce": self.identity.nonce,
        }  # fmt: skip

    def _append(self, name: str, record: dict[str, Any]) -> None:
        # One write on an O_APPEND descriptor: lines of several threads, and of the supervisor, never mix. No lock, so
        # that a signal handler may call it.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with self._complaint_of(name):
            descriptor = os.open(self.identity.directory / name, flags, 0o644)
            try:
                os.write(descriptor, json.dumps(record).encode() + b"\n")
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _complaint_of(self, name: str) -> Iterator[None]:
        """A record that cannot be written is said once and ends nothing: not the run, which a full disk ends at its
        next checkpoint, by name; nor the report of what did end it."""
        try:
            yield
        except OSError as error:
            if name not in self._unwritten:
                self._unwritten.add(name)
                with contextlib.suppress(OSError):
                    os.write(2, f"trainer: {name} is not written: {error.strerror or error}\n".encode())

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_MAX_S):
            self._write_heartbeat()

    def _write_heartbeat(self, *, lock_timeout_s: float = -1) -> None:
        locked = self._heartbeat_lock.acquire(timeout=lock_timeout_s)
        try:
            with self._complaint_of("heartbeat.json"):
                self._replace_heartbeat("heartbeat.json.tmp" if locked else "heartbeat.json.last")
        finally:
            if locked:
                self._heartbeat_lock.release()

    def _replace_heartbeat(self, aside_name: str) -> None:
        beat = {
            "run_id": self.identity.run_id,
            "attempt": self.identity.attempt,
            "nonce": self.identity.nonce,
            "pid": os.getpid(),
            "phase": self._phase,
            "step": self._step,
            "time": time.time(),
            "monotonic_s": time.monotonic(),
            "checkpointing": self._checkpointing,
            "gpu_memory_bytes": self.gpu_memory_bytes(),
        }
        self._heartbeat_at = time.monotonic()
        path = self.identity.directory / "heartbeat.json"
        aside = path.with_name(aside_name)
        aside.write_text(json.dumps(beat), encoding="utf-8")
        aside.replace(path)
