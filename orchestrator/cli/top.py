"""`specctl top`: all targets on the whole screen, as they come and go."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from orchestrator.cli.base import EitherArgument, InventoryOption, errors, fleet_of, program, say, seconds
from orchestrator.errors import ConfigError
from orchestrator.verbs import top as verb
from orchestrator.verbs import top_kept


def top(
    ctx: typer.Context,
    words: EitherArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what ended more than 24 hours ago.")] = False,
    every: Annotated[
        float,
        typer.Option(
            "--every", metavar="S", parser=seconds(0.5, 3600), show_default="2",
            help="Seconds from look to look; a target that is slow is asked less often.",
        ),
    ] = 2.0,
    inventory: InventoryOption = None,
) -> None:  # fmt: skip
    """Watch all runs on the whole screen: curves, workers, GPUs, the log of the selected one; keys for the rest.

    A target that stops answering keeps what was last seen of it, greyed and with its age. `?` lists the keys. Leaving
    it leaves the runs alone.
    """
    with errors(False), fleet_of(ctx, inventory) as fleet:
        if not (os.isatty(0) and os.isatty(1)) or os.environ.get("TERM") in (None, "dumb", "unknown"):
            raise ConfigError("top needs a terminal that can be drawn on", hint="specctl status --json tells programs")
        try:
            from orchestrator.tui.app import Top
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "orchestrator":
                raise
            raise ConfigError(f"top needs {error.name or 'textual'}", hint="pip install textual") from None
        asked, notes = verb.asks(fleet, words or [])
        board = verb.Board(fleet, asked, everything=everything, every_s=every)
        top_kept.recall(board)
        plain = not sys.stdout.encoding.lower().startswith("utf")
        screen = Top(fleet, board, program=program(), plain=plain)
        code = screen.run()
        board.stop()
        if screen.bug is not None:
            raise screen.bug
        top_kept.keep(board)
        for note in notes:
            say(note)
        for run_id in screen.stops:
            say(f"stopped watching; the stop of {run_id} that was asked for goes on there")
        raise typer.Exit(1 if code is None else code)
