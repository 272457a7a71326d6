"""Trackers are told of each logged step, by threads of their own: none of them can hold up a step, or end the run.

Figures wait in a bounded queue for each; of one that is too slow the oldest are dropped, and counted. One that raises
is told of once and asked no more. metrics.jsonl has everything whatever becomes of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.config import ConfigError
from trainer.report.records import RunIdentity
from trainer.sections import TrackingConfig

WAITING = 1000
"""Steps that may wait for a tracker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker has to know of the run."""

    name: str
    id: str
    """The name, and for a run that began anew in the same directory something more: what is there is another's."""
    directory: Path
    settings: Mapping[str, Any]
    steps_done: int
    """Steps after these are to come, whatever an earlier process said of them."""
    tracked: int
    """Up to here an earlier process has told its trackers."""


class Tracker(Protocol):
    """One thread makes it and calls it; all that it does may be slow, and may raise."""

    def log(self, step: int, scalars: Mapping[str, float], time_s: float) -> None: ...

    def flush(self) -> None:
        """Nothing more is waiting."""

    def close(self, code: int) -> None:
        """The run has ended, with this exit code."""


def check(config: TrackingConfig, environ: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a tracker that is asked for and cannot be; imports none of them."""
    for name in ("wandb", "trackio"):
        if getattr(config, name) is not None and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name}: {name} is not installed; pip install {name}, or leave tracking.{name} out"
            )
    if config.wandb is not None and config.wandb.mode == "online" and not environ.get("WANDB_API_KEY"):
        raise ConfigError("tracking.wandb: WANDB_API_KEY is not set in the environment; set it there, or mode: offline")


class Tracking:
    """All trackers of a run. `say` and `event` are told of what goes wrong."""

    def __init__(self, config: TrackingConfig, identity: RunIdentity, settings: Mapping[str, Any], *, steps_done: int,
                 say: Callable[[str], None], event: Callable[..., None]) -> None:  # fmt: skip
        run = _tracked_run(identity, settings, steps_done=steps_done)
        makers = makers_of(config, say=say)
        self._feeders = [Feeder(name, lambda make=make: make(run), say, event) for name, make in makers.items()]

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for feeder in self._feeders:
            feeder.put(step, scalars)

    def close(self, *, code: int, timeout_s: float) -> list[str]:
        """The run has ended with this exit code: let them tell what is waiting. Returns who is not done in time, or has
        failed: what they leave may hold up, or spoil, the interpreter's end."""
        deadline = time.monotonic() + timeout_s
        for feeder in self._feeders:
            feeder.end(code)
        left = [feeder for feeder in self._feeders if not feeder.join(max(0.0, deadline - time.monotonic()))]
        return [f"tracker-{feeder.name}" for feeder in left]


def makers_of(config: TrackingConfig, *, say: Callable[[str], None]) -> dict[str, Callable[[TrackedRun], Tracker]]:
    """By name; what it takes to make one happens in its own thread."""
    from trainer.report import trackers

    makers: dict[str, Callable[[TrackedRun], Tracker]] = {}
    if config.tensorboard:
        if importlib.util.find_spec("tensorboardX") is not None:
            makers["tensorboard"] = trackers.TensorBoard
        else:
            say("tracking.tensorboard: no event files, since tensorboardX is not installed; metrics.jsonl has it all")
    if (wandb := config.wandb) is not None:
        makers["wandb"] = lambda run: trackers.Wandb(run, wandb)
    if (trackio := config.trackio) is not None:
        makers["trackio"] = lambda run: trackers.Trackio(run, trackio)
    return makers


class Feeder:
    """The thread of one tracker, and what waits for it."""

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None], event: Callable[..., None],
                 *, waiting: int = WAITING) -> None:  # fmt: skip
        self.name = name
        self._make, self._say, self._event = make, say, event
        self._queue: queue.Queue[tuple[int, Mapping[str, float], float] | None] = queue.Queue(waiting)
        self._code = 0
        self._failed = False
        self._dropped = 0
        # Daemon: one that hangs in somebody else's library must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, scalars: Mapping[str, float]) -> None:
        """Never waits."""
        if not self._failed:
            self._put((step, scalars, time.time()))

    def end(self, code: int) -> None:
        """Of the run, which has ended with this exit code."""
        self._code = code
        self._put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended well by then; if not, it is said."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say(f"tracking.{self.name}: not done after {timeout_s:.0f} s, and left; metrics.jsonl has it all")
            return False
        if self._dropped:
            self._say(f"tracking.{self.name}: was too slow for {self._dropped} steps; metrics.jsonl has them")
        return not self._failed

    def _put(self, item: tuple[int, Mapping[str, float], float] | None) -> None:
        while True:
            try:
                self._queue.put_nowait(item)
                return
            except queue.Full:
                try:
                    self._queue.get_nowait()
                    self._dropped += 1
                except queue.Empty:  # its thread was quicker
                    pass

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
                if self._queue.empty():
                    tracker.flush()
            tracker.close(self._code)
        except Exception as error:
            self._failed = True
            why = " ".join(str(error).split()) or type(error).__name__
            self._say(f"tracking.{self.name}: told no more of this run: {type(error).__name__}: {why}")
            self._event("tracker_failed", tracker=self.name, type=type(error).__name__, message=why)


def _tracked_run(identity: RunIdentity, settings: Mapping[str, Any], *, steps_done: int) -> TrackedRun:
    note = identity.directory / "tracking.json"
    name = run_id = identity.run_id
    tracked = 0
    # With specctl no two runs have one id. Without, a directory may be trained into again from the beginning.
    goes_on = bool(identity.nonce) or steps_done > 0
    if not identity.nonce:
        run_id = _noted_id(note) if goes_on else None
        if run_id is None:
            run_id = f"{name}-{secrets.token_hex(4)}"
            with contextlib.suppress(OSError):  # then the next process takes another one
                note.write_text(json.dumps({"id": run_id}) + "\n", encoding="utf-8")
    if goes_on:
        tracked = last_step(identity.directory / "metrics.jsonl")
    return TrackedRun(
        name=name, id=run_id, directory=identity.directory, settings=settings, steps_done=steps_done, tracked=tracked
    )  # fmt: skip


def _noted_id(note: Path) -> str | None:
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_step(metrics: Path, *, tail_bytes: int = 1 << 16) -> int:
    """The last one that is on record, 0 if there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - tail_bytes))
            lines: Sequence[bytes] = file.read(tail_bytes).splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
