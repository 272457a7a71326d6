"""`specctl errors`: which exceptions there have been, in which runs, and which runs failed without any."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from orchestrator import streams
from orchestrator.cli import base
from orchestrator.cli.base import EitherArgument, InventoryOption, JsonOption, fleet_of, say, stderr
from orchestrator.render import errors as show_errors
from orchestrator.render import json as as_json
from orchestrator.render.text import unreachable
from orchestrator.verbs import errors as verb


def errors(
    ctx: typer.Context,
    words: EitherArgument = None,
    tracebacks: Annotated[bool, typer.Option("--traceback", "-t", help="With the whole traceback of each.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also of runs that ended more than 24 hours ago.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:  # fmt: skip
    """Show the exceptions of many runs, each once, with what ended by it.

    The same exception is known by its type and the frames of its traceback, in whichever run, worker and line. Runs
    that ended badly without an exception are listed too, with the last line that they printed. Exits 0 when there are
    exceptions, 1 when there is none (a run may still have failed without one), 3 when a target or a log could not be
    searched and no exception was found.
    """
    with base.errors(json), fleet_of(ctx, inventory) as fleet:
        result = verb.run(fleet, words or [], everything=everything)
        for note in result.notes:
            say(note)
        if json:
            print(as_json.text(as_json.of_errors(result)))
        else:
            for text in show_errors.texts(result, time.time(), tracebacks=tracebacks):
                streams.write_text(text)
        unreachable(stderr(), ((view.target, view.error) for view in result.silent if view.error is not None))
        for run, error in result.refused:
            say(f"{run.run_id}: its logs were not searched: {error.message}")
        say(show_errors.of_what(result))
        unknown = result.silent or result.refused
        raise typer.Exit(0 if result.kinds else 3 if unknown else 1)
