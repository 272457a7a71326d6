"""`texts`: files of a run's code, as text, for whoever wants to see in what two runs differ."""

from __future__ import annotations

import os

from orchestrator.agent import files
from orchestrator.agent.history import asked_for
from orchestrator.agent.main import Call
from orchestrator.manifest import text_of

FILE_BYTES, ALL_BYTES = 1 << 20, 8 << 20


def run(call: Call) -> None:
    """Request: `run_id`, `paths` as a bundle has them. Each gets its text, or why there is none."""
    spec, _ = asked_for(call)
    home = call.paths.bundle(spec.bundle)
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
    return text_of(data)
