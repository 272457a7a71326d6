"""What every command of the command line shares: its options, its consoles, and how an error is said.

A command's own file parses, calls its verb, renders, and ends with the exit code; nothing else. What not every command
needs (rich, the fleet, the inventory's schema) is imported where it is used: it takes longer than a command may.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.commands import EITHER, PLACE, RUN
from orchestrator.completion import offer
from orchestrator.errors import LinkLost, SpecctlError
from orchestrator.record import record
from orchestrator.when import UNITS_S

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.fleet import Fleet
    from orchestrator.inventory import Inventory

UsageError: Any = typer.BadParameter.__base__
DAY_S = 86400.0
WHOLE_LINES = 100_000
"""Columns of what is no terminal: grep must find lines whole."""

RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="An id, a part of one, or @last; your only live run.", show_default=False,
        autocompletion=offer(RUN),
    ),
]
RunsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN", help="Ids, parts of ids, @last; your only live run.", show_default=False,
        autocompletion=offer(RUN),
    ),
]
EitherArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN|TARGET", help="Runs, targets or groups.  [all targets]", autocompletion=offer(EITHER)
    ),
]
PlacesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TARGET", help="Targets or groups; all if none.", autocompletion=offer(PLACE)),
]
MetricsOption = Annotated[
    str, typer.Option("--metric", "-m", metavar="NAMES", help="Figures of metrics.jsonl, with commas between them.")
]
InventoryOption = Annotated[
    str | None, typer.Option("--inventory", metavar="FILE", help="Which hosts.yaml to use.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]


class Interrupted(SpecctlError):
    """Ctrl-C, when there is something to say about it."""

    exit_code = 130


def seconds(least: float, most: float) -> Any:
    """A parser of seconds (`90`) or of `90s`, `5m`, `1h` within bounds: `inf` and `nan` are numbers to Python, and no
    time to wait."""

    def parse(text: str | float) -> float:
        try:
            unit = UNITS_S.get(str(text)[-1:], 0)
            value = float(str(text)[:-1]) * unit if unit else float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise typer.BadParameter(f"{text!r} is no number of seconds between {least:g} and {most:,.0f}")
        return value

    return parse


def metric_names(text: str) -> list[str]:
    """Those that `--metric` names. Raises `UsageError`."""
    if names := [name.strip() for name in text.split(",") if name.strip()]:
        return names
    raise UsageError("--metric names at least one figure, such as loss")


def program() -> str:
    """What to type for specctl here: its name if the shell would find it, else as it was typed."""
    return "specctl" if shutil.which("specctl") or not sys.argv[0].endswith("specctl") else sys.argv[0]


def stdout() -> Console:
    return _console(stderr=False)


def stderr() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """A terminal is written to as wide as it is; what is no terminal gets whole lines, however long they are, and
    nothing that moves, even where it wants colours (FORCE_COLOR)."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        if os.environ.get("TERM") in ("dumb", "unknown"):  # rich takes it for one of 80 columns, whatever it is
            columns, rows = os.get_terminal_size(stream.fileno())
            return Console(stderr=stderr, highlight=False, width=columns or None, height=rows or None)
        return Console(stderr=stderr, highlight=False)
    return Console(stderr=stderr, highlight=False, width=WHOLE_LINES, force_interactive=False)


def say(text: str) -> None:
    """On stderr, between what was printed before it and what comes after, also where both go into one file."""
    from orchestrator.render.text import line, one_line

    sys.stdout.flush()
    line(stderr(), one_line(text), first=0, style="dim")


def inventory_of(explicit: str | None) -> Inventory:
    from orchestrator.inventory import load_inventory

    return load_inventory(explicit, environ=os.environ, cwd=Path.cwd(), home=Path.home())


@record
class Shared:
    """What was said before the command's name."""

    inventory: str | None
    accept_new: bool


@contextmanager
def fleet_of(ctx: typer.Context, inventory: str | None) -> Iterator[Fleet]:
    from orchestrator.fleet import Fleet

    shared: Shared = ctx.obj
    fleet = Fleet(inventory_of(inventory or shared.inventory), accept_new=shared.accept_new)
    try:
        yield fleet
    finally:
        fleet.close()
        for note in fleet.pool.trusted:
            say(note)


@contextmanager
def errors(json: bool) -> Iterator[None]:
    """Turns an error meant for people into its text and its exit code."""
    try:
        try:
            yield
        except EOFError as error:
            # The parser would take it for a Ctrl-D, say nothing and exit as if interrupted.
            raise LinkLost(
                f"a connection ended in the middle ({_place(error)}); what was asked for may have been done",
                hint="ask again",
            ) from error
    except SpecctlError as error:
        if json:
            from orchestrator.render import json as as_json

            print(as_json.text(as_json.of_error(error)))
        complain(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _place(error: BaseException) -> str:
    """Where it was raised, for whoever is told of it."""
    import traceback

    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{Path(last.filename).name}:{last.lineno}"


def complain(error: SpecctlError) -> None:
    from rich.text import Text

    from orchestrator.render.text import line, one_line

    console = stderr()
    lead = "" if isinstance(error, Interrupted) else "error: "
    # Words of servers and names of files are part of it.
    first, *rest = map(one_line, str(error).splitlines() or [""])
    line(console, Text.assemble((lead, "bold red"), first), first=0)
    for text in rest:
        line(console, text)
    if error.hint:
        line(console, one_line(error.hint), style="cyan")
