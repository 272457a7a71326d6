"""What the doctor found, as a page: of each target the troubles first, the worst of them at the top, then a count."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from orchestrator.doctor.check import Outcome
from orchestrator.render.text import colour, count, line, one_line
from orchestrator.verbs.doctor import Result, View

STYLES = {"fail": "bold red", "warn": "yellow", "unknown": "magenta", "ok": "green"}
INDENT = 7


def show(console: Console, result: Result, *, verbose: bool) -> None:
    for view in result.views:
        _view(console, view, verbose=verbose)
    well = sum(view.reached and not view.count("fail") for view in result.views)
    style = "green" if well == len(result.views) else "yellow"
    line(console, f"{well} of {count(len(result.views), 'target')} without a failure.", first=0, style=style)


def _view(console: Console, view: View, *, verbose: bool) -> None:
    fails, warnings = view.count("fail"), view.count("warn")
    state, style = ("well", "green") if not fails and not warnings else (_counted(fails, warnings), "yellow")
    if fails:
        style = "bold red"
    if not view.reached:
        state, style = "UNREACHABLE", colour("UNREACHABLE")
    seen = view.examined.report
    about = [view.target.place, *([f"as {seen.user}", seen.one("system")] if seen else [])]
    head = Text.assemble((view.target.name, "bold"), "  ", (state, style), f"  {', '.join(filter(None, about))}")
    line(console, head, first=0)
    shown = ("fail", "warn", "unknown", "ok") if verbose else ("fail", "warn")
    for status in shown:
        for check, outcome in view.found:
            if outcome.status == status and (view.reached or status != "unknown"):
                _outcome(console, check, outcome)
    fine = len({check for check, outcome in view.found if outcome.status == "ok"})
    dark = [check for check, outcome in view.found if outcome.status == "unknown"]
    parts = [f"{count(fine, 'check')} found nothing amiss"] if fine and not verbose else []
    if dark and not view.reached:
        named = f" ({', '.join(dark)})" if verbose else ""
        parts.append(f"{len(dark)} could not be made{named}: {view.examined.broken} comes first")
    elif dark and not verbose:
        parts.append(f"not made: {', '.join(dict.fromkeys(dark))}")
    if parts:
        line(console, "; ".join(parts), style="dim")


def _counted(fails: int, warnings: int) -> str:
    parts = [count(fails, "failure") if fails else "", count(warnings, "warning") if warnings else ""]
    return ", ".join(filter(None, parts))


def _outcome(console: Console, check: str, outcome: Outcome) -> None:
    label = {"unknown": "?"}.get(outcome.status, outcome.status)
    style = STYLES[outcome.status]
    head = Text.assemble((f"{label:<4}", style), " ", (check, "bold"), f": {one_line(outcome.what)}")
    line(console, head, indent=INDENT, first=2)
    if outcome.evidence:
        line(console, Text.assemble(("seen  ", "dim"), one_line(outcome.evidence)), indent=INDENT + 6, first=INDENT)
    if outcome.mend:
        # Not wrapped at words: it is to be copied, and a line break would be copied with it.
        mend = Text.assemble(" " * INDENT, ("mend  ", "dim"), (outcome.mend, "cyan"))
        console.print(mend, soft_wrap=True, highlight=False)
