"""`events`: what is written down of a run from a byte of events.jsonl on, as it comes, until the run has ended.

Each record goes out with its place, which names it for good: the file only ever grows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from orchestrator.agent import files
from orchestrator.agent.logfiles import identified
from orchestrator.agent.main import Call
from orchestrator.agent.probe import probe
from orchestrator.model import to_json

BEAT_S = 2.0
POLL_S = 0.5
PROBE_S = 5.0
"""How often somebody looks whether the run has ended without a word."""
TEXT_CHARS, NAME_CHARS = 20_000, 200
LATEST, LARGEST = 1e11, 1e100
"""Times and numbers that a program may write, and no record holds; nan and infinity are none either."""
HEAD = frozenset({"time", "event", "source", "attempt", "nonce"})


def run(call: Call) -> None:
    """Request: `run_id`, `start` (the byte to begin at), `follow`. The last frame has the probe, after which nothing
    of the run will be written any more, unless `follow` was false."""
    seen = identified(call)
    path = call.paths.run(seen.run_id).events
    offset, follow = int(call.request.get("start") or 0), bool(call.request.get("follow"))
    probed_at = spoke_at = time.monotonic()
    over = _is_over(seen) or not follow
    while True:
        for record in _records(path, offset, seen.nonce):
            call.emit(record)
            offset, spoke_at = record["next"], time.monotonic()
        if over:
            break
        time.sleep(POLL_S)
        if time.monotonic() - probed_at >= PROBE_S:
            probed_at = time.monotonic()
            seen = identified(call)
            over = _is_over(seen)  # what it wrote before that is read once more
        if time.monotonic() - spoke_at >= BEAT_S:
            call.emit({})
            spoke_at = time.monotonic()
    last = probe(call, [seen.run_id], time.time())
    call.emit({"final": True, "probe": to_json(last[0] if last else seen), "next": offset})


def _is_over(seen: Any) -> bool:
    return seen.exit is not None or (not seen.supervisor_alive and not any(one.alive for one in seen.tree))


def _records(path: str, start: int, nonce: str) -> Iterator[dict[str, Any]]:
    """Every whole line of this attempt from byte `start` on, with its `place` and where the `next` one begins."""
    try:
        file = os.fdopen(files.open_regular(path), "rb")
    except OSError:
        return
    with file:
        file.seek(start)
        at = start
        while (line := file.readline()).endswith(b"\n"):
            begin, at = at, at + len(line)
            if (record := read(line, nonce, chars=TEXT_CHARS)) is not None:
                yield {"place": begin, "next": at, **record}


def read(
    line: bytes, nonce: str, *, chars: int, without: frozenset[str] = frozenset(), unsigned: bool = False
) -> dict[str, Any] | None:
    """What a line of events.jsonl says, if it is a record of this attempt: `at`, `event` and its other `fields`, each
    cut at `chars`. A program may write there, too; `unsigned`: a line without a nonce counts as well."""
    try:
        value = json.loads(line, parse_constant=str)
    except (ValueError, RecursionError):
        return None  # a line that is being written, or was cut
    if not isinstance(value, dict) or value.get("nonce", nonce if unsigned else None) != nonce:
        return None
    when, name = value.get("time"), value.get("event")
    if not isinstance(when, (int, float)) or not 0 <= when < LATEST or not isinstance(name, str):
        return None
    fields = {key: _cut(item, chars) for key, item in value.items() if key not in HEAD | without}
    return {"at": float(when), "event": name[:NAME_CHARS], "fields": fields}


def _cut(value: Any, chars: int) -> Any:
    if value is None or (isinstance(value, (int, float, bool)) and abs(value) < LARGEST):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
    return text if len(text) <= chars else text[:chars] + "..."
