"""`specctl stop`: end a run, and look again."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.base import (
    DAY_S,
    Interrupted,
    InventoryOption,
    JsonOption,
    RunArgument,
    errors,
    fleet_of,
    program,
    seconds,
    stderr,
    stdout,
)  # fmt: skip
from orchestrator.render import json as as_json
from orchestrator.render import stop as show_stop
from orchestrator.verbs import stop as verb


def stop(
    ctx: typer.Context,
    run: RunArgument = None,
    grace: Annotated[
        float, typer.Option(parser=seconds(0.0, DAY_S), metavar="S", help="Seconds between TERM and KILL.")
    ] = verb.GRACE_S,
    now: Annotated[bool, typer.Option("--now", help="KILL at once.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """End a run: TERM once, wait, KILL, look again. "Stopped" is said only when no process of it is left."""
    with errors(json), fleet_of(ctx, inventory) as fleet:
        try:
            with show_stop.Waiting(stderr()) as waiting:
                result = verb.run(fleet, run, grace_s=grace, now=now, watcher=waiting)
        except KeyboardInterrupt:
            raise Interrupted(
                "stopped watching; a stop that was asked for goes on there", hint=f"{program()} status"
            ) from None
        print(as_json.text(as_json.of_stop(result))) if json else show_stop.show(stdout(), result)
        # Still live without a process to name: its supervisor has not said how it ended, so it is not stopped yet.
        raise typer.Exit(1 if result.remaining or result.verdict.live else 0)
