"""`specctl doctor`: what is amiss with a target, and the command that mends it."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.base import InventoryOption, JsonOption, PlacesArgument, errors, fleet_of, seconds, stdout
from orchestrator.render import doctor as show_doctor
from orchestrator.render import json as as_json
from orchestrator.verbs import doctor as verb


def doctor(
    ctx: typer.Context,
    names: PlacesArgument = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Without what takes seconds: torch, compilers, the node's own nvidia-smi.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", metavar="SECONDS", parser=seconds(1, 3600), show_default=False,
            help="How long a target may take; 150, and 45 with --quick. What it told until then counts.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also what is fine, and how that was seen.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Examine targets down to a plain shell, and say of each trouble what was seen and what to type against it.

    Nothing is sent or written there, and no Python is needed. Exits 3 when a target could not be looked into, and 1
    when one has what keeps launches from working.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        result = verb.run(fleet, names or [], quick=quick, limit_s=timeout)
        if json:
            print(as_json.text(as_json.of_doctor(result)))
        else:
            show_doctor.show(stdout(), result, verbose=verbose)
        raise typer.Exit(result.exit_code)
