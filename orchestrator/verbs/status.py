"""`status`: one look at every run that was asked for, all targets at once. A dead target costs its own row."""

from __future__ import annotations

from orchestrator.fleet import Fleet, TargetView
from orchestrator.record import record
from orchestrator.resolve import Run, resolve, runs_of

RECENT_S = 24 * 3600.0


@record
class Result:
    views: list[TargetView]
    runs: list[Run]
    older: int
    """Runs that ended longer ago than is shown."""
    notes: list[str]

    @property
    def unreachable(self) -> list[TargetView]:
        return [view for view in self.views if view.error is not None]


def run(fleet: Fleet, words: list[str], *, everything: bool) -> Result:
    """`words` are targets, groups and runs; none of them means all targets. Raises `NotFound`, `Ambiguous`."""
    names = {*fleet.inventory.targets, *fleet.inventory.groups}
    wanted = [word for word in words if word not in names]
    places = [word for word in words if word in names]
    views: list[TargetView] = []
    runs: list[Run] = []
    notes: list[str] = []
    if places or not words:
        targets = fleet.inventory.expand(places) if places else list(fleet.inventory.targets.values())
        views = fleet.probe(targets, ended_within_s=None if everything else RECENT_S, gpus=True)
        runs = [run for view in views for run in runs_of(view)]
    for word in wanted:
        found = resolve(fleet, word)
        notes += found.notes
        if found.run.run_id not in {run.run_id for run in runs}:
            runs.append(found.run)
        if found.run.target.name not in {view.target.name for view in views}:
            views += fleet.probe([found.run.target], run_ids=[], gpus=True)
    runs.sort(key=lambda run: (not run.verdict.live, -run.probe.created_at))
    return Result(views=views, runs=runs, older=sum(view.older for view in views), notes=notes)
