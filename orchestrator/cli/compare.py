"""`specctl compare`: did my fix work?"""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator import streams
from orchestrator.cli.base import InventoryOption, JsonOption, errors, fleet_of, say, stdout
from orchestrator.commands import RUN
from orchestrator.completion import offer
from orchestrator.render import compare as show_compare
from orchestrator.render import json as as_json
from orchestrator.verbs import compare as verb

RUN_HELP = "An id, a part of one, or @last."


def compare(
    ctx: typer.Context,
    run_a: Annotated[str, typer.Argument(metavar="A", help=RUN_HELP, show_default=False, autocompletion=offer(RUN))],
    run_b: Annotated[
        str | None,
        typer.Argument(
            metavar="B", help=f"{RUN_HELP}  [@last]", show_default=False, autocompletion=offer(RUN),
        ),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print what changed in code and configuration, whole, and nothing else.")
    ] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:  # fmt: skip
    """Compare a run with a later one, and say whether its failure is gone.

    What became of A's failure in B (the same exception is known by its type and frames), what changed between them in
    code, configuration, command and environment, and how both train over the same steps. A run that ended before the
    point where A failed says nothing about a fix, and this says so. Exits 0 when the failure is gone, 1 when it is not
    or B fails elsewhere, 3 when B says nothing about it (yet).
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        result = verb.run(fleet, run_a, run_b)
        for note in result.notes:
            say(note)
        if json:
            print(as_json.text(as_json.of_compare(result)))
        elif diff:
            streams.write_text(show_compare.whole_diff(result))
            raise typer.Exit(0 if result.changed else 1)
        else:
            show_compare.show(stdout(), result, above=len(result.notes))
        raise typer.Exit(result.answer.exit_code)
