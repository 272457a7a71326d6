"""`specctl push`: a file or folder to a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.base import Interrupted, InventoryOption, JsonOption, errors, fleet_of, stderr, stdout
from orchestrator.commands import TARGET
from orchestrator.completion import offer
from orchestrator.render import json as as_json
from orchestrator.render import transfer as show_transfer
from orchestrator.verbs import push as verb


def push(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Where to.", show_default=False,
                                           autocompletion=offer(TARGET))],
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A file or folder here.", show_default=False)],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="Absolute, ~/..., or relative to the target's workdir.", show_default=False
        ),
    ],
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Send a file or folder to a target, as its `user:`; resumable, and verified by sha256 on both sides.

    **DST** is what SRC becomes there; missing folders are made. With a slash at its end (`DST/`) SRC is put into it
    under its own name, and so is a file when DST is a folder. A folder that DST is already is gone on with if it
    holds nothing but what SRC has; otherwise say `DST/` to put SRC into it, or `DST/.` to merge the two.

    Files that are there with the same content are not sent again, older ones are replaced one by one, and nothing is
    ever deleted there. After a lost link or Ctrl-C the same command goes on where it ended. Links stay links, modes and
    times are kept, devices and sockets are left out.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        with show_transfer.Moving(stderr()) as moving:
            try:
                result = verb.run(fleet, target, source, destination, moving)
            except KeyboardInterrupt:
                far = f" ({moving.far()})" if moving.begun else ""
                raise Interrupted(f"broken off{far}", hint=verb.AGAIN) from None
        print(as_json.text(as_json.of_push(result))) if json else show_transfer.show_push(stdout(), result)
        raise typer.Exit(1 if result.failed else 0)
