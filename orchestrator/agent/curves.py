"""`curves`: figures of metrics.jsonl over the steps of a run, few enough rows to be sent and drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.agent import files
from orchestrator.agent.logfiles import identified
from orchestrator.agent.main import Call
from orchestrator.model import to_json

ROWS, MOST_ROWS = 512, 4096
SLICES, SLICE_BYTES = 1024, 64 << 10
"""Of a metrics.jsonl that is longer than all of them together so many slices are read, evenly spread: more than a
series usually has rows, so that hardly one goes without."""
LAST_STEP = 2**53
"""A program may write any number; from here on no two of them can be told apart where curves are drawn."""
ABOUT = frozenset({"time", "source", "attempt", "nonce", "step", "worker"})
SUMMED = frozenset({"tok_s", "positions_s"})
"""Rates: a run's are those of all its workers together, where other figures are their mean."""

Steps = dict[int, tuple[float, float]]
"""Step -> (figure, when it was written). A step that is written again, after a resume say, counts with its last one."""


def run(call: Call) -> None:
    """Request: `run_id`, `metrics` (names), `workers` (whether each one's own series are wanted, too), `rows` (how many
    a series may have)."""
    seen = identified(call)
    metrics, path = [str(one) for one in call.request["metrics"]], call.paths.run(seen.run_id).metrics
    rows = min(MOST_ROWS, int(call.request.get("rows") or ROWS))
    told = read(path, seen.nonce, metrics, workers=bool(call.request.get("workers")), at_most=rows)
    call.emit({"final": True, "probe": to_json(seen), **told})


def read(path: str, nonce: str, metrics: list[str], *, workers: bool, at_most: int = ROWS) -> dict[str, Any]:
    """`series`, the names of all figures `there` are, and whether the file was read as a `whole`."""
    of_run: dict[str, Steps] = {metric: {} for metric in metrics}
    of_workers: dict[tuple[str, str], Steps] = {}
    there: set[str] = set()
    whole = True

    def cut() -> None:
        nonlocal whole
        whole = False

    for line in _lines(path, cut):
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or row.get("nonce") != nonce or type(row.get("step")) is not int:
            continue
        if abs(row["step"]) > LAST_STEP:
            continue
        step, worker, at = row["step"], row.get("worker"), _figure(row.get("time")) or 0.0
        for name, value in row.items():
            if (name in there and name not in of_run) or name in ABOUT or (figure := _figure(value)) is None:
                continue
            there.add(name)
            if name not in of_run:
                continue
            if worker is None:
                of_run[name][step] = figure, at
            elif isinstance(worker, str):
                of_workers.setdefault((name, worker), {})[step] = figure, at
    series = []
    for metric, steps in of_run.items():
        steps = steps or _together([one for (name, _), one in of_workers.items() if name == metric], metric)
        series += [_series(metric, None, steps, at_most)] if steps else []
    if workers:
        series += [_series(metric, worker, steps, at_most) for (metric, worker), steps in sorted(of_workers.items())]
    return {"series": series, "there": sorted(there), "whole": whole}


def _figure(value: Any) -> float | None:
    """A number that can be counted with, or None."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e100 else None


def _together(workers: list[Steps], metric: str) -> Steps:
    """The run's steps, of a program that speaks of its workers only. A worker without a line of a step between
    others of its own, or the one that it takes next, has not stood still there: its rate counts as it was."""
    steps: Steps = {}
    rates: dict[int, tuple[float, float]] = {}
    ends = [max(one, default=0) for one in workers]
    ends = [end + (end == max(ends) - 1) for end in ends]
    for step in sorted({step for one in workers for step in one}):
        here = {number: one[step] for number, one in enumerate(workers) if step in one}
        rates.update(here)
        if metric in SUMMED:
            here = {number: rate for number, rate in rates.items() if number in here or step <= ends[number]}
        figures = list(here.values())
        total = sum(figure for figure, _ in figures)
        steps[step] = (total if metric in SUMMED else total / len(figures)), max(at for _, at in figures)
    return steps


def _series(metric: str, worker: str | None, steps: Steps, at_most: int) -> dict[str, Any]:
    width, numbers = 1, set(steps)
    while len(numbers) > at_most:
        width, numbers = 2 * width, {number // 2 for number in numbers}
    rows: dict[int, list[Any]] = {}
    for step, (figure, at) in sorted(steps.items()):
        row = rows.setdefault(step // width, [at, at, 0, 0.0, 0.0, figure, figure])
        row[1:] = (
            at, row[2] + 1, row[3] + figure, row[4] + figure * figure, min(row[5], figure), max(row[6], figure),
        )  # fmt: skip
    return {
        "metric": metric, "worker": worker, "width": width, "last": max(steps),
        "rows": [
            {
                "number": number, "at": at, "until": until,
                "sums": {"count": count, "total": total, "squares": squares, "low": low, "high": high},
            }
            for number, (at, until, count, total, squares, low, high) in rows.items()
        ],
    }  # fmt: skip


def _lines(path: str, cut: Callable[[], None]) -> Iterator[bytes]:
    """Whole lines; `cut` is called if they are not all of them."""
    try:
        with os.fdopen(files.open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= SLICES * SLICE_BYTES:
                yield from file
                return
            cut()
            for number in range(SLICES):
                file.seek((size - SLICE_BYTES) * number // (SLICES - 1))
                yield from file.read(SLICE_BYTES).split(b"\n")[1 if number else 0 : -1]
    except OSError:
        return
