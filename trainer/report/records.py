"""The records of a run's directory, which are the contract with specctl: events, figures and the heartbeat.

With specctl around it (four SPECCTL_ variables) they go into the run directory it names; without, into the
configuration's `output_dir`, in the same form. `events.jsonl` and `metrics.jsonl` grow by one write a line,
`heartbeat.json` is replaced whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import lock
from trainer.config import ConfigError

HEARTBEAT_MIN_S = 0.5
HEARTBEAT_MAX_S = 2.0
APPENDED = ("events.jsonl", "metrics.jsonl")


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


class Records:
    """Written from any thread; what cannot be written is said once and ends nothing: not the run, which a full disk
    ends at its next checkpoint, by name; nor the report of what did end it."""

    def __init__(self, identity: RunIdentity) -> None:
        self.identity = identity
        self.heartbeat = Heartbeat(self)
        self._unwritten: set[str] = set()
        self._lock: int | None = None

    def open(self, *, complain: Callable[[str], None]) -> None:
        """Make the directory, lock it, and start the heartbeat. Raises `ConfigError` where no directory can be, or
        another training is at work."""
        self.make_directory()
        self._lock = lock.hold(self.identity.directory, complain=complain)
        for name in APPENDED:
            self._end_line(name)
        self.heartbeat.start()

    def make_directory(self) -> None:
        """Raises `ConfigError` where there can be none."""
        try:
            self.identity.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir: cannot make {self.identity.directory}: {error.strerror}") from None

    def close(self) -> None:
        """Another training may write there from now on."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def event(self, name: str, **facts: Any) -> None:
        """Takes no lock, so that a signal handler may call it."""
        self._append("events.jsonl", {**self._stamp(), "event": name, **facts})

    def metric(self, step: int, **facts: Any) -> None:
        # JSON has no nan.
        facts = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                 for key, value in facts.items()}  # fmt: skip
        self._append("metrics.jsonl", {**self._stamp(), "step": step, **facts})

    def _stamp(self) -> dict[str, Any]:
        return {
            "time": time.time(), "source": "trainer", "attempt": self.identity.attempt, "nonce": self.identity.nonce,
        }  # fmt: skip

    def _append(self, name: str, record: dict[str, Any]) -> None:
        # One write on an O_APPEND descriptor: lines of several threads, and of the supervisor, never mix.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with self.complaint_of(name):
            descriptor = os.open(self.identity.directory / name, flags, 0o644)
            try:
                os.write(descriptor, json.dumps(record).encode() + b"\n")
            finally:
                os.close(descriptor)

    def _end_line(self, name: str) -> None:
        """A power cut or a full disk may have left half a line at the end; the next one is to be a line of its own."""
        with self.complaint_of(name), contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self.identity.directory / name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    os.write(descriptor, b"\n")
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def complaint_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if name not in self._unwritten:
                self._unwritten.add(name)
                with contextlib.suppress(OSError):
                    os.write(2, f"trainer: {name} is not written: {error.strerror or error}\n".encode())


class Heartbeat:
    """`heartbeat.json`: written whenever something in it changes, and every `HEARTBEAT_MAX_S` whether or not."""

    def __init__(self, records: Records) -> None:
        self.gpu_memory_bytes: Callable[[], dict[str, int]] = dict
        """Asked each time."""
        self.phase = ""
        self.step = 0
        self.checkpointing = False
        self._records = records
        self._lock, self._phase_lock = threading.Lock(), threading.Lock()
        self._written_at = -math.inf
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        self._thread.join(HEARTBEAT_MAX_S)
        self.write()

    def enter(self, phase: str) -> bool:
        """Whether that is a new one; nothing follows on `stopping`. Not written yet."""
        with self._phase_lock:
            if self.phase in (phase, "stopping"):
                return False
            self.phase = phase
            return True

    def stepped(self, step: int) -> None:
        """Says so at most twice a second."""
        self.step = step
        if time.monotonic() - self._written_at >= HEARTBEAT_MIN_S:
            self.write()

    def write(self, *, lock_timeout_s: float = -1) -> None:
        """With a limit it is a signal handler's: whoever it has interrupted may be holding the lock."""
        locked = self._lock.acquire(timeout=lock_timeout_s)
        try:
            with self._records.complaint_of("heartbeat.json"):
                self._replace("heartbeat.json.tmp" if locked else "heartbeat.json.last")
        finally:
            if locked:
                self._lock.release()

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_MAX_S):
            self.write()

    def _replace(self, aside_name: str) -> None:
        identity = self._records.identity
        beat = {
            "run_id": identity.run_id,
            "attempt": identity.attempt,
            "nonce": identity.nonce,
            "pid": os.getpid(),
            "phase": self.phase,
            "step": self.step,
            "time": time.time(),
            "monotonic_s": time.monotonic(),
            "checkpointing": self.checkpointing,
            "gpu_memory_bytes": self.gpu_memory_bytes(),
        }
        self._written_at = time.monotonic()
        path = identity.directory / "heartbeat.json"
        aside = path.with_name(aside_name)
        aside.write_text(json.dumps(beat), encoding="utf-8")
        aside.replace(path)
