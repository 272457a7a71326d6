"""`stop`: ends a run and says so only when nothing of it is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator import health, index
from orchestrator.errors import DeadlineExceeded, LinkLost
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.model import Probe, Process, Verdict
from orchestrator.remote import understood
from orchestrator.resolve import Run, resolve

GRACE_S = 60.0
MARGIN_S = 700.0
"""Room for a checkpoint that is being written, for the kill and for the record, over the grace period."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    target: Target
    probe: Probe
    verdict: Verdict
    remaining: list[Process]
    kept: list[str]
    """Memory of its GPUs that is in use still, though nobody is seen to use it."""
    notes: list[str]
    was_live: bool
    """Whether something of it was running when the stop was asked for."""


class Watcher(Protocol):
    """Who is told how a stop comes along."""

    def note(self, text: str) -> None:
        """Which run is meant, before anything is done to it."""

    def waiting(self, doing: str, waited_s: float, grace_s: float, remaining: list[Process]) -> None:
        """`doing` is term, checkpoint or kill, as in the stopper's record; comes about once a second."""


def run(fleet: Fleet, query: str | None, *, grace_s: float, now: bool, watcher: Watcher | None = None) -> Result:
    """Stops the run that `query` means. Raises as `resolve` does, and `UnreachableError` when the end is unknown."""
    found = resolve(fleet, query, careful=True)
    if watcher is not None:
        for note in found.notes:
            watcher.note(note)
    return of_run(fleet, found.run, grace_s=grace_s, now=now, watcher=watcher, notes=found.notes)


def of_run(
    fleet: Fleet, run: Run, *, grace_s: float, now: bool, watcher: Watcher | None = None, notes: Sequence[str] = ()
) -> Result:
    """Stops a run that has been seen. Raises `UnreachableError` when the end is unknown."""
    agent = fleet.agent(run.target)
    final: dict[str, Any] = {}
    try:
        with agent.stream(
            "stop", deadline_s=grace_s + MARGIN_S, run_id=run.run_id, grace_s=grace_s, now=now, by=index.owner()
        ) as frames:
            for frame in frames:
                final = frame
                if "doing" in frame and watcher is not None:
                    remaining = [understood(Process, item, run.target) for item in frame["remaining"]]
                    watcher.waiting(frame["doing"], frame["waited_s"], grace_s, remaining)
    except (LinkLost, DeadlineExceeded) as error:
        raise type(error)(
            f"{error.message}; if the stop had arrived there, it goes on", target=run.target.name, run_id=run.run_id,
            hint=f"specctl status {run.run_id} tells; {error.hint}" if error.hint else f"specctl status {run.run_id}",
        ) from error  # fmt: skip
    probe = understood(Probe, final.get("probe"), run.target)
    return Result(
        target=run.target, probe=probe, verdict=health.judge(probe),
        remaining=understood(list[Process], final.get("remaining"), run.target),
        kept=[str(text) for text in final.get("kept") or []], notes=list(notes),
        was_live=run.verdict.live or bool(run.probe.tree),
    )  # fmt: skip
