"""`specctl launch`: start a run and climb the ladder of evidence."""

from __future__ import annotations

import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from orchestrator import gpus as gpus_of
from orchestrator import plan as planning
from orchestrator.cli.base import (
    DAY_S,
    Interrupted,
    InventoryOption,
    JsonOption,
    UsageError,
    errors,
    fleet_of,
    inventory_of,
    program,
    say,
    seconds,
    stderr,
    stdout,
)  # fmt: skip
from orchestrator.cli.usage import nearest, sentence
from orchestrator.commands import TARGET
from orchestrator.completion import offer
from orchestrator.errors import ConfigError, SpecctlError
from orchestrator.render import json as as_json
from orchestrator.render import launch as show_launch
from orchestrator.verbs import launch as verb

COMMAND = "specctl.command"


class Until(str, Enum):
    process = "process"
    step = "step"


class Command(TyperCommand):
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
            mistyped = nearest(error) and (_option_first(typed, error.option_name) or _is_target(ctx, words[0]))
            if COMMAND in ctx.meta or not words or mistyped:
                raise
            target, *command = words if _is_target(ctx, words[0]) else ["[TARGET]", *words]
            raise ConfigError(
                f"{sentence(error)}: the program's own words stand after --",
                hint=f"specctl launch {target} -- {shlex.join(command) or 'CMD...'}",
            ) from error

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


def _is_target(ctx: Any, word: str) -> bool:
    try:
        return word in inventory_of(ctx.find_root().params.get("inventory")).targets
    except SpecctlError:
        return False


def _option_first(args: list[str], option: str) -> bool:
    """Whether `option` stands before every word that could begin a command."""
    words = _words_of_a_command(args)
    at = next(at for at, word in enumerate(args) if word.partition("=")[0] == option)
    return not words or at < len(args) - len(words)


def _words_of_a_command(args: list[str]) -> list[str]:
    """From the first word that is neither an option nor an option's value: where a forgotten `--` was meant."""
    valued = {
        "--config", "--name", "--until", "--timeout", "--note", "--source", "--wheelhouse", "--inventory", "--gpus",
    }  # fmt: skip
    at = 0
    while at < len(args) and args[at].startswith("-"):
        at += 2 if args[at] in valued else 1
    return args[at:]


def launch(
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Where to run; hosts.yaml's default if left out.",
                                   autocompletion=offer(TARGET)),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", readable=False, help="Train with this (YAML); with a CMD, specctl's own keys.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="SLUG", help="A word for the run id.")] = None,
    until: Annotated[Until, typer.Option(help="What must be seen for the launch to count.")] = Until.step,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=seconds(0.1, 7 * DAY_S), metavar="S",
            help="Seconds to wait for it.  [600, and compile warm-up's own 1800]",
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done, and do nothing.")] = False,
    note: Annotated[str, typer.Option(metavar="TEXT", help="A line to remember the run by.", show_default=False)] = "",
    source: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The project to ship.  [the current directory]")
    ] = None,
    no_source: Annotated[bool, typer.Option("--no-source", help="Ship no project, only the trainer.")] = False,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Make the environment from this folder of wheels, where there is no network."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="WHICH", help="Claim all, none, so many (2), or these (0,1 or GPU-...).  [what hosts.yaml "
                     "and the configuration say, else all that the program sees]"),
    ] = None,
    queue: Annotated[bool, typer.Option("--queue", help="Wait in line, there, for GPUs that others have.")] = False,
    no_claim: Annotated[bool, typer.Option("--no-claim", help="Claim no GPU, and share those of others.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Start a run and climb the ladder of evidence: accepted, session, process, log, gpu, step.

    Returns 0 once the run has been seen to do what --until asks, and 1 with the reason if it has not; with --queue 0
    also when it waits in line. Ctrl-C stops the watching, never the run.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        request = planning.Request(
            target=target, config=config, command=ctx.meta.get(COMMAND, []), name=name, until=until.value,
            timeout_s=timeout, note=note, source=None if no_source else (source or Path.cwd()),
            wheelhouse=wheelhouse, gpus=gpus_of.Asked(gpus=gpus, queue=queue, claim=not no_claim),
        )  # fmt: skip
        planned = planning.plan(request, fleet.inventory)
        if plan:
            print(as_json.text(as_json.of_plan(planned))) if json else show_launch.show_plan(stdout(), planned)
            return
        run_id = planned.spec.run_id
        try:
            with show_launch.Progress(stderr(), planned) as progress:
                result = verb.run(planned, fleet, progress)
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped watching before the start was answered: if {run_id} was started, it goes on",
                hint=f"{program()} status {run_id}",
            ) from None
        if json:
            print(as_json.text(as_json.of_launch(result)))
        elif not result.interrupted:
            show_launch.show_result(stdout(), result, program=program())
        if result.interrupted:
            say(show_launch.left(result, program=program()))
            raise typer.Exit(130)
        raise typer.Exit(0 if result.verified or result.queued else 1)
