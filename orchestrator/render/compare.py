"""Two runs on one screen: the answer, then what became of each failure, what changed, and how both train.

One screen is meant: a terminal gets as much as its rows hold, and the answer never scrolls away. What is no terminal
gets all of it.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from orchestrator.codediff import FileChange
from orchestrator.comparison import Told
from orchestrator.record import record
from orchestrator.render.text import colour, count, line, one_line, shorten, table
from orchestrator.series import Sums
from orchestrator.verbs.compare import One, Result

LABEL = 14
ITEMS = 8
FATES = {
    "same": ("same", "bold red"), "printed": ("printed again", "red"), "gone": ("gone", "green"),
    "not reached": ("not reached", "yellow"), "new": ("new", "bold red"),
}  # fmt: skip
KINDS = {"gone": "bold green", "fine": "bold green", "not_yet": "bold yellow", "no_answer": "bold yellow"}


@record
class Room:
    """How much is shown."""

    diff: int = 16
    """Lines of the diff."""
    context: bool = True
    """With the lines around what changed."""
    brief: bool = False
    """A row each for the runs and their failures, and the last stretch of their training alone."""
    gaps: bool = True
    """Empty rows between the parts."""


ROOMS = (
    Room(),
    *(Room(diff=lines, context=False, brief=brief) for brief in (False, True) for lines in (16, 8, 4, 0)),
    Room(diff=0, context=False, brief=True, gaps=False),
)


def show(console: Console, result: Result, *, above: int = 0) -> None:
    """`above`: lines that have just been printed and are to be read, too."""
    room = ROOMS[0]
    if console.is_terminal:
        for room in ROOMS:
            with console.capture() as shown:
                _show(console, result, room)
            if shown.get().count("\n") + above < console.height:
                break
    _show(console, result, room)


def _show(console: Console, result: Result, room: Room) -> None:
    for name, one in (("A", result.a), ("B", result.b)):
        _side(console, name, one, room)
    _gap(console, room)
    answer = result.answer
    lead = (f"{answer.headline}. ", KINDS.get(answer.kind, "bold red"))
    line(console, Text.assemble(lead, one_line(f"{answer.sentence[:1].upper()}{answer.sentence[1:]}.")), first=0)
    if answer.told:
        _gap(console, room)
        _failures(console, answer.told, room)
    _gap(console, room)
    _changes(console, result, room)
    if any(result.training.values()):
        _gap(console, room)
        _training(console, result, room)


def whole_diff(result: Result) -> str:
    """The code's and the configuration's changes, as `patch` reads them."""
    return "".join(one.diff for one in result.files) + result.config_diff


def _side(console: Console, name: str, one: One, room: Room) -> None:
    side, target = one.side, one.seen.target.name
    state = (side.state, colour(side.state))
    said = Text.assemble((f"{name} ", "bold"), (side.run_id, "bold"), f" on {target}  ", state,
                         f"  {one_line(shorten(side.why, 90))}")  # fmt: skip
    if room.brief:
        said.truncate(console.width - 1, overflow="ellipsis")
    line(console, said, first=0, indent=4)


def _gap(console: Console, room: Room) -> None:
    if room.gaps:
        console.print()


def _failures(console: Console, told: list[Told], room: Room) -> None:
    line(console, Text("failures", style="bold"), first=0)
    for one in told:
        fate, style = FATES[one.fate]
        failure, of_b = one.failure, one.of == "b"
        text, who = Text(one_line(failure.text)), f"  in {failure.who}"
        if room.brief:
            text.truncate(max(LABEL, console.width - 3 - LABEL - len(who)), overflow="ellipsis")
        said = Text.assemble((f"{fate:<{LABEL}}", style), text, (who, "dim"))
        line(console, said, first=2, indent=2 + LABEL)
        in_a = "" if of_b else f"A: {failure.place};  "
        line(console, Text(f"{in_a}B: {one_line(one.seen)}", style="dim"), first=2 + LABEL, indent=2 + LABEL)


def _changes(console: Console, result: Result, room: Room) -> None:
    line(console, Text("what changed", style="bold"), first=0)
    if not result.changed:
        line(console, "nothing that is known: code, configuration, command, versions, host and GPUs are the same")
        return
    if result.files_unknown:
        _row(console, "code", f"cannot be compared: {result.files_unknown}")
    elif result.files:
        shown = [file_line(one) for one in result.files[:ITEMS]]
        lead = count(len(result.files), "file")
        for text in [f"{lead}: {shown[0]}"] if len(result.files) == 1 else [lead, *shown]:
            _row(console, "code" if text.startswith(lead) else "", text)
        if len(result.files) > ITEMS:
            _row(console, "", f"and {len(result.files) - ITEMS:,} more (--json lists them)")
    else:
        _row(console, "code", "the same, file by file")
    for change in result.changes[:ITEMS]:
        _row(console, change.word, f"{one_line(change.a)} -> {one_line(change.b)}")
    if len(result.changes) > ITEMS:
        _row(console, "", f"and {len(result.changes) - ITEMS:,} more (--json lists them)")
    if any(one.history.spec.config_text for one in (result.a, result.b)):
        _row(console, "configuration", "changed" if result.config_diff else "the same")
    hidden = ("--- ", "@@") if room.context else ("--- ", "@@", " ")
    lines = [text for text in whole_diff(result).splitlines() if text and not text.startswith(hidden)]
    for text in lines[: room.diff]:
        style = (
            "bold" if text.startswith("+++ ") else "green" if text[:1] == "+" else "red" if text[:1] == "-" else "dim"
        )
        line(console, Text(one_line(text), style=style), first=4, indent=6)
    if len(lines) > room.diff:
        more = f"... {len(lines) - room.diff:,} more lines" if room.diff else f"{count(len(lines), 'line')} of a diff"
        line(console, f"{more}: add --diff", first=4, style="dim")


def diff_style(text: str) -> str:
    """How a line of a unified diff is shown."""
    if text.startswith(("--- ", "+++ ")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(text[:1], "dim")


def file_line(one: FileChange) -> str:
    added, removed = one.counts
    said = one.why or f"+{added} -{removed}"
    return f"{one.path}  {'' if one.how == 'changed' else one.how + ', '}{said}"


def _row(console: Console, label: str, value: str) -> None:
    line(console, f"{label:<{LABEL}}{value}" if len(label) < LABEL else f"{label}  {value}", first=2, indent=2 + LABEL)


def _training(console: Console, result: Result, room: Room) -> None:
    line(console, Text("how they train, over the same steps (mean ± standard deviation)", style="bold"), first=0)
    rows: dict[str, dict[str, tuple[str, str]]] = {}
    for metric, found in result.training.items():
        for one in found:
            figures = figure(one.a, metric), figure(one.b, metric)
            steps = f"{one.first:,}" if one.first == one.last else f"{one.first:,}-{one.last:,}"
            rows.setdefault(f"  {steps}", {})[metric] = figures
    names = [NAMES.get(metric, metric) for metric in result.training]
    heads = ["  steps", *(f">{name} {side}" for name in names for side in "AB"), ""]
    cells = [
        [steps, *(figure for metric in result.training for figure in found.get(metric, ("-", "-"))), ""]
        for steps, found in list(rows.items())[-1 if room.brief else 0 :]
    ]
    if not table(console, heads, cells):
        for row in cells:
            line(console, "  ".join(row))
    parts = [name for name, one in (("A", result.a), ("B", result.b)) if not one.history.whole]
    if parts:
        line(console, f"of {' and '.join(parts)} a part of the steps was read: metrics.jsonl is long", style="dim")


DIGITS = {"loss": 4, "tok_s": 0}
NAMES = {"tok_s": "tok/s"}


def figure(sums: Sums, metric: str) -> str:
    """`3.2000 ± 0.1000`: mean and spread."""
    if sums.mean is None:
        return "-"
    digits = DIGITS.get(metric, 2)
    spread = "" if sums.spread is None else f" ± {sums.spread:,.{digits}f}"
    return f"{sums.mean:,.{digits}f}{spread}"
