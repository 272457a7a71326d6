"""From one `top` to the next: what was seen last, so that a list is there at once, as old as it is."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator import index, whole
from orchestrator.fleet import Fleet, TargetView
from orchestrator.model import Misfit, Probe, from_json, to_json
from orchestrator.record import record
from orchestrator.verbs.top import Board

KEPT_S = 24 * 3600.0


def recall(board: Board) -> None:
    """Lets `board` begin with what the last `top` saw, as old as it is; nothing if that cannot be read."""
    views = []
    try:
        kept = from_json(list[_Kept], json.loads(_file(board.fleet).read_text()))
        for one in kept:
            target = board.fleet.inventory.targets.get(one.target)
            age_s = time.time() - one.seen_at
            if target is not None and target.place == one.place and 0 <= age_s <= KEPT_S:
                view = TargetView(
                    target=target, now=one.now, runs=one.runs, older=one.older, gpus=one.gpus, gpus_error=one.gpus_error
                )
                views.append((view, age_s))
    except (OSError, ValueError, Misfit):
        return
    board.remember(views)


def keep(board: Board) -> None:
    """Keeps what was seen for the next `recall`."""
    kept = [
        _Kept(
            target=one.target.name, place=one.target.place, seen_at=time.time() - one.age_s, now=one.view.now,
            runs=[run.probe for run in one.runs], older=one.view.older, gpus=one.view.gpus,
            gpus_error=one.view.gpus_error,
        )
        for one in board.sightings() if one.view is not None and one.age_s is not None
    ]  # fmt: skip
    path = _file(board.fleet)
    with suppress(OSError):  # only a convenience
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        whole.write_whole(path, json.dumps([to_json(one) for one in kept]).encode())


def _file(fleet: Fleet) -> Path:
    """Each inventory has its own: a target's name means another place in another one."""
    name = hashlib.sha256(str(fleet.inventory.source).encode()).hexdigest()[:16]
    return index.folder() / "top" / f"{name}.json"


@record
class _Kept:
    """What one target answered last, and when, by this machine's wall clock."""

    target: str
    place: str
    seen_at: float
    now: float | None
    runs: list[Probe]
    older: int
    gpus: list[dict[str, Any]]
    gpus_error: str | None
