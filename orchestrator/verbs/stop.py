"""`stop`: ends a run and says so only when nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator import health, index
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.model import Probe, Process, Verdict, from_json
from orchestrator.resolve import resolve

GRACE_S = 60.0
MARGIN_S = 700.0
"""Room for a checkpoint that is being written, for the kill and for the record, over the grace period."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    target: Target
    probe: Probe
    verdict: Verdict
    remaining: list[Process]
    notes: list[str]
    was_live: bool
    """Whether it was running when the stop was asked for."""


def run(
    fleet: Fleet, query: str | None, *, grace_s: float, now: bool, tell: Callable[[str], None] = lambda text: None
) -> Result:
    """Stops the run that `query` means. Raises as `resolve` does, and `UnreachableError` when the end is unknown."""
    found = resolve(fleet, query, careful=True)
    for note in found.notes:
        tell(note)
    run = found.run
    agent = fleet.agent(run.target)
    final: dict[str, Any] = {}
    with agent.stream(
        "stop", deadline_s=grace_s + MARGIN_S, run_id=run.run_id, grace_s=grace_s, now=now, by=index.owner()
    ) as frames:
        for frame in frames:
            final = frame
            if "doing" in frame:
                names = ", ".join(f"{process['name']} ({process['pid']})" for process in frame["remaining"][:4])
                tell(f"{_DOING[frame['doing']]} {frame['waited_s']:.0f} s: {names}")
    probe = from_json(Probe, final["probe"])
    return Result(
        target=run.target, probe=probe, verdict=health.judge(probe),
        remaining=[from_json(Process, item) for item in final["remaining"]], notes=found.notes,
        was_live=run.verdict.live,
    )  # fmt: skip


_DOING = {
    "term": "asked to end, waiting",
    "checkpoint": "it is writing a checkpoint, waiting",
    "kill": "killed, looking again",
}
