"""Targets as a page: each with where it is, whether a launch can work there, and what to do where it cannot."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from orchestrator.inventory import Inventory, Target
from orchestrator.render.text import colour, count, line, number, one_line, size, table
from orchestrator.verbs.targets import Program, Result, Survey, View

INDENT = 2


def show(console: Console, result: Result, inventory: Inventory) -> None:
    if result.asked:
        for view in result.views:
            _view(console, view)
    elif not table(console, ("target", "where", "user", "workdir"), [_offline(view.target) for view in result.views]):
        for view in result.views:
            name, *rest = _offline(view.target)
            line(console, Text.assemble((str(name), "bold"), "  ", ", ".join(map(str, rest))), first=0)
    said = f"from {inventory.source}"
    if inventory.default_target:
        said += f"; default {inventory.default_target}"
    said += "".join(f"; {name} = {', '.join(members)}" for name, members in inventory.groups.items())
    line(console, said, first=0, style="dim")
    if result.asked:
        _summary(console, result)


def _summary(console: Console, result: Result) -> None:
    ready = sum(view.ready for view in result.views)
    if ready == len(result.views):
        line(console, f"{count(ready, 'target')}, {'each' if ready > 1 else 'it'} is ready.", first=0, style="green")
    else:
        line(console, f"{ready} of {count(len(result.views), 'target')} ready.", first=0, style="yellow")


def _offline(target: Target) -> list[str | Text]:
    return [target.name, target.place, target.user or "-", target.workdir]


def _view(console: Console, view: View) -> None:
    target, survey = view.target, view.survey
    state, style = ("ready", "green") if view.ready else ("NOT READY", "bold red")
    if not view.reachable:
        state, style = "UNREACHABLE", colour("UNREACHABLE")
    where = target.place if survey is None else f"{target.place}, as {survey.user}"
    if survey is not None:
        where += f", {survey.system}" if survey.host in where else f", {survey.system}, host {survey.host}"
    line(console, Text.assemble((target.name, "bold"), "  ", (state, style), f"  {one_line(where)}"), first=0)
    if view.error is not None:
        line(console, one_line(view.error.message), style="yellow")
        if view.error.hint:
            line(console, view.error.hint, indent=INDENT + 2, style="cyan")
    if survey is not None:
        for text in _facts(view, survey):
            line(console, one_line(text))
    for problem in view.problems:
        line(console, one_line(problem.what), style="bold red" if problem.fatal else "yellow")
        if problem.mend:
            line(console, problem.mend, indent=INDENT + 2, style="cyan")


def _facts(view: View, survey: Survey) -> list[str]:
    programs = [_program("python", survey.python), _program("python:", survey.own_python)]
    programs.append(_program("tmux", survey.tmux))
    made = "" if survey.workdir_there else " (not made yet)"
    room = f", {size(survey.free_bytes)} free" if survey.free_bytes is not None else ""
    agent = "agent there" if survey.agent else "agent sent at first use"
    known = max(survey.runs, survey.live)  # one whose directory is gone lives all the same
    runs = f"{count(survey.live, 'live run')} of {known:,}" if known else "no runs yet"
    facts = [" · ".join(filter(None, programs)), f"workdir {survey.workdir}{made}{room} · {agent} · {runs}"]
    if view.clock_offset_s is not None:
        facts[-1] += f" · clock {view.clock_offset_s:+.1f} s (within {view.asked_s / 2:.1f})"
    for gpu in survey.gpus:
        use = gpu.get("utilization_percent")
        memory = f"{number(gpu.get('memory_used_mib'), 0)} of {number(gpu.get('memory_total_mib'), 0)} MiB"
        declared = "" if not view.target.gpus or gpu.get("index") in view.target.gpus else ", not in gpus:"
        busy = "" if use is None else f"{use} % busy, "
        facts.append(f"GPU {gpu.get('index')} {gpu.get('name')}: {busy}{memory}{declared}")
    return facts


def _program(name: str, found: Program | None) -> str:
    return "" if found is None or found.version is None else f"{name} {found.version} {found.path}"
