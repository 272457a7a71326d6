"""`send`: files of this machine, for the laptop. The far end of a pull.

`ask: list` answers what there is; else the laptop says on stdin what it wants and what it has of it, and the files come
as frames. A run may live on meanwhile: a log is sent as long as it was when it was listed.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from orchestrator import frames
from orchestrator.agent import files
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.parcel import Claim, Outgoing
from orchestrator.agent.receive import News
from orchestrator.agent.tree import MARKER, Entry, Tree, decoded, encoded, entry, shown, walk
from orchestrator.model import RunPaths, is_run_id

LISTED = 1000
"""Entries in one frame."""
STEP = re.compile(r"step-([0-9]+)")
EXPORT = "export"
"""Where in a run's directory a trainer puts it, if it is told nothing else."""


def run(call: Call) -> None:
    run_id = str(call.request["run_id"])
    if not is_run_id(run_id):
        raise Refusal("bug", f"{run_id!r} is not a run id")
    paths = call.paths.run(run_id)
    if call.request.get("ask") == "list":
        path = call.request.get("path")
        if call.request.get("export"):
            _list(call, *_exported(paths))
        else:
            _list(call, *(_chosen(paths) if path is None else _asked_for(paths, str(path))))
    else:
        _send(call)


def _chosen(paths: RunPaths) -> tuple[bytes, Tree, dict[str, Any]]:
    """What is worth having of a run: its newest whole checkpoint, and all that says what it was and did."""
    root = encoded(paths.root)
    try:
        names = sorted(decoded(name) for name in os.listdir(root))
    except FileNotFoundError:
        raise Refusal("notfound", f"{paths.root} is not there", "specctl status lists the runs there are") from None
    small = {os.path.basename(path) for path in (paths.record, paths.config, paths.metrics, paths.events, paths.exit)}
    logs = re.compile(rf"{re.escape(paths.run_id)}\.a[0-9]+\.log")
    only = [name for name in names if name in small or logs.fullmatch(name)]
    whole, broken = checkpoints(paths)
    if whole:
        only.append(f"checkpoints/step-{whole[-1]}")
    facts = {"checkpoint": whole[-1] if whole else None, "checkpoints": len(whole), "broken": broken}
    return root, walk(root, only=only), facts


def _exported(paths: RunPaths) -> tuple[bytes, Tree, dict[str, Any]]:
    """What a trainer's `export` has made of the run, and what the contract in there says it is."""
    root, folder = encoded(paths.root), f"{paths.root}/{EXPORT}"
    contract = files.read_json(f"{folder}/contract.json", limit_bytes=1 << 20)
    whole, broken = checkpoints(paths)
    if contract is None:
        missing = "is not whole: its contract.json cannot be read" if os.path.isdir(folder) else "is not there"
        hint = f"python -m trainer export {paths.root}, where the run is, makes one"
        raise Refusal("notfound", f"{folder} {missing}", hint if whole else f"{hint}, once there is a checkpoint")
    facts = {"export": contract, "checkpoint": None, "checkpoints": len(whole), "broken": broken,
             "newest": whole[-1] if whole else None}  # fmt: skip
    return root, walk(root, only=[EXPORT]), facts


def checkpoints(paths: RunPaths) -> tuple[list[int], list[int]]:
    """Steps of the checkpoints that are whole, and of those that are not, rising; by marker and sizes, not by hash."""
    whole: list[int] = []
    broken: list[int] = []
    folder = f"{paths.root}/checkpoints"
    try:
        names = os.listdir(folder)
    except OSError:
        return [], []
    for name in names:
        if match := STEP.fullmatch(name):
            (whole if _is_whole(f"{folder}/{name}") else broken).append(int(match[1]))
    return sorted(whole), sorted(broken)


def _is_whole(folder: str) -> bool:
    marker = files.read_json(f"{folder}/{MARKER}", limit_bytes=1 << 20) or {}
    listed = marker.get("files")
    if not isinstance(listed, dict):
        return False
    try:
        return all(os.path.getsize(f"{folder}/{name}") == facts["bytes"] for name, facts in listed.items())
    except (OSError, TypeError, KeyError):
        return False


def _asked_for(paths: RunPaths, path: str) -> tuple[bytes, Tree, dict[str, Any]]:
    """The file or folder of that name: in the run directory, else in its code, where the program ran."""
    wanted = encoded(path)
    if path.startswith("~/"):
        wanted = os.fsencode(os.path.expanduser("~")) + wanted[1:]
    places = [os.path.normpath(os.path.join(encoded(base), wanted)) for base in (paths.root, paths.code)]
    found = next((place for place in places if os.path.lexists(place)), None)
    if found is None:
        raise Refusal("notfound", f"{shown(path)} is neither in the run's directory nor in its code/", _near(paths))
    try:
        return found, walk(found), {}
    except FileNotFoundError:
        raise Refusal("notfound", f"{shown(decoded(found))} is a link to what is not there") from None


def _near(paths: RunPaths) -> str | None:
    try:
        names = sorted(name for name in os.listdir(paths.root) if not name.startswith("."))
    except OSError:
        return None
    return f"the run's directory has {', '.join(map(shown, names[:20]))}" + (", ..." if len(names) > 20 else "")


def _list(call: Call, root: bytes, tree: Tree, facts: dict[str, Any]) -> None:
    for start in range(0, len(tree.entries), LISTED):
        call.emit({"entries": [one.wire() for one in tree.entries[start : start + LISTED]]})
    call.emit({
        "final": True, "root": decoded(root), "left_out": tree.left_out, "unreadable": tree.unreadable, **facts,
    })  # fmt: skip


def _send(call: Call) -> None:
    parcel = str(call.request["parcel"])
    entries: list[Entry] = []
    claims: dict[int, Claim] = {}
    while True:
        frame = frames.read(parcel, call.payload)
        if frame is None:
            raise Refusal("link", "the list of what is wanted has ended too early")
        entries += map(entry, frame["entries"])
        for index, have, sha256, part in frame["claims"]:
            claims[index] = Claim(have=have, sha256=sha256, part=part)
        if not frame["more"]:
            break
    news = News(call.emit)
    outgoing = Outgoing(encoded(str(call.request["root"])), entries, claims, tick=news.compared, living=True)
    for events, raw in outgoing.frames():
        sys.stdout.buffer.write(frames.encode(str(call.request["token"]), {"events": events}, raw))
        sys.stdout.buffer.flush()
    call.emit({"final": True, "sent": outgoing.sent})
