"""`specctl targets`: is the setup right?"""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.base import InventoryOption, JsonOption, PlacesArgument, errors, fleet_of, stdout
from orchestrator.render import json as as_json
from orchestrator.render import targets as show_targets
from orchestrator.verbs import targets as verb


def targets(
    ctx: typer.Context,
    names: PlacesArgument = None,
    offline: Annotated[bool, typer.Option("--offline", help="Only what hosts.yaml says; nobody is asked.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Ask every target whether a launch can work there, and say how to mend what is missing.

    Nothing is written there. Exits 3 when a target could not be reached, and 1 when one lacks what a launch needs.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        result = verb.run(fleet, names or [], offline=offline)
        if json:
            print(as_json.text(as_json.of_targets(result, fleet.inventory)))
        else:
            show_targets.show(stdout(), result, fleet.inventory)
        if result.silent:
            raise typer.Exit(3)
        raise typer.Exit(0 if not result.asked or all(view.ready for view in result.views) else 1)
