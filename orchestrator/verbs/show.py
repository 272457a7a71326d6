"""`show`: everything that is known of one run, as it was just seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator import health
from orchestrator.fleet import Fleet
from orchestrator.model import Evidence, Probe, Rung, StopperRecord, StopRequest, SupervisorRecord
from orchestrator.remote import understood
from orchestrator.resolve import Run, resolve
from orchestrator.timeline import Event

EVENTS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What run.json says of what was asked and deployed, beside the probe."""

    bundle: str
    trainer: bool
    env: list[str]
    """Names; values are not shown."""
    secrets: list[str]
    config_path: str | None
    config_text: str | None
    config_sha256: str | None
    git_commit: str | None
    diff_bytes: int
    diff: str | None
    """Only when it was wanted."""
    env_hash: str | None
    gpus: list[int]
    patterns: dict[str, str]
    specctl_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The frame of run.json; each part may be missing."""

    cwd: str | None
    created_at: float | None
    workdir: str | None
    host: str | None
    versions: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    step: int
    path: str
    bytes: int
    at: float
    damage: str | None
    """Why it is no whole checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What the agent answers beside the probe."""

    host: str
    root: str
    spec: Asked | None
    """None: run.json is damaged or gone."""
    record: Record
    supervisor: SupervisorRecord | None
    stop: StopRequest | None
    """The newest request to stop, whatever became of it."""
    stopper: StopperRecord | None
    since: dict[str, float]
    """Pid -> when that process started."""
    checkpoints: list[Checkpoint]
    events: list[Event]
    events_before: bool
    """There are older events than these."""
    gpus: list[dict[str, Any]]
    gpus_error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    run: Run
    rung: Rung
    evidence: list[Evidence]
    missing: str
    """What the next rung of the ladder wants and was not seen."""
    shown: Shown
    notes: list[str]


def run(fleet: Fleet, query: str | None, *, events: int = EVENTS, diff: bool = False) -> Result:
    """Raises as `resolve` does."""
    found = resolve(fleet, query)
    return of_run(fleet, found.run, events=events, diff=diff, notes=found.notes)


def of_run(fleet: Fleet, run: Run, *, events: int = EVENTS, diff: bool = False, notes: Sequence[str] = ()) -> Result:
    target, run_id = run.target, run.run_id
    frame = fleet.agent(target).call("show", run_id=run_id, events=events, diff=diff)
    seen = understood(Probe, frame.get("probe"), target)
    one = Run(target=target, probe=seen, verdict=health.judge(seen))
    rung, evidence = health.rung(one.probe, one.verdict)
    return Result(
        run=one, rung=rung, evidence=evidence, missing=health.missing(one.probe, one.verdict),
        shown=understood(Shown, frame, target), notes=list(notes),
    )  # fmt: skip
