"""`prune`: what of a workdir nobody needs, with its size and why (`unneeded.py`); removed only when asked for by name.

What goes is first renamed, while no launch can find it (`lease.py`) and after everything has been looked at anew; the
removal itself can then take its time, or be broken off: the next prune finds what was renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time

from orchestrator.agent import disk, lease, proc
from orchestrator.agent.main import Call
from orchestrator.agent.receive import News
from orchestrator.agent.tree import encoded
from orchestrator.agent.unneeded import Asked, Item, look
from orchestrator.agent.uses import GONE
from orchestrator.model import WorkPaths


def run(call: Call) -> None:
    ended = call.request.get("ended")
    asked = Asked(
        ended=None if ended is None else set(map(str, ended)), older_than_s=float(call.request["older_than_s"]),
        keep_checkpoints=bool(call.request.get("keep_checkpoints")),
    )  # fmt: skip
    news = News(call.emit)
    wanted = call.request.get("remove")
    found = look(call.paths, asked, time.time())
    if not os.path.isdir(call.paths.workdir):  # and a run of it lives, else nobody comes so far
        boot, why = proc.boot_identity(), f"the workdir {call.paths.workdir} is gone while a run of it lives"
        call.emit({
            "final": True, "now": time.time(), "kept": [], "notes": [why], "machine": boot, "place": boot, "items": [],
            "gone": [], "failed": [],
        })  # fmt: skip
        return
    if wanted is None:
        seen: set[tuple[int, int]] = set()
        for item in found.items:
            item.bytes = sum(disk.occupied(path, seen, news.compared) for path in item.paths)
        status = os.stat(call.paths.workdir)
        call.emit({
            "final": True, "now": time.time(), "kept": found.kept, "notes": found.notes,
            "machine": proc.boot_identity(), "place": f"{proc.boot_identity()} {status.st_dev} {status.st_ino}",
            "items": [
                {"key": one.key, "kind": one.kind, "name": one.name, "path": one.paths[0], "bytes": one.bytes,
                 "age_s": max(0.0, time.time() - one.at), "why": one.why}
                for one in found.items
            ],
        })  # fmt: skip
        return
    gone, failed = remove(call.paths, asked, set(map(str, wanted)), news)
    call.emit({"final": True, "gone": gone, "failed": failed})


def remove(
    paths: WorkPaths, asked: Asked, wanted: set[str], news: News
) -> tuple[list[str], list[dict[str, str]]]:  # fmt: skip
    """(keys of what is gone, what is not and why) of what was `wanted`, and may go still.

    Runs go first, and then everything is looked at anew: what a run uses that could not go stays with it.
    """
    taken: list[tuple[Item, list[str]]] = []
    failed: dict[str, str] = {}
    with lease.pruning(paths):
        for only_runs in (True, False):
            chosen = {key for key in wanted if key.startswith("run/") == only_runs}
            may = asked if only_runs else dataclasses.replace(asked, ended=None)
            still = {item.key: item for item in look(paths, may, time.time()).items if item.key in chosen}
            failed.update(dict.fromkeys(chosen - set(still), "it is in use by now, or has gone already"))
            for item in still.values():
                try:
                    taken.append((item, _take(item)))
                except OSError as error:
                    failed[item.key] = error.strerror or str(error)
    gone = []
    for item, places in taken:
        problems = [disk.delete(place, news.compared) for place in places]
        why = next(filter(None, problems), None)
        if why is None:
            gone.append(item.key)
        else:
            failed[item.key] = why
    return gone, [{"key": key, "why": why} for key, why in sorted(failed.items())]


def _take(item: Item) -> list[str]:
    """Renames it while nobody can begin to use it; the paths that are then to be removed. Raises `OSError`."""
    lock = None
    try:
        if item.hold is not None and os.path.exists(item.hold):
            lock = os.open(item.hold, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if item.kind == "upload":
            # While its record is locked; whoever waits for that finds the record gone, and makes a new one.
            for path in [*item.paths[1:], item.paths[0]]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(encoded(path))
            return []
        if item.kind in ("left over", "bytecode"):
            return item.paths
        places = []
        for path in item.paths:
            aside = f"{path}.{os.getpid()}{GONE}"
            try:
                os.rename(path, aside)
                places.append(aside)
            except FileNotFoundError:
                if path == item.paths[0]:
                    raise
        return places
    finally:
        if lock is not None:
            os.close(lock)
