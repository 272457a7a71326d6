"""The status table: runs, then targets that could not be asked, then GPUs. Idle GPUs are evidence too."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orchestrator.render.text import age, colour, headline, number, workers
from orchestrator.verbs.status import Result


def show(console: Console, result: Result) -> None:
    if result.runs:
        console.print(_table(result, console.width))
    for run in result.runs:
        if run.verdict.error is not None and run.verdict.state != "STOPPED":
            console.print(
                f"[{colour(run.verdict.state)}]{run.verdict.state}[/] {run.run_id}: "
                f"{escape(headline(run.verdict.error))}", highlight=False, soft_wrap=True,
            )  # fmt: skip
    for view in result.views:
        if view.error is not None:
            console.print(
                f"[{colour('UNREACHABLE')}]UNREACHABLE[/] {escape(view.target.name)} ({escape(view.target.place)}): "
                f"{escape(view.error.message)}. What runs there is unknown.", highlight=False, soft_wrap=True,
            )  # fmt: skip
            if view.error.hint:
                console.print(f"  {view.error.hint}", style="cyan", highlight=False, markup=False, soft_wrap=True)
    _gpus(console, result)
    answered = [view.target.name for view in result.views if view.error is None]
    if not result.runs and answered:
        console.print(f"No run on {', '.join(answered)} is live or ended within 24 hours.", highlight=False)
    if result.older:
        console.print(f"{result.older} older: specctl status --all", style="dim", highlight=False)


def _table(result: Result, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold dim")
    table.add_column("run", no_wrap=True, overflow="fold")
    table.add_column("target", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("step", "tok/s", "loss", "progress", "workers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why / note", overflow="fold", ratio=1)
    for run in result.runs:
        verdict = run.verdict
        since = None if verdict.last_progress_at is None else verdict.observed_at - verdict.last_progress_at
        # What the columns already show need not be said again.
        why = "" if verdict.state == "RUNNING" and verdict.step is not None else verdict.why
        text = " · ".join(part for part in (why, run.probe.note) if part)
        table.add_row(
            run.run_id, escape(run.target.name), f"[{colour(verdict.state)}]{verdict.state}[/]",
            "-" if verdict.step is None else f"{verdict.step:,}", number(verdict.tok_s), number(verdict.loss, 4),
            age(since) + " ago" if since is not None else "-", workers(verdict), escape(text),
        )  # fmt: skip
    return table


def _gpus(console: Console, result: Result) -> None:
    for view in result.views:
        if view.gpus_error:
            console.print(f"{escape(view.target.name)}: {escape(view.gpus_error)}", style="yellow", highlight=False)
        for gpu in view.gpus:
            use, used, total = gpu["utilization_percent"], gpu["memory_used_mib"], gpu["memory_total_mib"]
            idle = "  [yellow]idle[/]" if use == 0 else ""
            console.print(
                f"[dim]{escape(view.target.name)}[/] GPU {gpu['index']} {escape(gpu['name'])}: "
                f"{'-' if use is None else use} % busy, {number(used, 0)} of {number(total, 0)} MiB{idle}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
