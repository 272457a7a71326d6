"""The status table: runs, then targets that could not be asked, then GPUs. Idle GPUs are evidence too."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from orchestrator.blame import said_by
from orchestrator.health import age
from orchestrator.model import Probe
from orchestrator.render.text import colour, line, named, number, one_line, shorten, table, unreachable, workers
from orchestrator.resolve import Run
from orchestrator.verbs.status import Result


def show(console: Console, result: Result) -> None:
    if result.runs and not table(console, ("run", "target", "state", *COLUMNS, "why / note"), _rows(result)):
        _lines(console, result)
    _details(console, result)
    silent = ((view.target, view.error) for view in result.views if view.error is not None)
    unreachable(console, silent, ". What runs there is unknown.")
    _gpus(console, result)
    for view in result.views:
        if view.no_workdir:
            absent = f"{view.target.name}: no runs there, nor its workdir {view.target.workdir}"
            line(console, absent, first=0, style="dim")
    answered = [view.target.name for view in result.views if view.error is None and not view.no_workdir]
    if not result.runs and answered:
        console.print(f"No run on {', '.join(answered)} is live or ended within 24 hours.", highlight=False)
    if result.older:
        console.print(f"{result.older} older: specctl status --all", style="dim", highlight=False)


def watch(console: Console, look: Callable[[], Result], *, every_s: float) -> NoReturn:
    """Shows what `look` sees on the whole screen, again and again, until an interrupt; then what it saw last stays."""
    seen = None
    try:
        with console.screen(hide_cursor=True) as screen:
            while True:
                began = time.monotonic()
                seen = look()
                at = time.strftime("%H:%M:%S")
                head = Text(f"seen at {at}, again every {every_s:g} s; Ctrl-C ends", style="dim")
                screen.update(Text("\n").join([head, Text(), *_screen(console, seen)]))
                time.sleep(max(0.0, every_s - (time.monotonic() - began)))
    except KeyboardInterrupt:
        if seen is not None:
            show(console, seen)
        raise


def _screen(console: Console, result: Result) -> list[Text]:
    """As many lines of the answer as the screen has room for."""
    page = Console(
        file=io.StringIO(), force_terminal=True, width=console.width, highlight=False, color_system="truecolor",
        no_color=console.no_color,
    )  # fmt: skip
    show(page, result)
    lines = page.file.getvalue().splitlines()  # type: ignore[attr-defined]
    room = max(1, console.height - 3)
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines: a higher terminal, or name some runs"]
    return [Text.from_ansi(line) for line in lines]


def _details(console: Console, result: Result) -> None:
    """The whole of what the table has no room for: of live runs that are not well, and of the newest few that ended."""
    ended = 0
    for run in result.runs:
        verdict = run.verdict
        ended += not verdict.live
        if not verdict.live and ended > DETAILED:
            continue
        text = why(run) if why(run) != shorten(why(run)) else ""
        if verdict.error is not None and verdict.state != "STOPPED" and said_by(verdict.error) not in verdict.why:
            text = f"{text}; {named(verdict.error)}" if text else named(verdict.error)
        if text:
            lead = Text.assemble((verdict.state, colour(verdict.state)), f" {run.run_id}: ")
            line(console, lead + Text(text), first=0)


DETAILED = 3
COLUMNS = (">step", ">tok/s", ">loss", ">last step", ">workers")


def _figures(run: Run) -> tuple[str, ...]:
    """The cells of `COLUMNS`."""
    verdict = run.verdict
    since = None if verdict.last_progress_at is None else verdict.observed_at - verdict.last_progress_at
    return (
        "-" if verdict.step is None else f"{verdict.step:,}", number(verdict.tok_s), number(verdict.loss, 4),
        "-" if since is None else f"{age(since)} ago", workers(verdict),
    )  # fmt: skip


def why(run: Run) -> str:
    """Why the run is in its state, without what the columns say: its step, tok/s and their age."""
    verdict = run.verdict
    return "; ".join(part for part in verdict.why.split("; ") if not part.startswith(f"step {verdict.step},"))


def _words(run: Run) -> str:
    """Why, in short; the first log of its own that the run writes; the note."""
    logs = run.probe.foreign_logs
    own = [f"log {logs[0].path}" + (f" and {len(logs) - 1} more" if len(logs) > 1 else "")] if logs else []
    said = why(run)
    words = ("" if said == f"step {run.verdict.step}" else shorten(said), *own, run.probe.note)
    return one_line(" · ".join(filter(None, words)))


def _rows(result: Result) -> list[list[str | Text]]:
    return [
        [run.run_id, run.target.name, _state(run), *_figures(run), _words(run)] for run in result.runs
    ]  # fmt: skip


def _state(run: Run) -> Text:
    return Text(run.verdict.state, style=colour(run.verdict.state))


def _lines(console: Console, result: Result) -> None:
    """The same for a narrow terminal: two lines a run, nothing cut off."""
    for run in result.runs:
        line(console, Text.assemble(_state(run), "  ", (run.run_id, "bold"), "  ", run.target.name), first=0)
        cells = zip(COLUMNS, _figures(run), strict=True)
        figures = " · ".join(f"{name.lstrip('>')} {cell}" for name, cell in cells if cell != "-")
        text = " · ".join(part for part in (figures, _words(run)) if part)
        line(console, text)


def _gpus(console: Console, result: Result) -> None:
    for view in result.views:
        if view.gpus_error:
            line(console, f"{view.target.name}: {view.gpus_error}", first=0, style="yellow")
        for gpu in view.gpus:
            use, used, total = gpu["utilization_percent"], gpu["memory_used_mib"], gpu["memory_total_mib"]
            said = f" GPU {gpu['index']} {gpu['name']}: {'-' if use is None else use} % busy, "
            said += f"{number(used, 0)} of {number(total, 0)} MiB"
            idle = ("  idle", "yellow") if use == 0 else ""
            whose = "".join(f"  claimed by {run}" for run in claimants(view.runs, gpu["index"]))
            line(console, Text.assemble((view.target.name, "dim"), said, idle, whose), first=0)


def claimants(runs: Sequence[Probe], card: int) -> list[str]:
    """The runs of this look that have the GPU, or a part of it, locked."""
    return [
        probe.run_id
        for probe in runs
        if probe.gpu_claim is not None and probe.supervisor_alive and probe.exit is None
        and any(one.card == card and one.number not in probe.gpus_lost for one in probe.gpu_claim.held)
    ]  # fmt: skip
