"""The command line: parse, call the verb, render, exit code; nothing else.

Results go to stdout, everything else to stderr. Exit codes: 0 yes, 1 the answer is no, 2 usage or configuration,
3 could not know, 4 no such run or target, 130 interrupted.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from orchestrator import plan as planning
from orchestrator import streams
from orchestrator.errors import ConfigError, SpecctlError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Inventory, load_inventory
from orchestrator.render import json as as_json
from orchestrator.render import launch as show_launch
from orchestrator.render import logs as show_logs
from orchestrator.render import status as show_status
from orchestrator.render import stop as show_stop
from orchestrator.render.text import BAD, line
from orchestrator.verbs import launch as launch_verb
from orchestrator.verbs import logs as logs_verb
from orchestrator.verbs import status as status_verb
from orchestrator.verbs import stop as stop_verb

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

COMMAND = "specctl.command"
UsageError: Any = typer.BadParameter.__base__
DAY_S = 86400.0


class Interrupted(SpecctlError):
    """Ctrl-C, when there is something to say about it."""

    exit_code = 130


class Until(str, Enum):
    process = "process"
    step = "step"


class LaunchCommand(TyperCommand):
    """`--` separates TARGET and options from the program's own words, which click alone would mix up."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = list(args)
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[COMMAND] = args[:at], args[at + 1 :]
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            words = _words_of_a_command(typed)
            if COMMAND in ctx.meta or not words:
                raise
            target, *command = words if _is_target(ctx, words[0]) else ["[TARGET]", *words]
            raise ConfigError(
                f"{_sentence(error)}: the program's own words stand after --",
                hint=f"specctl launch {target} -- {shlex.join(command) or 'CMD...'}",
            ) from error

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


def _is_target(ctx: Any, word: str) -> bool:
    try:
        return word in _inventory(ctx.find_root().params.get("inventory")).targets
    except SpecctlError:
        return False


def _words_of_a_command(args: list[str]) -> list[str]:
    """From the first word that is neither an option nor an option's value: where a forgotten `--` was meant."""
    valued = {"--config", "--name", "--until", "--timeout", "--note", "--source", "--inventory"}
    at = 0
    while at < len(args) and args[at].startswith("-"):
        at += 2 if args[at] in valued else 1
    return args[at:]


def _seconds(least: float, most: float) -> Any:
    """A parser of seconds within bounds: `inf` and `nan` are numbers to Python, and no time to wait."""

    def parse(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise typer.BadParameter(f"{text!r} is no number of seconds between {least:g} and {most:,.0f}")
        return value

    return parse


RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="An id, a part of one, or @last; your only live run.", show_default=False),
]
InventoryOption = Annotated[
    str | None, typer.Option("--inventory", metavar="FILE", help="Which hosts.yaml to use.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]


def _version(value: bool) -> None:
    if value:
        print(f"specctl {importlib.metadata.version('specctl')}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    inventory: InventoryOption = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Launch training on GPU hosts and in Proxmox containers, and never believe a run you have not just seen."""
    ctx.obj = inventory


@app.command(cls=LaunchCommand)
def launch(
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Where to run; hosts.yaml's default if left out.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Train with this (YAML); with a CMD, specctl's own keys.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="SLUG", help="A word for the run id.")] = None,
    until: Annotated[Until, typer.Option(help="What must be seen for the launch to count.")] = Until.step,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=_seconds(0.1, 7 * DAY_S), metavar="S",
            help="Seconds to wait for it.  [600, and compile warm-up's own 1800]",
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done, and do nothing.")] = False,
    note: Annotated[str, typer.Option(metavar="TEXT", help="A line to remember the run by.", show_default=False)] = "",
    source: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The project to ship.  [the current directory]")
    ] = None,
    no_source: Annotated[bool, typer.Option("--no-source", help="Ship no project, only the trainer.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Start a run and climb the ladder of evidence: accepted, session, process, log, gpu, step.

    Returns 0 once the run has been seen to do what --until asks, and 1 with the reason if it has not. Ctrl-C stops the
    watching, never the run.
    """
    with _errors(json), _fleet(ctx, inventory) as fleet:
        request = planning.Request(
            target=target, config=config, command=ctx.meta.get(COMMAND, []), name=name, until=until.value,
            timeout_s=timeout, note=note, source=None if no_source else (source or Path.cwd()),
        )  # fmt: skip
        planned = planning.plan(request, fleet.inventory)
        if plan:
            print(as_json.text(as_json.of_plan(planned))) if json else show_launch.show_plan(_stdout(), planned)
            return
        run_id = planned.spec.run_id
        try:
            with show_launch.Progress(_stderr(), planned) as progress:
                result = launch_verb.run(planned, fleet, progress)
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped watching before the start was answered: if {run_id} was started, it goes on",
                hint=f"{_program()} status {run_id}",
            ) from None
        if json:
            print(as_json.text(as_json.of_launch(result)))
        elif not result.interrupted:
            show_launch.show_result(_stdout(), result, program=_program())
        if result.interrupted:
            _say(show_launch.left(result, program=_program()))
            raise typer.Exit(130)
        raise typer.Exit(0 if result.verified else 1)


@app.command()
def status(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="RUN|TARGET", help="Runs, targets or groups.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what ended more than 24 hours ago.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Show every run as it is right now, on all targets at once.

    Exits 3 when a target could not be asked, and 1 when a run that was named is not well.
    """
    with _errors(json), _fleet(ctx, inventory) as fleet:
        result = status_verb.run(fleet, words or [], everything=everything)
        for note in result.notes:
            _say(note)
        print(as_json.text(as_json.of_status(result))) if json else show_status.show(_stdout(), result)
        named = bool(words) and not set(words or []) & {*fleet.inventory.targets, *fleet.inventory.groups}
        bad = named and any(run.verdict.state in BAD for run in result.runs)
        unknown = result.unreachable or any(run.verdict.state == "UNREACHABLE" for run in result.runs)
        raise typer.Exit(3 if unknown else 1 if bad else 0)


@app.command()
def logs(
    ctx: typer.Context,
    run: RunArgument = None,
    grep: Annotated[str | None, typer.Option("--grep", "-e", metavar="ERE", help="Only lines that match.")] = None,
    last: Annotated[int | None, typer.Option("-n", min=0, metavar="N", help="Only the last N lines.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    after: Annotated[int | None, typer.Option("-A", min=0, metavar="N", help="Lines after a match.")] = None,
    before: Annotated[int | None, typer.Option("-B", min=0, metavar="N", help="Lines before a match.")] = None,
    around: Annotated[int | None, typer.Option("-C", min=0, metavar="N", help="Lines around a match.")] = None,
    ignore_case: Annotated[bool, typer.Option("-i", help="Ignore case.")] = False,
    invert: Annotated[bool, typer.Option("-v", help="Lines that do not match.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, metavar="K", help="Which attempt.  [the newest]")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, for programs.")] = False,
    inventory: InventoryOption = None,
) -> None:
    """Print lines of a run's own log, searched where it lies.

    stdout is log lines only; one line on stderr says of which run, attempt and state, and how many matched of how many.
    Exits 1 when nothing matched; with -f, 0 or 1 by how the run ended, and 3 when the link was lost.
    """
    with _errors(json), _fleet(ctx, inventory) as fleet:
        given = {"-A": after, "-B": before, "-C": around, "-i": ignore_case or None, "-v": invert or None}
        alone = [option for option, value in given.items() if value is not None]
        if grep is None and alone:
            raise ConfigError(f"{', '.join(alone)} without --grep: there is nothing to match", hint="add --grep ERE")
        request = logs_verb.Request(
            run=run, grep=grep, last=last, follow=follow, after=(around if after is None else after) or 0,
            before=(around if before is None else before) or 0, ignore_case=ignore_case, invert=invert, attempt=attempt,
        )  # fmt: skip
        with logs_verb.run(fleet, request) as found:
            for note in found.notes:
                _say(note)
            try:
                for one in found.lines:
                    streams.write_line(as_json.text(as_json.of_line(found, one)) if json else one.line)
                    if follow:
                        sys.stdout.flush()
            except KeyboardInterrupt:
                sys.stdout.flush()
                said = "stopped following; the run goes on" if follow else "broken off; there is more"
                _say(show_logs.broken_off(found, time.time(), said))
                raise typer.Exit(130) from None
            except UnreachableError:
                sys.stdout.flush()
                _say(show_logs.broken_off(found, time.time(), "link lost, state unknown"))
                raise
        sys.stdout.flush()
        _say(show_logs.of_what(found, grep))
        assert found.verdict is not None
        if follow:
            raise typer.Exit(1 if found.verdict.state in BAD else 0)
        some = found.matched or (last == 0 and grep is None and found.total)
        raise typer.Exit(0 if some else 1)


@app.command()
def stop(
    ctx: typer.Context,
    run: RunArgument = None,
    grace: Annotated[
        float, typer.Option(parser=_seconds(0.0, DAY_S), metavar="S", help="Seconds between TERM and KILL.")
    ] = stop_verb.GRACE_S,
    now: Annotated[bool, typer.Option("--now", help="KILL at once.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """End a run: TERM once, wait, KILL, look again. "Stopped" is said only when no process of it is left."""
    with _errors(json), _fleet(ctx, inventory) as fleet:
        try:
            with show_stop.Waiting(_stderr()) as waiting:
                result = stop_verb.run(fleet, run, grace_s=grace, now=now, watcher=waiting)
        except KeyboardInterrupt:
            raise Interrupted(
                "stopped watching; a stop that was asked for goes on there", hint=f"{_program()} status"
            ) from None
        print(as_json.text(as_json.of_stop(result))) if json else show_stop.show(_stdout(), result)
        # Still live without a process to name: its supervisor has not said how it ended, so it is not stopped yet.
        raise typer.Exit(1 if result.remaining or result.verdict.live else 0)


# --- plumbing -------------------------------------------------------------------------------------------------------


def _program() -> str:
    """What to type for specctl here: its name if the shell would find it, else as it was typed."""
    return "specctl" if shutil.which("specctl") or not sys.argv[0].endswith("specctl") else sys.argv[0]


def _stdout() -> Console:
    return Console(highlight=False)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)


def _say(text: str) -> None:
    line(_stderr(), text, first=0, style="dim")


def _inventory(explicit: str | None) -> Inventory:
    return load_inventory(explicit, environ=os.environ, cwd=Path.cwd(), home=Path.home())


@contextmanager
def _fleet(ctx: typer.Context, inventory: str | None) -> Iterator[Fleet]:
    fleet = Fleet(_inventory(inventory or ctx.obj))
    try:
        yield fleet
    finally:
        fleet.close()


@contextmanager
def _errors(json: bool) -> Iterator[None]:
    """Turns an error meant for people into its text and its exit code."""
    try:
        yield
    except SpecctlError as error:
        if json:
            print(as_json.text(as_json.of_error(error)))
        _complain(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _complain(error: SpecctlError) -> None:
    console = _stderr()
    lead = "" if isinstance(error, Interrupted) else "error: "
    first, *rest = str(error).splitlines() or [""]
    line(console, Text.assemble((lead, "bold red"), first), first=0)
    for text in rest:
        line(console, text)
    if error.hint:
        line(console, error.hint, style="cyan")


def _sentence(error: Any) -> str:
    """What click says, as the other errors here are said."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    return text[:1].lower() + text[1:]


def main(argv: list[str] | None = None) -> int:
    """The exit code of one command."""
    try:
        code = app(args=argv, prog_name="specctl", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SpecctlError as error:
        _complain(error)
        return error.exit_code
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2  # it has printed the help
        path = error.ctx.command_path if error.ctx else "specctl"
        _complain(ConfigError(_sentence(error), hint=f"{path} --help"))
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
