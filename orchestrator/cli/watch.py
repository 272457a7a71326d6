"""`specctl watch`: be told."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from orchestrator import herald, streams
from orchestrator.cli.base import InventoryOption, RunArgument, errors, fleet_of, say
from orchestrator.errors import ConfigError
from orchestrator.model import BAD, to_json
from orchestrator.render import json as as_json
from orchestrator.render.text import one_line
from orchestrator.verbs import watch as verb


def watch(
    ctx: typer.Context,
    run: RunArgument = None,
    on: Annotated[
        str, typer.Option("--on", metavar="KINDS", help=f"Of: {', '.join(verb.KINDS)}; with commas between them.")
    ] = ",".join(verb.USUAL),
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", show_default=False,
                     help="Run this for each, with $SPECCTL_TEXT and others, and JSON on stdin."),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option("--webhook", metavar="URL", envvar="SPECCTL_WEBHOOK", show_envvar=True, show_default=False,
                     help="POST each as JSON, with its id as Idempotency-Key."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --exec or --webhook: also what has been told already.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, for programs.")] = False,
    inventory: InventoryOption = None,
) -> None:  # fmt: skip
    """Tell of a run's wait in line, its exceptions, stalls, falls of tok/s and end, from its own records, until it has
    ended.

    From its beginning, or from where it was left: with --exec or --webhook each thing is told at least once, also what
    happened while this machine slept or the link was lost, with an id that is the same every time. Exits 0 or 1 by how
    the run ended.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        kinds = tuple(dict.fromkeys(name.strip() for name in on.split(",") if name.strip()))
        if unknown := [name for name in kinds if name not in verb.KINDS]:
            raise ConfigError(f"--on {unknown[0]}: there is {', '.join(verb.KINDS)}")
        if command and webhook:
            raise ConfigError("--exec and --webhook are two watches", hint="start one for each")
        watched = verb.find(fleet, run)
        for note in watched.notes:
            say(note)
        mark, outside = verb.Bookmark(), None
        if command is not None or webhook is not None:
            # Lines of a command would be none of those that a program reads.
            way = herald.webhook(webhook) if webhook else herald.command(command or "", stdout=2 if json else None)
            outside = herald.until_told(way, say)
            sink = f"webhook {webhook}" if webhook else f"exec {command}"
            mark = verb.Bookmark.of(watched.run.run_id, f"{sink} {sorted(kinds)}", again=again)
            if mark.ended:
                say(f"everything of {watched.run.run_id} has been told already: --again tells it once more")

        def tell(news: verb.News) -> None:
            record: dict[str, Any] = to_json(news)
            if outside is not None:
                outside(record)
            if json:
                streams.write_line(as_json.text(record))
            else:
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(news.at))
                streams.write_line(f"{at}  {news.kind:<10} {one_line(news.text)}")
            sys.stdout.flush()

        try:
            verb.run(fleet, watched, mark, on=kinds, tell=tell, say=say)
        except OSError as error:
            raise ConfigError(f"{mark.path} cannot be written: {error.strerror or error}") from None
        assert watched.verdict is not None
        verdict, what = watched.verdict, f"{watched.run.run_id} on {watched.run.target.name}"
        say(f"{what}: {verdict.state} ({verdict.why}); told of {watched.told}")
        raise typer.Exit(1 if verdict.state in BAD else 0)
