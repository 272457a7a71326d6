"""`specctl prune`: remove what nobody needs any more."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from orchestrator.cli.base import (
    Interrupted,
    InventoryOption,
    JsonOption,
    errors,
    fleet_of,
    program,
    say,
    stderr,
    stdout,
)
from orchestrator.cli.ls import duration
from orchestrator.commands import PLACE
from orchestrator.completion import offer
from orchestrator.errors import ConfigError
from orchestrator.render import json as as_json
from orchestrator.render import prune as show_prune
from orchestrator.verbs import prune as verb

OLDER_S = duration("30d")


def prune(
    ctx: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET", help="Targets or groups; all if left out.", show_default=False,
            autocompletion=offer(PLACE),
        ),
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="Also runs that ended long ago, with all they made.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than", parser=duration, metavar="30d", help="With --runs: how long ago (90m, 12h, 7d, 2w).  [30d]",
            show_default=False,
        ),
    ] = None,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="With --runs: not those with a whole checkpoint.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove what is shown.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Show what nobody needs any more on the targets, and with --yes remove it.

    Bundles, environments and wheels that no run uses and no launch has asked for within a day; agents of other versions
    of specctl; parts of pushes that were broken off more than a day ago; with --runs also runs that ended long ago.

    Never anything of a run that lives, or of which that is not known; never what a launch is about to use; nothing that
    specctl did not make. Exits 1 when something could not be removed, and 3 when a target could not be asked.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        if not runs and (older_than is not None or keep_checkpoints):
            option = "--keep-checkpoints" if keep_checkpoints else "--older-than"
            raise ConfigError(f"{option} is about runs, and without --runs no run goes", hint="add --runs")
        request = verb.Request(
            targets=targets or [], runs=runs, older_than_s=OLDER_S if older_than is None else older_than,
            keep_checkpoints=keep_checkpoints,
        )  # fmt: skip
        places = verb.look(fleet, request)
        unknown = any(place.error is not None for place in places)
        if not json:
            show_prune.show(stdout(), places)
        found = any(place.items for place in places)
        if found and not yes and not json:
            yes = _asked(show_prune.total(places))
        if found and yes:
            try:
                verb.remove(fleet, places, request, say if not json else lambda text: None)
            except KeyboardInterrupt:
                raise Interrupted("broken off; what was begun goes on there, or with the next prune") from None
            if not json:
                show_prune.show_removed(stdout(), places)
        if json:
            print(as_json.text(as_json.of_prune(places, removed=yes)))
        failed = any(place.failed for place in places)
        unknown = unknown or any(place.error is not None for place in places)
        raise typer.Exit(3 if unknown else 1 if failed else 0)


def _asked(total: str) -> bool:
    """Asks on a terminal; elsewhere says what to type."""
    if sys.stdin.isatty() and stderr().is_terminal:
        return typer.confirm(f"Remove these ({total})?", default=False, err=True)
    words = [word for word in sys.argv[1:] if word not in ("--yes", "-y")]
    say(f"nothing was removed ({total}): {program()} {shlex.join([*words, '--yes'])}")
    return False
