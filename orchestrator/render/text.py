"""Small texts: sizes, states with their colours, lines that wrap at words. Nothing here knows where it is printed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from orchestrator.errors import SpecctlError
from orchestrator.health import headline
from orchestrator.inventory import Target
from orchestrator.model import Finding, Verdict

COLOURS = {
    "RUNNING": "green", "SUCCEEDED": "green", "STARTING": "cyan", "QUEUED": "cyan", "STOPPING": "yellow",
    "STOPPED": "yellow", "DEGRADED": "bold red", "STALLED": "bold red", "FAILED": "bold red", "KILLED": "bold red",
    "NEVER_STARTED": "bold red", "LOST": "bold red", "UNREACHABLE": "bold magenta",
}  # fmt: skip


def size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def count(number: int, word: str) -> str:
    """`1 file`, `2 files`; a word in -s takes -es."""
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{number:,} {word if number == 1 else plural}"


def colour(state: str) -> str:
    return COLOURS.get(state, "white")


def workers(verdict: Verdict) -> str:
    """How many of the known workers live; of a run that has ended there is nothing to count."""
    return f"{verdict.workers_alive}/{verdict.workers_total}" if verdict.live and verdict.workers_total else "-"


def named(finding: Finding) -> str:
    """`RuntimeError: out of memory (drafter-0)` on one line."""
    return f"{headline(finding)} ({finding.worker})" if finding.worker else headline(finding)


def shorten(text: str, width: int = 60) -> str:
    """The first clause of `text`, or the words that fit if that is short or too long."""
    first = text.splitlines()[0] if text else ""
    clause = first.partition("; ")[0]
    if len(first) > width and 2 * len(clause) > width:
        first = clause
    if len(first) > width:
        first = first[: width - 1].rpartition(" ")[0] or first[: width - 1]
        return first.rstrip(" ,;:(") + "…"
    return first if first == text else first + "…"


def at_home(text: str, target: Target | None = None) -> str:
    """`text` with this machine's home directory as `~`, if it speaks of this machine and not of another `target`."""
    if target is not None and (target.ssh is not None or target.vmid is not None):
        return text
    home = str(Path.home())
    return text.replace(f"{home}/", "~/") if home != "/" else text


def one_line(text: str) -> str:
    """`text` as it can stand in a row: what would move the cursor is shown as Python writes it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def plain(console: Console) -> bool:
    """Whether only ASCII can be printed."""
    return not console.encoding.lower().startswith("utf")


def line(console: Console, text: str | Text, *, indent: int = 2, first: int | None = None, style: str = "") -> None:
    """Prints one line of words: a terminal gets it wrapped at words and indented by `indent` (its first row by
    `first`), anything else as it is, so that it can be searched."""
    body = Text(text, style=style) if isinstance(text, str) else text
    first = indent if first is None else first
    rows = [body]
    if console.is_terminal:
        rows = _rows(body, console.width - 1 - first, console.width - 1 - indent)
    for number, row in enumerate(rows):
        lead = " " * (first if number == 0 else indent)
        console.print(Text(lead) + row, highlight=False, soft_wrap=True)


def _rows(body: Text, first: int, others: int) -> list[Text]:
    """`body` cut between words. A word that is wider than a row stays where it is,
    and whole: it is a path, which somebody may copy."""
    cuts, used, room = [], 0, first
    for word in re.finditer(r"\s*\S+", body.plain):
        width = cell_len(word.group())
        if used and used + width > room and width <= others:
            at = word.start() + len(word.group()) - len(word.group().lstrip())
            cuts.append(at)
            used, room = cell_len(body.plain[at : word.end()]), others
        else:
            used += width
    rows = list(body.divide(cuts))
    for row in rows:
        row.rstrip()
    return rows


def unreachable(console: Console, silent: Iterable[tuple[Target, SpecctlError]], then: str = "") -> None:
    """Prints the targets that could not be asked, and `then`; those of one node with the same reason in one line."""
    alike: dict[tuple[str | None, str, str | None], list[Target]] = {}
    for target, error in silent:
        alike.setdefault((target.ssh, error.message, error.hint), []).append(target)
    for (node, message, hint), targets in alike.items():
        place = targets[0].place if len(targets) == 1 else f"{len(targets)} targets on {node or 'this machine'}"
        said = f" {', '.join(target.name for target in targets)} ({place}): {message}{then}"
        line(console, Text.assemble(("UNREACHABLE", colour("UNREACHABLE")), said), first=0)
        if hint:
            line(console, hint, style="cyan")


def table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> bool:
    """Prints `rows` under the names of their columns, the last one wrapped at words. `>name` is aligned to the right.

    A terminal that is too narrow for it gets nothing, and False is returned: list the same in another way.
    """
    right = [name.startswith(">") for name in columns]
    heads = [Text(name.lstrip(">"), style="bold dim") for name in columns]
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    widths = [max(row[at].cell_len for row in [heads, *cells]) for at in range(len(columns))]
    indent = sum(widths[:-1]) + GAP * (len(columns) - 1)
    if console.width - 1 - indent < min(widths[-1], LAST_COLUMN):
        return False
    line(console, _row(heads, widths, right), first=0, indent=indent)
    line(console, Text("─" * (indent + min(widths[-1], console.width - 1 - indent, RULE)), style="dim"), first=0)
    for row in cells:
        line(console, _row(row, widths, right), first=0, indent=indent)
    return True


GAP = 2
LAST_COLUMN = 24
"""Columns that its last one needs, if it has so much to say."""
RULE = 60


def _row(cells: Sequence[Text], widths: Sequence[int], right: Sequence[bool]) -> Text:
    row = Text()
    for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        room = " " * (width - cell.cell_len)
        row.append(room if right[at] else "").append_text(cell)
        if at < len(cells) - 1:
            row.append(" " * GAP if right[at] else room + " " * GAP)
    row.rstrip()
    return row
