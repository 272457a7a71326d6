"""`logs`: the lines of one run, searched where they are; only what matches travels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from orchestrator import health
from orchestrator.errors import AgentError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.model import Probe, Verdict
from orchestrator.remote import understood
from orchestrator.resolve import resolve

DEADLINE_S = 600.0
FOLLOW_IDLE_S = 15.0
"""While following, the agent says every two seconds that it is there; this much silence is a lost link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was typed; the names are those of grep."""

    run: str | None
    grep: str | None = None
    last: int | None = None
    follow: bool = False
    after: int = 0
    before: int = 0
    ignore_case: bool = False
    invert: bool = False
    attempt: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line as it stands in a log. `offset` is its first byte in `file`; `match` is False for context."""

    file: str
    offset: int
    line: str
    match: bool


@dataclass(kw_only=True, slots=True)
class Logs:
    """The lines, and, when they have all been read, what they are of."""

    target: Target
    probe: Probe
    notes: list[str]
    lines: Iterator[Line]
    matched: int = 0
    total: int = 0
    shown: int = 0
    """Lines that have been handed out, context included."""
    foreign: list[dict[str, Any]] = field(default_factory=list)
    seen: Verdict
    """As the run was when the lines were asked for, and when that was on this machine's clock."""
    seen_at: float
    verdict: Verdict | None = None
    """As it was after the last line."""
    last_byte_at: float | None = None


@contextmanager
def run(fleet: Fleet, request: Request) -> Iterator[Logs]:
    """The lines that were asked for. Reading on raises `LinkLost` or `DeadlineExceeded` when the link dies."""
    found = resolve(fleet, request.run)
    run = found.run
    agent = fleet.agent(run.target)
    with agent.stream(
        "logs", deadline_s=None if request.follow else DEADLINE_S, idle_s=FOLLOW_IDLE_S if request.follow else 120.0,
        run_id=run.run_id, grep=request.grep, last=request.last, follow=request.follow, after=request.after,
        before=request.before, ignore_case=request.ignore_case, invert=request.invert, attempt=request.attempt,
    ) as frames:  # fmt: skip
        logs = Logs(
            target=run.target, probe=run.probe, notes=found.notes, lines=iter(()), seen=run.verdict, seen_at=time.time()
        )

        def lines() -> Iterator[Line]:
            for frame in frames:
                for item in frame.get("lines", []):
                    logs.shown += 1
                    yield Line(
                        file=item["file"], offset=item["offset"], line=item["line"], match=item.get("match", True)
                    )
                if frame.get("final"):
                    logs.matched, logs.total = frame["matched"], frame["total"]
                    logs.foreign = frame["foreign"]
                    logs.last_byte_at = frame["last_byte_at"]
                    logs.probe = understood(Probe, frame.get("probe"), run.target)
                    logs.verdict = health.judge(logs.probe)
                    return
            raise AgentError("the agent ended without its last word", target=run.target.name, run_id=run.run_id)

        logs.lines = lines()
        yield logs
