"""What happens in a run, written down line by line: events.jsonl and metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from orchestrator.agent import files, records
from orchestrator.logscan import Event, FindingEvent, PhaseEvent, StepEvent, WorkerDown, WorkerUp
from orchestrator.model import RunPaths, to_json


class Journal:
    """The supervisor's part of both files. Nothing here raises: a full disk costs lines, not the run."""

    def __init__(self, paths: RunPaths, *, attempt: int, nonce: str) -> None:
        self.paths, self.attempt, self.nonce = paths, attempt, nonce
        self._events = files.JsonLines(paths.events)
        self._metrics = files.JsonLines(paths.metrics)

    def event(self, event: str, **fields: Any) -> None:
        self._events.append({
            "time": time.time(), "source": "supervisor", "attempt": self.attempt, "nonce": self.nonce, "event": event,
            **fields,
        })  # fmt: skip

    def write(self, events: Iterable[Event], now: float) -> None:
        """What the scanner has read out of a log.

        A trainer that keeps its heartbeat writes its own metrics and events; every other program's are read from its
        lines. That a worker is gone is said in either case: the trainer may be in no state to say it.
        """
        own_records = records.heartbeat(self.paths, self.nonce) is not None
        for event in events:
            if isinstance(event, WorkerDown):
                self.event("worker_down", worker=event.name)
            elif own_records:
                continue
            elif isinstance(event, StepEvent):
                self._step(event, now)
            elif isinstance(event, PhaseEvent):
                self.event("phase", phase=event.phase, fields=dict(event.fields))
            elif isinstance(event, WorkerUp):
                self.event("worker_up", worker=event.name)
            elif isinstance(event, FindingEvent):
                self.event("exception", **to_json(event.finding))

    def _step(self, event: StepEvent, now: float) -> None:
        figures = {"loss": event.loss, "tok_s": event.tok_s, "lr": event.lr, "grad_norm": event.grad_norm}
        # JSON has no nan: a figure that is none is null, and `nonfinite_step` of the summary says so.
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in figures.items()}
        self._metrics.append({
            "time": now, "source": "log", "attempt": self.attempt, "nonce": self.nonce, "step": event.step,
            "worker": event.worker, **finite,
        })  # fmt: skip
