"""`specctl status`: every run as it is right now."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from orchestrator.cli.base import InventoryOption, JsonOption, errors, fleet_of, say, seconds, stdout
from orchestrator.commands import EITHER
from orchestrator.completion import offer
from orchestrator.errors import ConfigError
from orchestrator.fleet import Fleet
from orchestrator.model import BAD
from orchestrator.render import json as as_json
from orchestrator.verbs import status as verb


def status(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN|TARGET", help="Runs, targets or groups.", autocompletion=offer(EITHER)),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what ended more than 24 hours ago.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="S", parser=seconds(0.5, 3600), show_default="2", help="With --watch.")
    ] = 2.0,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Show every run as it is right now, on all targets at once.

    Exits 3 when a target could not be asked, and 1 when a run that was named is not well.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        if watch:
            _watch(fleet, words or [], everything=everything, every_s=every, json=json)
        result = verb.run(fleet, words or [], everything=everything)
        for note in result.notes:
            say(note)
        if json:
            print(as_json.text(as_json.of_status(result)))
        else:
            from orchestrator.render import status as show_status  # rich, which --json need not wait for

            show_status.show(stdout(), result)
        named = bool(words) and not set(words or []) & {*fleet.inventory.targets, *fleet.inventory.groups}
        bad = named and any(run.verdict.state in BAD for run in result.runs)
        unknown = result.unreachable or any(run.verdict.state == "UNREACHABLE" for run in result.runs)
        raise typer.Exit(3 if unknown else 1 if bad else 0)


def _watch(fleet: Fleet, words: list[str], *, everything: bool, every_s: float, json: bool) -> NoReturn:
    from orchestrator.render import status as show_status

    console = stdout()
    if json or not console.is_terminal or console.is_dumb_terminal:
        raise ConfigError("--watch needs a terminal that can be drawn on", hint="specctl status --json tells programs")
    show_status.watch(console, lambda: verb.run(fleet, words, everything=everything), every_s=every_s)
