"""What this user launched from this machine: it only speeds the look-up, the truth is on the targets."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from pathlib import Path

from orchestrator.record import record


@record
class Launch:
    run_id: str
    target: str
    at: float = 0.0
    """When, by this machine's clock."""
    refused: bool = False
    """It was refused, or its target did not answer, and nothing was started."""


def owner() -> str:
    """Who launches: recorded with each run, so that nobody stops a colleague's by a slip."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "specctl"


def _path() -> Path:
    return folder() / "launches.jsonl"


def add(launch: Launch) -> None:
    """Notes it; once more, when it is known to have been refused."""
    path = _path()
    line = {"run_id": launch.run_id, "target": launch.target, "at": time.time()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({**line, "refused": True} if launch.refused else line) + "\n")
    except OSError:
        pass  # only a convenience: a read-only home must not stop a launch


def launches() -> list[Launch]:
    """Oldest first; lines that cannot be read are passed over."""
    found: dict[str, Launch] = {}
    try:
        lines = _path().read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            item = json.loads(line)
            at = item.get("at")
            at = float(at) if isinstance(at, (int, float)) else 0.0
            run_id, refused = str(item["run_id"]), item.get("refused") is True
            at = found[run_id].at if refused and run_id in found else at
            found[run_id] = Launch(run_id=run_id, target=str(item["target"]), at=at, refused=refused)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return list(found.values())
