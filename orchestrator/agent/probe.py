"""`probe`: one look at the runs of a workdir. Reads files and /proc, never tmux, and judges nothing."""

from __future__ import annotations

import os
import time
from typing import Any

from orchestrator.agent import proc, records, system
from orchestrator.agent.follow import Follower, merge
from orchestrator.agent.main import Call
from orchestrator.model import FollowedLog, Probe, RunPaths, is_run_id, to_json

CATCH_UP_BYTES = 64 << 20
"""How much unread log one probe reads when the supervisor, who should have, is gone."""


def run(call: Call) -> None:
    """Request: `runs` (ids; absent: all), `ended_within_s` (absent: all), `gpus` (whether to ask nvidia-smi)."""
    now = time.time()
    wanted = call.request.get("runs")
    chosen, older = select(call, wanted, call.request.get("ended_within_s"), now)
    rows, why = system.gpus() if call.request.get("gpus") else ([], None)
    call.emit({
        "final": True, "now": now, "workdir": call.paths.workdir, "older": older, "gpus": rows, "gpus_error": why,
        "runs": [to_json(found) for found in probe(call, chosen, now)],
    })  # fmt: skip


def select(call: Call, wanted: list[str] | None, ended_within_s: float | None, now: float) -> tuple[list[str], int]:
    """(run ids to look at, how many ended longer ago than asked for)."""
    try:
        names = sorted(name for name in os.listdir(call.paths.runs) if is_run_id(name))
    except FileNotFoundError:
        return [], 0
    if wanted is not None:
        return [name for name in names if name in wanted], 0
    if ended_within_s is None:
        return names, 0
    chosen = []
    for name in names:
        try:
            ended_at = os.stat(call.paths.run(name).exit).st_mtime
        except OSError:
            ended_at = now
        if ended_at >= now - ended_within_s:
            chosen.append(name)
    return chosen, len(names) - len(chosen)


def probe(call: Call, run_ids: list[str], now: float) -> list[Probe]:
    """What is to be seen of these runs, in one walk over /proc."""
    found = []
    roots: dict[str, proc.Roots] = {}
    for run_id in run_ids:
        paths = call.paths.run(run_id)
        spec = records.spec(paths)
        if spec is None:
            continue  # a directory without a record: a start that has not begun, or never will
        found.append((paths, spec))
        roots[spec[0].nonce] = proc.roots_of(records.supervisor(paths))
    # Of ended runs too: what a run has left behind is to be seen.
    trees = proc.trees(roots) if roots else {}
    boot, oom_kills = proc.boot_identity(), proc.oom_kills()
    return [_one(paths, *spec, trees=trees, boot=boot, oom_kills=oom_kills, now=now) for paths, spec in found]


def _one(
    paths: RunPaths, spec: Any, record: dict[str, Any], *, trees: dict[str, Any], boot: str, oom_kills: int, now: float
) -> Probe:
    # The exit record is read after the walk over /proc: a run that ends in between has ended, and is not lost.
    supervisor, ended = records.supervisor(paths), records.exit_record(paths)
    attempt = supervisor.attempt if supervisor else 1
    tree = trees.get(spec.nonce, [])
    if ended is not None:
        tree = [one for one in tree if proc.same(one.pid, one.start_ticks)]
    supervisor_alive = bool(supervisor and proc.same(supervisor.pid, supervisor.start_ticks))
    program = None
    if supervisor and supervisor.program_pid is not None and ended is None:
        pid, ticks = supervisor.program_pid, supervisor.program_start_ticks
        program = next((one for one in tree if one.pid == pid and one.start_ticks == ticks), None)
    same_boot = supervisor.boot == boot if supervisor else None
    log = records.log_file(paths, spec.run_id, attempt, supervisor, same_boot=same_boot is not False)
    logs = records.followed(paths, spec.nonce)
    if supervisor and ended is None and not supervisor_alive:
        logs = catch_up(paths, spec.nonce, attempt, logs, log.verified, spec.patterns, now)
    return Probe(
        run_id=spec.run_id, attempt=attempt, nonce=spec.nonce, observed_at=now,
        created_at=float(record.get("created_at", 0.0)), target=spec.target, owner=spec.owner, note=spec.note,
        argv=list(record.get("argv", spec.argv)), exit=ended,
        stop=records.stop_under_way(paths, now) if ended is None else None,
        same_boot=same_boot, supervisor_alive=supervisor_alive,
        program=program, program_seen=bool(supervisor and supervisor.program_pid is not None), tree=tree, log=log,
        summary=merge(logs), foreign_logs=[one.foreign for one in logs if one.foreign is not None],
        heartbeat=records.heartbeat(paths, spec.nonce), gpus_declared=spec.gpus,
        gpu_devices=proc.gpu_devices(tree), oom_kills=max(0, oom_kills - supervisor.oom_kills) if supervisor else 0,
        program_exit=supervisor.program_exit if supervisor else None,
    )  # fmt: skip


def catch_up(
    paths: RunPaths, nonce: str, attempt: int, logs: list[FollowedLog], own_verified: bool,
    patterns: dict[str, str], now: float,
) -> list[FollowedLog]:  # fmt: skip
    """Reads on where a supervisor that is gone stopped reading, and keeps what was found for the next probe."""
    result = []
    for one in logs or [FollowedLog(summary=merge([]))]:
        path = one.foreign.path if one.foreign else paths.log(attempt)
        if one.foreign is None and not own_verified:
            result.append(one)
            continue
        try:
            follower = Follower(path, foreign=one.foreign, summary=one.summary, patterns=patterns)
        except OSError:
            result.append(one)
            continue
        follower.advance(now, budget_bytes=CATCH_UP_BYTES)
        result.append(follower.followed())
        follower.close()
    try:
        records.write_followed(paths, nonce, attempt, result)
    except OSError:
        pass  # a full or read-only disk: the next probe reads again
    return result
