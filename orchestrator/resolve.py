"""RUN -> one run: a full id, any unambiguous part of one, `@last`, or the caller's only live run.

Everything here is decided on what the targets say now. The local index only says where to ask first.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from orchestrator import health, index
from orchestrator.errors import Ambiguous, NotFound, SpecctlError, UnreachableError
from orchestrator.fleet import Fleet, TargetView
from orchestrator.inventory import Target
from orchestrator.model import Probe, Verdict, is_run_id
from orchestrator.record import record

LAST = "@last"
PART = 3
"""Characters that a part of an id needs for a stop: fewer are a slip of the finger."""


@record
class Run:
    """One run as it was just seen."""

    target: Target
    probe: Probe
    verdict: Verdict

    @property
    def run_id(self) -> str:
        return self.probe.run_id


@record
class Resolved:
    """The run that was meant, and what a person should be told about how it was found."""

    run: Run
    notes: list[str]


def runs_of(view: TargetView) -> list[Run]:
    return [Run(target=view.target, probe=probe, verdict=health.judge(probe)) for probe in view.runs]


def resolve(fleet: Fleet, query: str | None, *, careful: bool = False) -> Resolved:
    """The one run that `query` means.

    `careful` (for what cannot be undone): a part of an id does not do while some target cannot be asked, nor for a run
    of somebody else. Raises `NotFound` or `Ambiguous` with the candidates, `UnreachableError` when it cannot be known.
    """
    notes: list[str] = []
    launches = index.launches()
    wanted = query
    if query is not None and query != LAST and not any(character.isalnum() for character in query):
        raise NotFound(f"{query!r} is no part of a run id", hint="specctl status lists the runs there are")
    if careful and query is not None and query != LAST and len(query) < PART:
        raise NotFound(
            f"{query!r} is too short a part of an id for what cannot be undone",
            hint=f"give at least {PART} characters of it; specctl status lists the runs there are",
        )
    if query == LAST:
        wanted, notes = _last(launches, fleet, careful=careful)
    if wanted is not None and is_run_id(wanted):
        for launch in reversed(launches):
            if launch.run_id == wanted and launch.target in fleet.inventory.targets:
                view = fleet.probe([fleet.inventory.targets[launch.target]], run_ids=[wanted])[0]
                if view.error is not None:
                    raise _unknown(view.error)
                if view.runs:
                    return Resolved(run=runs_of(view)[0], notes=notes)
                if query == LAST:
                    raise NotFound(
                        f"@last is {wanted}, and {launch.target} has no such run: removed, or never got that far",
                        hint="name an older run, or launch again; specctl status lists the runs there are",
                    )
                break
    views = fleet.probe(list(fleet.inventory.targets.values()))
    runs = [run for view in views for run in runs_of(view)]
    silent = [view for view in views if view.error is not None]
    if wanted is None:
        only = _only_live(runs, silent)
        return Resolved(run=only, notes=[f"your only live run is {only.run_id} on {only.target.name}"])
    exact = [run for run in runs if run.run_id == wanted]
    fitting = exact or [run for run in runs if wanted in run.run_id]
    if not fitting:
        if silent:
            raise UnreachableError(
                f"no run {wanted!r} on the targets that answered; not asked: {_names(silent)}", hint=_why(silent)
            )
        for launch in launches:
            if launch.run_id == wanted and launch.refused:
                raise NotFound(_refused(launch), hint="launch again; specctl status lists the runs there are")
            if launch.run_id == wanted and launch.target not in fleet.inventory.targets:
                raise _elsewhere(launch, fleet)
        places = [*fleet.inventory.targets, *fleet.inventory.groups]
        raise NotFound(f"no run {wanted!r} on {_targets(fleet)}", hint=_nearest(wanted, runs, places) or _hint(runs))
    if len(fitting) > 1:
        raise Ambiguous(f"{wanted!r} fits {len(fitting)} runs", hint=_candidates(fitting))
    run = fitting[0]
    if not exact and careful:
        if silent:
            raise UnreachableError(
                f"{wanted!r} fits {run.run_id}, but {_names(silent)} could not be asked whether it fits more",
                hint=f"use the full id: {run.run_id}",
            )
        if run.probe.owner != index.owner():
            raise NotFound(
                f"{run.run_id} belongs to {run.probe.owner}: to stop somebody else's run, give its full id",
                hint=f"specctl stop {run.run_id}",
            )
    if not exact:
        notes.append(f"{wanted!r} is {run.run_id}")
    if silent and not exact:
        notes.append(f"not asked: {_names(silent)}")
    return Resolved(run=run, notes=notes)


def _last(launches: Sequence[index.Launch], fleet: Fleet, *, careful: bool) -> tuple[str, list[str]]:
    """The run id that `@last` means, and what is to be said of it: the newest launch of a target of this hosts.yaml.

    After a launch that was refused it means none: nobody is to read the log of the run before, and take it for that of
    the one just launched. `careful`: nor one after which something was launched on a target that is not known here.
    """
    if not launches:
        raise NotFound("@last: nothing was launched from here yet", hint="specctl status --all lists every run")
    if launches[-1].refused:
        older = next((launch.run_id for launch in reversed(launches) if not launch.refused), None)
        hint = f"launch again; the run before it is {older}" if older else "launch again"
        raise NotFound(f"@last: {_refused(launches[-1])}", hint=hint)
    known = [launch for launch in launches if launch.target in fleet.inventory.targets and not launch.refused]
    if not known or (careful and launches[-1] != known[-1]):
        raise _elsewhere(launches[-1], fleet)
    notes = [_elsewhere(launches[-1], fleet).message] if launches[-1] != known[-1] else []
    return known[-1].run_id, [*notes, f"@last is {known[-1].run_id}"]


def _refused(launch: index.Launch) -> str:
    return f"the launch of {launch.run_id} on {launch.target} failed before anything was started"


def _unknown(error: SpecctlError) -> SpecctlError:
    """A look that failed, for want of a Python say, is no answer about the run, and no "no"."""
    if error.exit_code == UnreachableError.exit_code:
        return error
    return UnreachableError(error.message, target=error.target, run_id=error.run_id, hint=error.hint)


def _only_live(runs: Sequence[Run], silent: Sequence[TargetView]) -> Run:
    mine = [run for run in runs if run.verdict.live and run.probe.owner == index.owner()]
    if len(mine) == 1 and not silent:
        return mine[0]
    if silent:
        raise UnreachableError(f"name the run: {_names(silent)} could not be asked for live runs", hint=_why(silent))
    if not mine:
        raise NotFound("no run was named, and none of yours is live", hint=_hint(runs))
    raise Ambiguous(f"no run was named, and {len(mine)} of yours are live", hint=_candidates(mine))


def _names(views: Sequence[TargetView]) -> str:
    return ", ".join(view.target.name for view in views)


def _targets(fleet: Fleet) -> str:
    return ", ".join(fleet.inventory.targets)


def _why(views: Sequence[TargetView]) -> str:
    errors = [view.error for view in views if view.error is not None]
    if len(errors) == 1 and errors[0].hint:
        return f"{views[0].target.name}: {errors[0].message}; {errors[0].hint}"
    return "; ".join(f"{view.target.name}: {view.error.message}" for view in views if view.error is not None)


def _elsewhere(launch: index.Launch, fleet: Fleet) -> NotFound:
    """It went to a target that this hosts.yaml does not name: another one was used, or it has been changed."""
    said = f"{launch.run_id} was launched from here on {launch.target}, which {fleet.inventory.source} does not name"
    return NotFound(said, hint=f"use the hosts.yaml that names {launch.target}: specctl --inventory FILE VERB ...")


def _candidates(runs: Sequence[Run]) -> str:
    return "which of: " + _newest(runs, 10, lambda run: f"{run.run_id} ({run.verdict.state} on {run.target.name})")


def _nearest(wanted: str, runs: Sequence[Run], places: Sequence[str]) -> str | None:
    """What was meant by a name that fits nothing: a run by its id or by the word in it, or a target or group."""
    named = {word: run for run in sorted(runs, key=lambda run: run.probe.created_at)
             for word in (run.run_id, run.run_id[len("20260101-000000-") : -len("-0000")])}  # fmt: skip
    if wanted in places:
        return f"{wanted} is a target or group, and this needs one run; specctl status {wanted} lists them"
    near = difflib.get_close_matches(wanted, [*named, *places], n=1, cutoff=0.7)
    if not near:
        return None
    run = named.get(near[0])
    return f"did you mean {run.run_id} ({run.verdict.state})?" if run else f"did you mean {near[0]}?"


def _hint(runs: Sequence[Run]) -> str:
    if not runs:
        return "specctl launch starts one"
    return "there are: " + _newest(runs, 5, lambda run: f"{run.run_id} ({run.verdict.state})")


def _newest(runs: Sequence[Run], limit: int, text: Callable[[Run], str]) -> str:
    newest = sorted(runs, key=lambda run: run.probe.created_at, reverse=True)
    more = f", and {len(runs) - limit} more" if len(runs) > limit else ""
    return ", ".join(map(text, newest[:limit])) + more
