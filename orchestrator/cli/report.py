"""`specctl report`: runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator import streams
from orchestrator.cli.base import (
    InventoryOption,
    JsonOption,
    MetricsOption,
    RunsArgument,
    UsageError,
    complain,
    errors,
    fleet_of,
    metric_names,
    program,
    say,
)
from orchestrator.render.text import size
from orchestrator.verbs import report as verb


def report(
    ctx: typer.Context,
    runs: RunsArgument = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page; - is stdout.")
    ] = Path("report.html"),
    metrics: MetricsOption = ",".join(verb.METRICS),
    force: Annotated[bool, typer.Option("--force", help="Also over a file that is no report.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:  # fmt: skip
    """Write one or several runs as one page of HTML: curves, time lines of workers, exceptions, evidence, changes.

    The page is a single file that needs no network: curves can be zoomed, and it reads well on a phone, in the dark and
    on paper. Several runs are drawn over one another, and each is compared with the first. A report that is there
    already is replaced. Exits 3 when a run, or a part of one, could not be seen; the page then says which, and why.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        names = metric_names(metrics)
        to_stdout = str(output) == "-"
        if json and to_stdout:
            raise UsageError("--json tells of the file that was written: give -o FILE with it")
        from orchestrator.render import report as show_report

        show_report.template()
        if not to_stdout:  # before anybody is asked anything, which may take a while
            show_report.refuse(output, force=force)
        result = verb.run(fleet, list(runs or []), names)
        for note in result.notes:
            say(note)
        text = show_report.page(result, program=f"{program()} report")
        if to_stdout:
            streams.write_text(text)
        else:
            written = show_report.save(text, output)
        for _, error in result.unseen:
            complain(error)
        for page in result.pages:
            for error in page.unknown:
                complain(error)
        if json:
            from orchestrator.render import json as as_json

            print(as_json.text(as_json.of_report(result, str(output), written)))
        elif not to_stdout:
            print(f"{output}  {size(written)}")
        raise typer.Exit(result.exit_code)
