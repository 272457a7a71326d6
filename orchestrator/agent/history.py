"""`history`: what a run was made of and how it trained, as far as another one can be compared with it.

Two things are told: the files of its code, each by its hash, and its curve. `texts` then gives the files that differ.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from typing import Any

from orchestrator.agent import files, prepare, probe, put, records, show
from orchestrator.agent.main import Call, Refusal
from orchestrator.model import RunSpec, WorkPaths, is_run_id, to_json

ROWS = 512
"""Points of a curve at most."""
SLICES, SLICE_BYTES = 64, 1 << 20
"""Of a metrics.jsonl that is longer than all of them together so many slices are read, evenly spread."""


def run(call: Call) -> None:
    """Request: `run_id`."""
    run_id = str(call.request["run_id"])
    found = probe.probe(call, [run_id], time.time()) if is_run_id(run_id) else []
    known = records.spec(call.paths.run(run_id)) if found else None
    if known is None:
        raise Refusal("notfound", f"no run {run_id} that can be read in {call.paths.runs}", "specctl ls lists the runs")
    (spec, record), paths = known, call.paths.run(run_id)
    bundle = call.paths.bundle(spec.bundle)
    there = os.path.exists(os.path.join(bundle, put.COMPLETE))
    curve, whole = _curve(paths.metrics, found[0].nonce)
    call.emit({
        "final": True, "spec": show.described(spec, diff=False), "host": os.uname().nodename,
        "env": {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in spec.env.items()},
        "versions": {str(key): str(value) for key, value in (record.get("versions") or {}).items()},
        "packages": _packages(call.paths, spec), "curve": curve, "curve_is_whole": whole,
        "files": [to_json(one) for one in put.scan(bundle)] if there else None,
    })  # fmt: skip


def _packages(workdir: WorkPaths, spec: RunSpec) -> dict[str, str] | None:
    """Name -> version of what is installed in the environment that was made for it; None where none was."""
    home = None if spec.env_hash is None else workdir.env(spec.env_hash)
    if home is None or not os.path.exists(os.path.join(home, prepare.COMPLETE)):
        return None
    found = {}
    for path in glob.glob(f"{glob.escape(home)}/lib/python*/site-packages/*.dist-info"):
        name, _, version = os.path.basename(path).removesuffix(".dist-info").rpartition("-")
        found[name.lower().replace("_", "-")] = version
    return found


# --- the curve ------------------------------------------------------------------------------------------------------


def _curve(path: str, nonce: str) -> tuple[dict[str, Any], bool]:
    """Rows of [number, steps, loss: n, sum, sum of squares, tok/s: the same], and whether every line was read.

    Row `number` is of the steps from `number * width` on; `width` is a power of two, so that a wider curve's rows are
    several of a narrower one's. A step that is written again, after a resume say, counts with its last figures.
    """
    steps: dict[int, tuple[float | None, float | None]] = {}
    workers: dict[str, dict[int, tuple[float | None, float | None]]] = {}
    lines, whole = _lines(path)
    for line in lines:
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or row.get("nonce") != nonce or type(row.get("step")) is not int:
            continue
        worker, figures = row.get("worker"), (_number(row.get("loss")), _number(row.get("tok_s")))
        if worker is None:
            steps[row["step"]] = figures
        elif isinstance(worker, str) and figures[0] is not None:
            workers.setdefault(worker, {})[row["step"]] = figures
    if not steps:
        steps = _together(workers)
    width = 1
    while len({step // width for step in steps}) > ROWS:
        width *= 2
    rows: dict[int, list[float]] = {}
    for step, (loss, tok_s) in steps.items():
        row = rows.setdefault(step // width, [0, 0, 0.0, 0.0, 0, 0.0, 0.0])
        row[0] += 1
        for at, figure in ((1, loss), (4, tok_s)):
            if figure is not None:
                row[at : at + 3] = [row[at] + 1, row[at + 1] + figure, row[at + 2] + figure * figure]
    named = [{"number": number, "steps": int(row[0]), "loss": _sums(row[1:4]), "tok_s": _sums(row[4:7])}
             for number, row in sorted(rows.items())]  # fmt: skip
    return {"width": width, "last": max(steps, default=None), "rows": named}, whole


def _together(
    workers: dict[str, dict[int, tuple[float | None, float | None]]],
) -> dict[int, tuple[float | None, float | None]]:
    """The run's steps, of a program that speaks of its workers only: their mean loss, and all their tok/s."""
    steps = {}
    for step in {step for one in workers.values() for step in one}:
        figures = [one[step] for one in workers.values() if step in one]
        losses = [loss for loss, _ in figures if loss is not None]
        rates = [tok_s for _, tok_s in figures if tok_s is not None]
        steps[step] = sum(losses) / len(losses) if losses else None, sum(rates) if rates else None
    return steps


def _sums(values: list[float]) -> dict[str, Any]:
    return {"count": int(values[0]), "total": values[1], "squares": values[2]}


def _number(value: Any) -> float | None:
    """A figure that can be counted with, or None."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e100 else None


def _lines(path: str) -> tuple[list[bytes], bool]:
    try:
        with os.fdopen(files.open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= SLICES * SLICE_BYTES:
                return file.read().split(b"\n"), True
            found: list[bytes] = []
            for number in range(SLICES):
                file.seek((size - SLICE_BYTES) * number // (SLICES - 1))
                found += file.read(SLICE_BYTES).split(b"\n")[1 if number else 0 : -1]
            return found, False
    except OSError:
        return [], True
