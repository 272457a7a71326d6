"""`prune`: what nobody needs on the targets, shown first; removed only what was shown.

The targets say what there is; which runs have ended is judged here, as everywhere else. A target removes nothing that
it does not find unneeded once more at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import SpecctlError
from orchestrator.fleet import Fleet, TargetView
from orchestrator.inventory import Target
from orchestrator.remote import understood
from orchestrator.resolve import runs_of

LOOK_IDLE_S = 60.0
REMOVE_IDLE_S = 300.0
"""One folder of very many files goes without a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was typed. `runs`: old runs are to go, too."""

    targets: list[str]
    runs: bool
    older_than_s: float
    keep_checkpoints: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One thing that may go. `age_s` is the time since it was last used, or since a run's end."""

    key: str
    kind: str
    name: str
    path: str
    bytes: int
    age_s: float
    why: str


@dataclass(kw_only=True, slots=True)
class Place:
    """A target, what may go there, and what has gone."""

    target: Target
    error: SpecctlError | None = None
    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What stays although it may look as if it could go, and why."""
    live: int = 0
    """Runs that live there, or of which it is not known."""
    ended: list[str] = field(default_factory=list)
    same_as: str | None = None
    """The target under whose name the same place has been looked at."""
    gone: list[Item] = field(default_factory=list)
    failed: list[tuple[Item, str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    what: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    machine: str
    place: str
    items: list[Item]
    kept: list[_Kept]
    notes: list[str]


def look(fleet: Fleet, request: Request) -> list[Place]:
    """What may go, a target each; one that cannot be asked carries its error. Removes nothing."""
    inventory = fleet.inventory
    targets = inventory.expand(request.targets) if request.targets else list(inventory.targets.values())
    views = fleet.probe(targets)
    with ThreadPoolExecutor(max_workers=min(8, len(views)) or 1) as workers:
        found = list(workers.map(lambda view: _look(fleet, view, request), views))
    seen: dict[str, str] = {}
    listed: set[tuple[str, str]] = set()
    for place, answer in found:
        if answer is None:
            continue
        if seen.setdefault(answer.place, place.target.name) != place.target.name:
            place.same_as, place.items, place.notes = seen[answer.place], [], []
        # What lies outside the workdirs of a machine is found from each of them.
        place.items = [item for item in place.items if (answer.machine, item.path) not in listed]
        listed.update((answer.machine, item.path) for item in place.items)
    return [place for place, _ in found]


def _look(fleet: Fleet, view: TargetView, request: Request) -> tuple[Place, _Answer | None]:
    place = Place(target=view.target, error=view.error)
    if view.error is not None or view.no_workdir:
        return place, None
    runs = runs_of(view)
    place.ended = [run.run_id for run in runs if not run.verdict.live and run.verdict.state != "UNREACHABLE"]
    place.live = len(runs) - len(place.ended)
    try:
        answer = understood(_Answer, _ask(fleet, place, request), view.target)
    except SpecctlError as error:
        place.error = error
        return place, None
    place.items = answer.items
    place.notes = [f"{one.what} stays: {one.why}" for one in answer.kept] + answer.notes
    return place, answer


def remove(fleet: Fleet, places: Sequence[Place], request: Request, news: Callable[[str], None]) -> None:
    """Removes what `look` has found, and notes in `places` what has gone, and what has not."""
    for place in places:
        if not place.items:
            continue
        news(f"removing {len(place.items)} from {place.target.name}")
        items = {item.key: item for item in place.items}
        try:
            answer = _ask(fleet, place, request, remove=list(items))
        except SpecctlError as error:
            place.error = error
            continue
        place.gone = [items[key] for key in answer["gone"] if key in items]
        place.failed = [(items[one["key"]], str(one["why"])) for one in answer["failed"] if one["key"] in items]


def _ask(fleet: Fleet, place: Place, request: Request, *, remove: list[str] | None = None) -> dict[str, Any]:
    with fleet.agent(place.target).stream(
        "prune", deadline_s=None, idle_s=LOOK_IDLE_S if remove is None else REMOVE_IDLE_S,
        ended=place.ended if request.runs else None, older_than_s=request.older_than_s,
        keep_checkpoints=request.keep_checkpoints, remove=remove,
    ) as frames:  # fmt: skip
        return list(frames)[-1]
