"""Who else writes a run's log: processes outside its tree that hold the file open for writing, and other live runs.

Two start scripts with one hard-coded log make one file of two runs' lines, and nobody can tell whose a line is. What
cannot be seen: a process of another user, when specctl is not root, and a writer outside specctl that opens the file
for each line anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from orchestrator.agent import proc, records
from orchestrator.agent.foreign import flags_of
from orchestrator.model import ForeignLog, Process, WorkPaths


def others(
    logs: Iterable[ForeignLog], *, workdir: str, run_id: str, nonce: str, tree: Iterable[Process] = ()
) -> dict[str, str]:
    """path -> who else writes it, for those of `logs` (all of one run) that somebody else writes too. `tree`: processes
    of the run, as far as they are known already: what they hold open need not be asked."""
    wanted = {log.path: log for log in logs}
    if not wanted:
        return {}
    found = _other_runs(wanted, workdir, run_id)
    holders = _writers(wanted, {process.pid: process.start_ticks for process in tree})
    if not holders:
        return found
    # Again and again: a process that is just being born is for a moment nobody's.
    roots = proc.roots_of(records.supervisor(WorkPaths(workdir=workdir).run(run_id)))
    for _ in range(2):
        own = {process.pid for process in proc.tree(nonce, roots)}
        holders = [
            (path, process)
            for path, process in holders
            if process.pid not in own and proc.same(process.pid, process.start_ticks) is not None
        ]
    for path, process in holders:
        if _writes(process.pid, path):
            found.setdefault(path, f"pid {process.pid} ({process.name})")
    return found


def _writers(wanted: Iterable[str], known: Mapping[int, int]) -> list[tuple[str, Process]]:
    """Every process of this machine that holds one of these paths open for writing, in one walk, but for
    those that are known (pid -> start time)."""
    paths = set(wanted)
    result = []
    for pid in proc.pids():
        if pid in known and proc.same(pid, known[pid]) is not None:
            continue
        for path in {path for _, path in proc.open_paths(pid)} & paths:
            process = proc.stat(pid)
            if process is not None and process[0].alive and _writes(pid, path):
                result.append((path, process[0]))
    return result


def _writes(pid: int, path: str) -> bool:
    flags = [flags_of(pid, fd) for fd, name in proc.open_paths(pid) if name == path]
    return any(one is not None and one & os.O_ACCMODE != os.O_RDONLY for one in flags)


def _other_runs(wanted: dict[str, ForeignLog], workdir: str, run_id: str) -> dict[str, str]:
    """Live runs of this workdir that follow one of these files as their own log."""
    places, result = WorkPaths(workdir=workdir), {}
    try:
        names = os.listdir(places.runs)
    except OSError:
        return {}
    for name in names:
        paths = places.run(name)
        if name == run_id or os.path.exists(paths.exit):
            continue
        record = records.supervisor(paths)
        if record is None or proc.same(record.pid, record.start_ticks) is None:
            continue
        for one in records.followed(paths, record.nonce):
            mine = wanted.get(one.foreign.path) if one.foreign else None
            if one.foreign and mine and (mine.device, mine.inode) == (one.foreign.device, one.foreign.inode):
                result[mine.path] = f"run {name}"
    return result
