"""What happens in a run, written down line by line: events.jsonl and metrics.jsonl."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable
from typing import Any

from orchestrator.agent import files, records
from orchestrator.logscan import Event, FindingEvent, PhaseEvent, StepEvent, WorkerDown, WorkerUp
from orchestrator.model import RunPaths, to_json

ROWS_PER_S = 10.0
"""So many steps of a worker stand in metrics.jsonl for a second, on average: a program may print 200,000."""
WORKERS_LIMIT = 256


@dataclasses.dataclass(slots=True)
class _Steps:
    """One worker's steps that no row says yet, and how many rows it may have for them."""

    credit: float
    credited_at: float
    waiting: list[tuple[StepEvent, float]] = dataclasses.field(default_factory=list)

    def take(self, now: float) -> list[tuple[StepEvent, float]]:
        """Those that are to be written now: all, or of too many as many as may be, evenly spread, with the newest."""
        self.credit = min(ROWS_PER_S, self.credit + max(0.0, now - self.credited_at) * ROWS_PER_S)
        self.credited_at = now
        count, steps = min(len(self.waiting), int(self.credit)), self.waiting
        if not count:
            del self.waiting[:-1]
            return []
        self.credit -= count
        self.waiting = []
        return [steps[(number + 1) * len(steps) // count - 1] for number in range(count)]


class Journal:
    """The supervisor's part of both files. Nothing here raises: a full disk costs lines, not the run."""

    def __init__(self, paths: RunPaths, *, attempt: int, nonce: str) -> None:
        self.paths, self.attempt, self.nonce = paths, attempt, nonce
        self._events = files.JsonLines(paths.events)
        self._metrics = files.JsonLines(paths.metrics)
        self._steps: dict[str | None, _Steps] = {}

    def event(self, event: str, **fields: Any) -> None:
        self._events.append({
            "time": time.time(), "source": "supervisor", "attempt": self.attempt, "nonce": self.nonce, "event": event,
            **fields,
        })  # fmt: skip

    def write(self, events: Iterable[Event]) -> None:
        """What the scanner has read out of a log.

        A trainer that keeps its heartbeat writes its own metrics and events; every other program's are read from its
        lines. That a worker is gone is said in either case: the trainer may be in no state to say it.
        """
        now = time.time()
        own_records = records.heartbeat(self.paths, self.nonce) is not None
        for event in events:
            if isinstance(event, WorkerDown):
                self.event("worker_down", worker=event.name)
            elif own_records:
                continue
            elif isinstance(event, StepEvent):
                if len(self._steps) < WORKERS_LIMIT or event.worker in self._steps:
                    steps = self._steps.setdefault(event.worker, _Steps(credit=ROWS_PER_S, credited_at=now))
                    steps.waiting.append((event, now))
            elif isinstance(event, PhaseEvent):
                self.event("phase", phase=event.phase, fields=dict(event.fields))
            elif isinstance(event, WorkerUp):
                self.event("worker_up", worker=event.name)
            elif isinstance(event, FindingEvent):
                self.event("exception", **to_json(event.finding))
        self._metrics.extend(self._row(*step) for steps in self._steps.values() for step in steps.take(now))

    def close(self) -> None:
        """Writes the newest step of each worker, if no row says it yet."""
        self._metrics.extend(self._row(*step) for steps in self._steps.values() for step in steps.waiting[-1:])
        self._steps.clear()

    def _row(self, event: StepEvent, now: float) -> dict[str, Any]:
        figures = {"loss": event.loss, "tok_s": event.tok_s, "lr": event.lr, "grad_norm": event.grad_norm}
        # JSON has no nan: a figure that is none is null, and `nonfinite_step` of the summary says so.
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in figures.items()}
        return {
            "time": now, "source": "log", "attempt": self.attempt, "nonce": self.nonce, "step": event.step,
            "worker": event.worker, **finite,
        }  # fmt: skip
