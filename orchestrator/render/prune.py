"""How a prune looks: what may go, what has gone, and why the rest stays."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from orchestrator.agent.tree import shown
from orchestrator.health import age
from orchestrator.render.text import count, line, size, unreachable
from orchestrator.verbs.prune import Item, Place

NOTES = 8
WIDE = 100
"""Columns that the table needs."""


def show(console: Console, places: Sequence[Place]) -> None:
    """What may go."""
    rows = [(place, item) for place in places for item in place.items]
    if rows and console.width >= WIDE:
        console.print(_table(rows))
    else:
        for place, item in rows:
            what = f"{place.target.name}  {item.kind} {shown(item.name)}  {size(item.bytes)}"
            line(console, f"{what}, unused for {age(item.age_s)}: {item.why}", first=0)
    for place in places:
        if place.error is None and not place.items:
            said = f"the same place as {place.same_as}" if place.same_as else "nothing to remove"
            line(console, f"{place.target.name}: {said}", first=0, style="dim")
    _notes(console, places)


def _table(rows: Sequence[tuple[Place, Item]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold dim", padding=(0, 1, 0, 0))
    for name in ("target", "what", "name"):
        table.add_column(name, no_wrap=name != "name", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("unused for", justify="right", no_wrap=True)
    table.add_column("why it can go", overflow="fold", ratio=1)
    for place, item in rows:
        table.add_row(
            escape(place.target.name), item.kind, escape(shown(item.name)), size(item.bytes), age(item.age_s),
            escape(item.why),
        )  # fmt: skip
    return table


def _notes(console: Console, places: Sequence[Place]) -> None:
    for place in places:
        for note in place.notes[:NOTES]:
            line(console, f"{place.target.name}: {note}", first=0, style="yellow")
        if len(place.notes) > NOTES:
            line(console, f"{place.target.name}: and {len(place.notes) - NOTES} more", first=0, style="yellow")
    unreachable(console, ((place.target, place.error) for place in places if place.error is not None))


def total(places: Sequence[Place]) -> str:
    """`3 things, 1.2 GiB`"""
    items = [item for place in places for item in place.items]
    return f"{count(len(items), 'thing')}, {size(sum(item.bytes for item in items))}"


def show_removed(console: Console, places: Sequence[Place]) -> None:
    for place in places:
        if place.gone or place.failed:
            freed = size(sum(item.bytes for item in place.gone))
            line(console, f"{place.target.name}: {count(len(place.gone), 'thing')} removed, {freed} freed", first=0)
        for item, why in place.failed:
            line(console, Text.assemble(("stays", "bold red"), f" {item.kind} {shown(item.name)}: {why}"))
        if place.error is not None:
            line(console, f"{place.target.name}: what has gone there is not known: {place.error.message}", first=0)
