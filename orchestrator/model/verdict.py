"""What may be said of a run, and by what evidence."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from orchestrator.model.logs import Finding, LastWords, Worker
from orchestrator.record import record

StateName = Literal[
    "QUEUED", "STARTING", "RUNNING", "DEGRADED", "STALLED", "STOPPING",
    "SUCCEEDED", "FAILED", "STOPPED", "KILLED", "NEVER_STARTED", "LOST",
    "UNREACHABLE",
]  # fmt: skip
LIVE: frozenset[str] = frozenset({"QUEUED", "STARTING", "RUNNING", "DEGRADED", "STALLED", "STOPPING"})
ENDED: frozenset[str] = frozenset({"SUCCEEDED", "FAILED", "STOPPED", "KILLED", "NEVER_STARTED", "LOST"})
BAD: frozenset[str] = frozenset({"DEGRADED", "STALLED", "FAILED", "KILLED", "NEVER_STARTED", "LOST"})

Rung = Literal["none", "accepted", "session", "process", "log", "gpu", "step"]
RUNGS: tuple[Rung, ...] = ("none", "accepted", "session", "process", "log", "gpu", "step")


@record
class Evidence:
    """One thing that was seen: what, its value, and when (container clock)."""

    what: str
    value: str
    observed_at: float


@record
class Verdict:
    """What may be said of a run, and why."""

    state: StateName
    why: str
    """One clause that names the evidence: `step 12, 310 tok/s` or `exit code 3`."""
    observed_at: float
    step: int | None = None
    tok_s: float | None = None
    loss: float | None = None
    last_progress_at: float | None = None
    workers_alive: int = 0
    workers_total: int = 0
    workers_gone: list[str] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    """Those that count: an older run's text names none."""
    error: Finding | None = None
    """The failure: what a process or worker ended with. Findings that ended nothing are not here."""
    last_words: LastWords | None = None
    """What it said last, of a run that ended badly without an exception of its own."""

    @property
    def live(self) -> bool:
        return self.state in LIVE
