"""`ls`: the runs there have been, on all targets, and those that only this machine's index still knows of."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from orchestrator import index
from orchestrator.errors import ConfigError
from orchestrator.fleet import Fleet, TargetView
from orchestrator.model import StateName
from orchestrator.resolve import Run, runs_of

GONE: Final = "GONE"
"""Not a state of a run: its target answered, and has no such run."""
STATES: tuple[str, ...] = (*get_args(StateName), GONE)
ROWS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was typed; every filter narrows."""

    targets: Sequence[str] = ()
    """Names of targets or groups; none: all."""
    states: Sequence[str] = ()
    name: str | None = None
    """A glob over run ids; without a wildcard, a part of one."""
    within_s: float | None = None
    owner: str | None = None
    """A part of `user@host`."""
    limit: int = ROWS
    """The newest so many; 0: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run: as it was just seen, or as far as this machine's index knows it."""

    run_id: str
    target: str
    state: StateName | Literal["GONE"]
    why: str
    started_at: float
    took_s: float | None = None
    owner: str = ""
    seen: Run | None = None
    """None: it was not seen, and `why` says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    rows: list[Row]
    left_out: int
    """Rows that fit the filters and are older than the newest `limit`."""
    silent: list[TargetView] = field(default_factory=list)
    """Targets that could not be asked: what else ran there is unknown."""


def run(fleet: Fleet, request: Request) -> Result:
    """Raises `NotFound` for a target, `ConfigError` for a state that does not exist."""
    wanted = {_state(word) for word in request.states}
    targets = fleet.inventory.expand(request.targets) if request.targets else list(fleet.inventory.targets.values())
    views = fleet.probe(targets, ended_within_s=request.within_s)
    rows = [_seen(run) for view in views for run in runs_of(view)]
    rows += _remembered(views, {row.run_id for row in rows}, whole=request.within_s is None, fleet=fleet)
    since = None if request.within_s is None else time.time() - request.within_s
    chosen = [row for row in rows if _fits(row, request, wanted, since)]
    chosen.sort(key=lambda row: (row.started_at, row.run_id), reverse=True)
    shown = chosen[: request.limit] if request.limit else chosen
    silent = [view for view in views if view.error is not None]
    return Result(rows=shown, left_out=len(chosen) - len(shown), silent=silent)


def _state(word: str) -> str:
    state = word.upper().replace("-", "_")
    if state not in STATES:
        raise ConfigError(f"{word!r} is no state of a run", hint=f"there are: {', '.join(STATES).lower()}")
    return state


def _seen(run: Run) -> Row:
    probe, verdict = run.probe, run.verdict
    end = probe.exit.at if probe.exit is not None else probe.observed_at if verdict.live else None
    if end is not None and verdict.state == "NEVER_STARTED":
        end = None
    return Row(
        run_id=run.run_id, target=run.target.name, state=verdict.state, why=verdict.why, started_at=probe.created_at,
        took_s=None if end is None else max(0.0, end - probe.created_at), owner=probe.owner, seen=run,
    )  # fmt: skip


def _remembered(views: Sequence[TargetView], seen: set[str], *, whole: bool, fleet: Fleet) -> list[Row]:
    """What this user launched from here and the look did not show. A look at the newest runs only (`whole` false) does
    not say that the others are gone, so they are asked for by name."""
    missing: dict[str, list[index.Launch]] = {}
    for launch in index.launches():
        if launch.run_id not in seen and not launch.refused:
            missing.setdefault(launch.target, []).append(launch)
    rows = []
    for view in views:
        launches = missing.get(view.target.name, [])
        there: set[str] = set()
        if launches and view.error is None and not whole:
            [again] = fleet.probe([view.target], run_ids=[launch.run_id for launch in launches])
            there = {probe.run_id for probe in again.runs}
            view = again if again.error is not None else view
        for launch in launches:
            if launch.run_id in there:
                continue  # it is there, and older than was asked for
            state: StateName | Literal["GONE"] = GONE
            why = "no longer there: it was removed, or its launch never got that far"
            if view.error is not None:
                state, why = "UNREACHABLE", f"launched from here; {view.error.message}"
            rows.append(
                Row(
                    run_id=launch.run_id, target=launch.target, state=state, why=why, started_at=launch.at,
                    owner=index.owner(),
                )
            )  # fmt: skip
    return rows


def _fits(row: Row, request: Request, states: set[str], since: float | None) -> bool:
    if states and row.state not in states:
        return False
    if request.name is not None:
        glob = request.name if any(char in request.name for char in "*?[") else f"*{request.name}*"
        if not fnmatch.fnmatchcase(row.run_id, glob):
            return False
    if request.owner is not None and request.owner not in row.owner:
        return False
    live = row.seen is not None and row.seen.verdict.live
    return since is None or live or row.started_at + (row.took_s or 0.0) >= since
