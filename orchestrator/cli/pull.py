"""`specctl pull`: files of a run to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.base import Interrupted, InventoryOption, JsonOption, errors, fleet_of, stderr, stdout
from orchestrator.commands import RUN
from orchestrator.completion import offer
from orchestrator.errors import ConfigError
from orchestrator.render import json as as_json
from orchestrator.render import transfer as show_transfer
from orchestrator.verbs import pull as verb
from orchestrator.verbs.push import AGAIN


def pull(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="An id, a part of one, or @last.", show_default=False,
                                        autocompletion=offer(RUN))],
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH", help="In the run's directory or its code/, or absolute.  [what is worth having]",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="The folder to put it into, made if missing.")
    ] = Path(),
    export: Annotated[
        bool,
        typer.Option("--export", help="What `python -m trainer export` has made of the run, into DIR/RUN/export/."),
    ] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Bring files of a run here; resumable, and verified by sha256 on both sides.

    Without PATH: the newest whole checkpoint, the configuration, the records (run.json, events, exit), the metrics and
    the log of every attempt, into DIR/RUN/. With PATH: that file or folder, into DIR under its own name.

    The run may go on meanwhile: a log comes as long as it was at the beginning, and the next pull adds what has come
    since. Files that are here with the same content are not sent again, nothing is ever deleted, and what was changed
    here after the run's own is not replaced by PATH or --export.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        if export and path is not None:
            raise ConfigError("--export and a PATH", hint="the one or the other")
        console = stderr()
        with show_transfer.Moving(console) as moving:
            try:
                result = verb.run(
                    fleet, run, path, to, moving, lambda about: show_transfer.about_to_pull(console, about),
                    export=export,
                )
            except KeyboardInterrupt:
                far = f" ({moving.far()})" if moving.begun else ""
                raise Interrupted(f"broken off{far}", hint=AGAIN) from None
        print(as_json.text(as_json.of_pull(result))) if json else show_transfer.show_pull(stdout(), result)
        raise typer.Exit(1 if result.failed else 0)
