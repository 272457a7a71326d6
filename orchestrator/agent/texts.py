"""`texts`: files of a run's code, as text, for whoever wants to see in what two runs differ."""

from __future__ import annotations

import os

from orchestrator.agent import files, records
from orchestrator.agent.main import Call, Refusal
from orchestrator.model import is_run_id

FILE_BYTES, ALL_BYTES = 1 << 20, 8 << 20


def run(call: Call) -> None:
    """Request: `run_id`, `paths` as a bundle has them. Each gets its text, or why there is none."""
    run_id = str(call.request["run_id"])
    paths = call.paths.run(run_id)
    known = records.spec(paths) if is_run_id(run_id) else None
    if known is None:
        raise Refusal("notfound", f"no run {run_id} that can be read in {call.paths.runs}", "specctl ls lists the runs")
    home = call.paths.bundle(known[0].bundle)
    left, found = ALL_BYTES, {}
    for path in map(str, call.request["paths"]):
        text, why = _text(home, path, min(left, FILE_BYTES))
        left -= len(text or "")
        found[path] = {"text": text, "why": why}
    call.emit({"final": True, "texts": found})


def _text(home: str, path: str, limit: int) -> tuple[str | None, str | None]:
    place = os.path.join(home, path)
    folder = os.path.dirname(place)
    if os.path.realpath(folder) != os.path.join(os.path.realpath(home), os.path.dirname(path)).rstrip("/"):
        return None, "it is no file of the bundle"
    try:
        if os.path.islink(place):
            return f"-> {os.readlink(place)}\n", None
        with os.fdopen(files.open_regular(place), "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        return None, error.strerror or "it cannot be read"
    if len(data) > limit:
        return None, f"it is too long to be shown ({os.stat(place).st_size:,} bytes)"
    try:
        if b"\0" in data:
            raise ValueError
        return data.decode("utf-8"), None
    except ValueError:
        return None, f"it is no text ({len(data):,} bytes)"
