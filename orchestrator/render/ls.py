"""The history: one line a run, newest first."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from orchestrator.health import age
from orchestrator.render.text import colour, line, number, one_line, shorten, table, unreachable
from orchestrator.verbs.ls import Request, Result, Row

COLUMNS = ("run", "target", "state", "started", ">took", ">step", ">loss", "note")


def show(console: Console, result: Result, request: Request) -> None:
    now = time.time()
    if result.rows and not table(console, COLUMNS, [_cells(row, now) for row in result.rows]):
        for row in result.rows:
            _two_lines(console, row, now)
    silent = ((view.target, view.error) for view in result.silent if view.error is not None)
    unreachable(console, silent, ". What else ran there is unknown.")
    if result.left_out:
        line(console, f"{result.left_out:,} older: specctl ls -n 0", first=0, style="dim")
    if not result.rows:
        filtered = any((request.targets, request.states, request.name, request.within_s, request.owner))
        line(console, "No run fits." if filtered else "No run yet: specctl launch starts one.", first=0)


def _cells(row: Row, now: float) -> list[str | Text]:
    verdict = row.seen.verdict if row.seen else None
    return [
        row.run_id, row.target, _state(row), started(row.started_at, now),
        "-" if row.took_s is None else age(row.took_s),
        "-" if verdict is None or verdict.step is None else f"{verdict.step:,}",
        number(verdict.loss if verdict else None, 4), _words(row),
    ]  # fmt: skip


def _two_lines(console: Console, row: Row, now: float) -> None:
    line(console, Text.assemble(_state(row), "  ", (row.run_id, "bold"), "  ", row.target), first=0)
    names = [name.lstrip(">") for name in COLUMNS[3:-1]]
    figures = [f"{name} {cell}" for name, cell in zip(names, _cells(row, now)[3:-1], strict=True) if cell != "-"]
    line(console, " · ".join(filter(None, [*figures, _words(row)])))


def _state(row: Row) -> Text:
    return Text(row.state, style="dim" if row.seen is None and row.state == "GONE" else colour(row.state))


def _words(row: Row) -> str:
    """The note; of a run that did not end well, outlived a worker, or was not seen, the reason goes before it."""
    survived = row.seen is not None and bool(row.seen.verdict.workers_gone)
    quiet = row.state in ("RUNNING", "SUCCEEDED", "STOPPED") and not survived
    note = row.seen.probe.note if row.seen else ""
    return one_line(" · ".join(filter(None, ["" if quiet else shorten(row.why, 70), note])))


def started(at: float, now: float) -> str:
    """In this machine's own time: the hour of today, the day of this year, else the date."""
    if not at:
        return "-"
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("today %H:%M", then)
    return time.strftime("%b %d %H:%M" if then[0] == today[0] else "%Y-%m-%d", then)
