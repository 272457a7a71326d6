"""`specctl ls`: the history of runs."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from orchestrator.cli.base import DAY_S, InventoryOption, JsonOption, errors, fleet_of, stdout
from orchestrator.commands import PLACE
from orchestrator.completion import offer
from orchestrator.render import json as as_json
from orchestrator.render import ls as show_ls
from orchestrator.verbs import ls as verb

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}


def duration(text: str | float) -> float:
    """`90m`, `12h`, `7d`, `2w` in seconds."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)\s*([smhdw])", str(text).strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time span; write 90m, 12h, 7d or 2w")
    return float(match[1]) * UNITS_S[match[2]]


def states(incomplete: str) -> list[str]:
    return [state.lower() for state in verb.STATES if state.startswith(incomplete.upper())]


def ls(
    ctx: typer.Context,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", metavar="T", help="Only on this target or group; may be repeated.",
                     autocompletion=offer(PLACE)),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", "-s", metavar="S", help="Only in this state (failed, running ...); may be repeated.",
                     autocompletion=states),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="GLOB", help="Only ids that match; without * a part is enough.")
    ] = None,
    since: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="7d", help="Only what was live within 90m, 12h, 7d, 2w.",
                     show_default=False),
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="WHO", help="Only of user@host, or a part of it.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", min=0, metavar="N", help="The newest N; 0 for all.")] = verb.ROWS,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """List the runs there have been, newest first, on all targets.

    Also those that only this machine remembers: their target cannot be asked (UNREACHABLE), or has no such run any more
    (GONE). Exits 1 when nothing fits, and 3 when a target could not be asked.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        request = verb.Request(
            targets=target or [], states=state or [], name=name, within_s=since, owner=owner, limit=limit
        )
        result = verb.run(fleet, request)
        print(as_json.text(as_json.of_ls(result))) if json else show_ls.show(stdout(), result, request)
        raise typer.Exit(3 if result.silent else 0 if result.rows else 1)
