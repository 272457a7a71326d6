"""`specctl diff`: is what ran what stands here?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from orchestrator import streams
from orchestrator.cli.base import InventoryOption, JsonOption, RunArgument, errors, fleet_of, say, stdout
from orchestrator.render import json as as_json
from orchestrator.render.compare import diff_style, file_line
from orchestrator.verbs import diff as verb


def diff(
    ctx: typer.Context,
    run: RunArgument = None,
    source: Annotated[
        Path | None, typer.Option("--source", metavar="DIR", help="The project.  [here]", show_default=False)
    ] = None,
    stat: Annotated[bool, typer.Option("--stat", help="Only which files differ, and by how many lines.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Show in what the code that stands here differs from the code a run was launched with.

    A unified diff from the run's bundle to the project, untracked files included. Exits 0 when they are the same file
    by file, 1 when they are not.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        result = verb.run(fleet, run, source=source or Path.cwd())
        for note in result.notes:
            say(note)
        if json:
            print(as_json.text(as_json.of_diff(result)))
        elif stat:
            for one in result.files:
                streams.write_line(file_line(one))
        else:
            _print(result)
        if not result.files:
            say(f"{result.run.run_id} was launched with exactly this code (bundle {result.history.spec.bundle})")
        raise typer.Exit(1 if result.files else 0)


def _print(result: verb.Result) -> None:
    console = stdout()
    for one in result.files:
        if not one.diff:
            streams.write_line(file_line(one))
        elif console.is_terminal:
            for text in one.diff.splitlines():
                console.print(Text(text, style=diff_style(text)), soft_wrap=True, highlight=False)
        else:
            streams.write_text(one.diff)
