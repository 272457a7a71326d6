"""`specctl plot`: how runs train, one over the other."""

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
    errors,
    fleet_of,
    metric_names,
    say,
    stdout,
)
from orchestrator.verbs import plot as verb

METRICS = "loss,tok_s"


def plot(
    ctx: typer.Context,
    runs: RunsArgument = None,
    metrics: MetricsOption = METRICS,
    workers: Annotated[bool, typer.Option("--workers", help="Also each worker's own line.")] = False,
    time: Annotated[bool, typer.Option("--time", help="Over the time since the launch instead of the steps.")] = False,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="Write a picture (.png, .svg, .pdf).", show_default=False),
    ] = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:  # fmt: skip
    """Draw loss and tok/s, or other figures, of one or several runs over their steps.

    Where no figures were written down, a line has a gap. In a picture the shade is the standard deviation of the steps
    that a point stands for.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        names = metric_names(metrics)
        result = verb.run(fleet, list(runs or []), names, workers=workers, by="time" if time else "step")
        for drawn in result.runs:
            for note in drawn.notes:
                say(note)
        if result.absent and not (json or metrics == METRICS):
            say(f"no {' or '.join(result.absent)} was written down; there is: {', '.join(result.there)}")
        if json:
            from orchestrator.render import json as as_json

            print(as_json.text(as_json.of_plot(result)))
            return
        from orchestrator.render import plot as show_plot

        if png is not None:
            show_plot.picture(result, png)
            say(f"wrote {png}")
        else:
            streams.write_text(show_plot.terminal(stdout(), result))
        for drawn in result.runs:
            verdict, part = drawn.verdict, "" if drawn.whole else "; metrics.jsonl is long, and was read in parts"
            say(f"{drawn.run_id} on {drawn.target}: {verdict.state} ({verdict.why}){part}")
