"""`specctl attach`: the live session of a run."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from orchestrator import terminal
from orchestrator.cli.base import InventoryOption, RunArgument, errors, fleet_of, say
from orchestrator.errors import ConfigError
from orchestrator.model import BAD
from orchestrator.verbs import attach as verb


def attach(
    ctx: typer.Context,
    run: RunArgument = None,
    write: Annotated[
        bool, typer.Option("--write", help="Keys reach the session: scroll (Ctrl-B [), open a shell (Ctrl-B c).")
    ] = False,
    inventory: InventoryOption = None,
) -> None:
    """Look into the live tmux session of a run: its log as it grows. Ctrl-B d leaves, and the run goes on.

    Read-only unless --write is given; either way the program has no part in it, and a slip of the hand cannot harm it.
    Exits 0 while the run lives, afterwards 0 or 1 by how it ended, and 3 when the link was lost.
    """
    with errors(False), fleet_of(ctx, inventory) as fleet:
        if not (os.isatty(0) and os.isatty(1)):
            raise ConfigError(
                "attach needs a terminal, and this is none",
                hint=f"specctl logs {run or 'RUN'} -f prints the same lines anywhere",
            )
        found = verb.find(fleet, run)
        for note in found.notes:
            say(note)
        one = found.run
        # Under a tmux of one's own the prefix has to be typed twice, to get through to the inner one.
        keys = "Ctrl-B Ctrl-B d" if os.environ.get("TMUX") else "Ctrl-B d"
        say(f"{one.run_id} on {one.target.name}, {'' if write else 'read-only; '}{keys} leaves, and the run goes on")
        utf8 = sys.stdout.encoding.lower().startswith("utf")
        session = verb.enter(fleet, one, terminal.screen(), write=write, utf8=utf8)
        with session.terminal, terminal.Lent() as lent:
            lent.carry(session.terminal, session.first)
        now = verb.look_again(fleet, one)
        goes = "it goes on: " if now.verdict.live else ""
        say(f"left {one.run_id}; {goes}{now.verdict.state} ({now.verdict.why})")
        raise typer.Exit(1 if now.verdict.state in BAD and not now.verdict.live else 0)
