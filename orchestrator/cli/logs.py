"""`specctl logs`: lines of a run's own log."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from orchestrator import streams
from orchestrator.cli.base import InventoryOption, RunArgument, errors, fleet_of, say
from orchestrator.errors import ConfigError, UnreachableError
from orchestrator.render import json as as_json
from orchestrator.render import logs as show_logs
from orchestrator.render.text import BAD
from orchestrator.verbs import logs as verb


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
    with errors(json), fleet_of(ctx, inventory) as fleet:
        given = {"-A": after, "-B": before, "-C": around, "-i": ignore_case or None, "-v": invert or None}
        alone = [option for option, value in given.items() if value is not None]
        if grep is None and alone:
            raise ConfigError(f"{', '.join(alone)} without --grep: there is nothing to match", hint="add --grep ERE")
        request = verb.Request(
            run=run, grep=grep, last=last, follow=follow, after=(around if after is None else after) or 0,
            before=(around if before is None else before) or 0, ignore_case=ignore_case, invert=invert, attempt=attempt,
        )  # fmt: skip
        with verb.run(fleet, request) as found:
            for note in found.notes:
                say(note)
            try:
                for one in found.lines:
                    streams.write_line(as_json.text(as_json.of_line(found, one)) if json else one.line)
                    if follow:
                        sys.stdout.flush()
            except KeyboardInterrupt:
                sys.stdout.flush()
                said = "stopped following; the run goes on" if follow else "broken off; there is more"
                say(show_logs.broken_off(found, time.time(), said))
                raise typer.Exit(130) from None
            except UnreachableError:
                sys.stdout.flush()
                say(show_logs.broken_off(found, time.time(), "link lost, state unknown"))
                raise
        sys.stdout.flush()
        say(show_logs.of_what(found, grep))
        assert found.verdict is not None
        if follow:
            raise typer.Exit(1 if found.verdict.state in BAD else 0)
        some = found.matched or (last == 0 and grep is None and found.total)
        raise typer.Exit(0 if some else 1)
