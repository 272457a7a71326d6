"""`specctl show`: all that is known of one run."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator import streams
from orchestrator.cli.base import InventoryOption, JsonOption, RunArgument, errors, fleet_of, program, say, stdout
from orchestrator.errors import ConfigError, SpecctlError
from orchestrator.render import json as as_json
from orchestrator.render import show as show_show
from orchestrator.verbs import show as verb


def show(
    ctx: typer.Context,
    run: RunArgument = None,
    events: Annotated[
        int, typer.Option("--events", min=0, max=1000, metavar="N", help="So many of the newest events.")
    ] = verb.EVENTS,
    config: Annotated[bool, typer.Option("--config", help="Print its configuration as it was launched.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print the uncommitted changes it was launched with.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Show all that is known of one run, evidence first.

    What was seen and when, what was asked and deployed, processes, logs, workers, findings, checkpoints, events, and
    how it ended. `--config` and `--diff` print one text and nothing else: `specctl show RUN --diff | git apply`.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        if config and diff:
            raise ConfigError("--config and --diff each print one text", hint="give one of them")
        result = verb.run(fleet, run, events=events, diff=diff)
        for note in result.notes:
            say(note)
        if json:
            print(as_json.text(as_json.of_show(result)))
        elif config or diff:
            _text(result, "config" if config else "diff")
        else:
            show_show.show(stdout(), result, program=program())
        raise typer.Exit(3 if result.run.verdict.state == "UNREACHABLE" else 0)


def _text(result: verb.Result, what: str) -> None:
    asked = result.shown.spec
    text = (asked.config_text if what == "config" else asked.diff) if asked else None
    if not text:
        why = "it was launched without a configuration" if what == "config" else "no uncommitted change was recorded"
        if asked is None:
            why = "its record run.json is damaged or gone"
        raise SpecctlError(f"there is no {what} to print: {why}", run_id=result.run.run_id)
    streams.write_line(text.removesuffix("\n"))
