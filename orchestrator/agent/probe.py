"""`probe`: one look at the runs of a workdir. Reads files and /proc, never tmux, and judges nothing."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.agent import gpu, ownlog, proc, records, space
from orchestrator.agent.clock import Clock, moved
from orchestrator.agent.main import Call
from orchestrator.agent.merge import merge
from orchestrator.model import (
    Disk,
    FollowedLog,
    LogFile,
    LogSummary,
    Probe,
    Process,
    RunPaths,
    RunSpec,
    is_run_id,
    to_json,
)

YOUNG_S = 60.0
"""A run that began no longer ago may have begun while it was looked at."""


def run(call: Call) -> None:
    """Request: `runs` (ids; absent: all), `ended_within_s` (absent: all), `gpus` (whether to ask nvidia-smi); with
    `every_s` it looks again and again, until nobody listens or `for_s` are over."""
    over = time.monotonic() + float(call.request.get("for_s") or 0.0)
    while time.monotonic() < over:
        call.emit(_seen(call))
        time.sleep(float(call.request["every_s"]))
    call.emit({**_seen(call), "final": True})


def _seen(call: Call) -> dict[str, Any]:
    now = time.time()
    wanted, within_s = call.request.get("runs"), call.request.get("ended_within_s")
    if wanted is None:
        marked = proc.marked_runs(call.paths.runs)
        chosen, older = select(call, within_s, marked, now)
        found = probe(call, chosen, now, marked)
    else:
        found, older = probe(call, sorted(filter(is_run_id, wanted)), now), 0
    rows, why = gpu.rows() if call.request.get("gpus") else ([], None)
    return {
        "now": now, "workdir": call.paths.workdir, "older": older, "gpus": rows, "gpus_error": why,
        "runs": [to_json(one) for one in found],
    }  # fmt: skip


def select(call: Call, within_s: float | None, marked: Collection[str], now: float) -> tuple[list[str], int]:
    """(run ids to look at, how many are left out because nothing of them lives and their last sign is older)."""
    try:
        names = {name for name in os.listdir(call.paths.runs) if is_run_id(name)}
    except FileNotFoundError:
        names = set()
    chosen = sorted(names.union(marked))
    if within_s is not None:
        chosen = [name for name in chosen if name in marked or _is_recent(call.paths.run(name), now - within_s)]
    return chosen, len(names.union(marked)) - len(chosen)


def _is_recent(paths: RunPaths, since: float) -> bool:
    """Whether the run ended since then; without a record of the end, whether it has a supervisor or wrote anything."""
    try:
        return os.stat(paths.exit).st_mtime >= since
    except OSError:
        pass
    newest = 0.0
    try:
        with os.scandir(paths.root) as entries:
            newest = max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=newest)
    except OSError:
        return True  # what cannot be looked into is not old for that
    if newest >= since:
        return True
    roots = proc.roots_of(records.supervisor(paths))
    return roots.supervisor is not None or (roots.program is not None and proc.same(*roots.program) is not None)


def probe(call: Call, run_ids: list[str], now: float, marked: Mapping[str, str] | None = None) -> list[Probe]:
    """What is to be seen of these runs, in one walk over /proc. A run that cannot be read is one that says so.

    `marked`: what `proc.marked_runs` found, where it has been asked already.
    """
    specs = {}
    nonces: dict[str, str] = {}
    roots: dict[str, proc.Roots] = {}
    closed: dict[str, str] = {}
    for run_id in run_ids:
        paths = call.paths.run(run_id)
        if (why := records.closed(paths)) is not None:
            closed[run_id] = why
            continue
        spec, supervisor = records.spec(paths), records.supervisor(paths)
        if spec is not None:
            specs[run_id], nonces[run_id] = spec, spec[0].nonce
        else:
            if marked is None:
                marked = proc.marked_runs(call.paths.runs)
            nonce = marked.get(run_id) or (supervisor.nonce if supervisor else None)
            if nonce is None and not os.path.lexists(paths.record):
                continue  # a directory without a record: a start that has not begun, or never will
            nonces[run_id] = nonce or f"none of {run_id}"
        roots[nonces[run_id]] = proc.roots_of(supervisor)
    # Of ended runs too: what a run has left behind is to be seen.
    trees = proc.trees(roots) if roots else {}
    boot, oom_kills, disk = proc.boot_identity(), proc.oom_kills(), space.disk_of(call.paths.runs)
    found = [_blank(call.paths.run(one), f"closed {one}", [], why, now, closed=why) for one, why in closed.items()]
    for run_id, nonce in nonces.items():
        paths, tree = call.paths.run(run_id), trees.get(nonce, [])
        elsewhere = records.elsewhere(specs[run_id][1]) if run_id in specs else None
        if elsewhere and marked is not None and records.exit_record(paths) is None:
            continue  # a look at this whole place shows its own runs
        if run_id not in specs:
            found.append(without_record(paths, nonce, tree, now))
            continue
        try:
            found.append(_one(
                paths, *specs[run_id], tree=tree, boot=boot, oom_kills=oom_kills, now=now, elsewhere=elsewhere,
                disk=disk,
            ))  # fmt: skip
        except Exception as error:  # whatever stands in one run's directory must not cost the other runs their rows
            why = f"its directory cannot be read ({type(error).__name__}: {error})"
            found.append(_damaged(paths, nonce, tree, why, now))
    return found


def without_record(paths: RunPaths, nonce: str, tree: list[Process], now: float) -> Probe:
    """A run whose run.json is damaged or gone."""
    why = "its record run.json is gone"
    if os.path.lexists(paths.record):
        why = "its record run.json cannot be read"
    elif not os.path.isdir(workdir := os.path.dirname(os.path.dirname(paths.root))):
        why = f"the workdir {workdir} is gone"
    elif not os.path.isdir(paths.root):
        why = f"its directory {paths.root} is gone"
    return _damaged(paths, nonce, tree, why, now)


def _damaged(paths: RunPaths, nonce: str, tree: list[Process], why: str, now: float) -> Probe:
    """All that is to be seen of a run whose directory does not say what it is."""
    return _blank(paths, nonce, tree, why, now, damaged=why)


def _blank(
    paths: RunPaths, nonce: str, tree: list[Process], why: str, now: float, *, closed: str | None = None,
    damaged: str | None = None,
) -> Probe:  # fmt: skip
    """A probe of a run of which no record can be read."""
    try:
        created_at = os.stat(paths.root).st_mtime
    except OSError:
        created_at = now
    log = LogFile(path=paths.log(1), size=0, modified_at=0.0, verified=False, why=why)
    return Probe(
        run_id=paths.run_id, attempt=1, nonce=nonce, observed_at=now, created_at=created_at, target="", owner="",
        note="", argv=[], exit=None, stop=None, same_boot=None, supervisor_alive=False, program=None,
        program_seen=False, tree=tree, log=log, summary=LogSummary(), closed=closed, damaged=damaged,
    )  # fmt: skip


def _one(
    paths: RunPaths, spec: RunSpec, record: dict[str, Any], *, tree: list[Process], boot: str, oom_kills: int,
    now: float, elsewhere: str | None, disk: Disk | None,
) -> Probe:  # fmt: skip
    # The records are read after the walk over /proc: a run that ends in between has ended, and is not lost. But then
    # the walk is too old: a program that is on record as ended would be a process that it has left behind.
    supervisor, ended = records.supervisor(paths), records.exit_record(paths)
    set_by_s = Clock.of(record, boot).set_by_s
    if ended is not None:
        set_by_s = set_by_s if record["boot"] == boot else ended.clock_set_by_s
        ended = dataclasses.replace(ended, at=ended.at + set_by_s - ended.clock_set_by_s)
    attempt = supervisor.attempt if supervisor else 1
    if ended is not None or (supervisor and supervisor.program_exit):
        tree = [one for one in tree if proc.same(one.pid, one.start_ticks)]
    same_boot = supervisor.boot == boot if supervisor else None
    watcher = proc.same(supervisor.pid, supervisor.start_ticks) if supervisor and same_boot else None
    supervisor_alive, stopped = watcher is not None, watcher is not None and watcher.stopped
    program = None
    if supervisor and supervisor.program_pid is not None:
        if not tree and ended is None and same_boot and now - set_by_s - supervisor.started_at < YOUNG_S:
            # It may have been begun after the walk, and put on record before the record was read: nothing is not left.
            tree = proc.tree(spec.nonce, proc.roots_of(supervisor))
        pid, ticks = supervisor.program_pid, supervisor.program_start_ticks
        program = next((one for one in tree if one.pid == pid and one.start_ticks == ticks), None)
    # Before the log is looked at: what has been read of it is never more than is there.
    logs = records.followed(paths, spec.nonce)
    log = ownlog.log_file(paths, attempt, supervisor, same_boot=same_boot is not False)
    cut = [one for one in logs if log.verified and one.foreign is None and not 0 <= one.summary.offset <= log.size]
    logs = [FollowedLog(summary=LogSummary()) if one in cut else one for one in logs]  # the others are what they were
    damaged = bool(cut or not logs) and os.path.lexists(paths.scan)
    if supervisor and not elsewhere and (damaged or (ended is None and (stopped or not supervisor_alive))):
        from orchestrator.agent.catchup import catch_up  # it brings the whole of logscan along

        logs = catch_up(
            paths, supervisor, logs, own=log.path if log.verified else None, patterns=spec.patterns, tree=tree,
            now=now - set_by_s,
        )  # fmt: skip
    logs = looked_at(paths, spec.nonce, logs, alive=supervisor_alive and bool(tree))
    if set_by_s:  # what was noted by the run's clock is said by that of now
        logs = [moved(one, set_by_s) for one in logs]
        grew_at = next((one.grew_at for one in logs if one.foreign is None), None)
        log = dataclasses.replace(log, modified_at=min(now, log.modified_at if grew_at is None else grew_at))
    unreadable = [
        os.path.basename(path)
        for path, value in ((paths.supervisor, supervisor), (paths.exit, ended or records.exit_record(paths)))
        if value is None and os.path.lexists(path)
    ]
    claim, in_line, lost = records.gpu_claim(paths, spec.nonce), None, list[str]()
    if claim is not None and watcher is not None and supervisor and ended is None:
        from orchestrator.agent import claimed  # which a look at a run without a GPU need not pay for

        if claim.waiting and supervisor.program_pid is None:
            in_line = claimed.stand(claim, spec.run_id)
        lost = claimed.lost(claim, spec.run_id)
    beat = records.heartbeat(paths, spec.nonce, same_boot=same_boot is True)
    program_exit = supervisor.program_exit if supervisor else None
    if program_exit is not None:
        program_exit = dataclasses.replace(program_exit, at=program_exit.at + set_by_s)
    return Probe(
        run_id=spec.run_id, attempt=attempt, nonce=spec.nonce, observed_at=now,
        created_at=record["created_at"] + set_by_s, target=spec.target, owner=spec.owner, note=spec.note,
        argv=record["argv"], exit=ended,
        stop=records.stop_under_way(paths, now) if ended is None else None,
        same_boot=same_boot, supervisor_alive=supervisor_alive,
        supervisor_stopped=watcher.pid if watcher and stopped else None,
        program=program, program_seen=bool(supervisor and supervisor.program_pid is not None), tree=tree, log=log,
        summary=merge(logs), foreign_logs=[one.foreign for one in logs if one.foreign is not None],
        heartbeat=beat, gpus_declared=records.gpu_numbers(spec, claim), in_line=in_line,
        gpus_lost=lost,
        gpu_claim=None if claim is None else dataclasses.replace(
            claim, asked_at=claim.asked_at + set_by_s,
            queued_at=None if claim.queued_at is None else claim.queued_at + set_by_s,
            granted_at=None if claim.granted_at is None else claim.granted_at + set_by_s,
        ),
        gpu_devices=proc.gpu_devices(tree), oom_kills=max(0, oom_kills - supervisor.oom_kills) if supervisor else 0,
        program_exit=program_exit, unreadable=unreadable, elsewhere=elsewhere, disk=disk,
        unread_bytes=sum(_unread(one, log) for one in logs), clock_set_by_s=set_by_s,
    )  # fmt: skip


def _unread(one: FollowedLog, own: LogFile) -> int:
    if one.foreign is None:
        size = own.size if own.verified else 0
    else:
        size = one.foreign.size if one.foreign.shared is None else 0
    return max(0, size - max(one.summary.offset, one.summary.scan.decided_offset))


def looked_at(paths: RunPaths, nonce: str, logs: list[FollowedLog], *, alive: bool) -> list[FollowedLog]:
    """`logs` with their files as they are now. One that somebody else writes too, which its supervisor has not seen
    yet, says nothing at all until the supervisor has said where the run's own part of it ends."""
    by = {}
    if alive and any(one.foreign is not None for one in logs):
        from orchestrator.agent.catchup import others_of

        by = others_of(paths, nonce, logs)
    result = []
    for one in logs:
        log = one.foreign
        if log is not None:
            try:
                found = os.stat(log.path)
                if (found.st_dev, found.st_ino) == (log.device, log.inode):
                    log = dataclasses.replace(log, size=found.st_size, modified_at=found.st_mtime)
            except OSError:
                pass
            one = dataclasses.replace(one, foreign=log)
            if log.path in by:
                log = dataclasses.replace(log, shared=by[log.path], until=log.base)
                one = FollowedLog(summary=LogSummary(offset=log.base), foreign=log)
        result.append(one)
    return result
