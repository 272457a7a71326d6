"""Reading a run directory: what was asked, who supervises, what was read of its logs, what was the end."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from dataclasses import field
from typing import Any, TypeVar

from orchestrator.agent import files, proc, system
from orchestrator.agent.clock import Clock, booted_at
from orchestrator.model import (
    ExitRecord,
    FollowedLog,
    GpuClaim,
    Heartbeat,
    Misfit,
    RunPaths,
    RunSpec,
    StopperRecord,
    StopRequest,
    SupervisorRecord,
    from_json,
    to_json,
)
from orchestrator.record import record

T = TypeVar("T")

STOP_BEGINS_S = 5.0
"""How long a stop may take to begin, and its effect to be seen."""
SCAN_BYTES, RECORD_BYTES = 16 << 20, 1 << 20
"""A record that is larger was not written by specctl."""
PHASE_CHARS = 80


@record
class _Frame:
    """What run.json says beside the spec."""

    created_at: float = 0.0
    argv: list[str] = field(default_factory=list)
    """As it is run: with the configuration's place filled in."""
    boot: str | None = None
    booted_at: float | None = None
    """The clock by which the run's times are noted, as long as this boot lasts."""


@record
class _Ticked:
    """What a heartbeat may say of the monotonic clock."""

    monotonic_s: float | None = None


@record
class _Scan:
    """scan.json, beside the nonce."""

    logs: list[FollowedLog]


def header(*, run_id: str, attempt: int, nonce: str, bundle: str, boot: str, started_at: float) -> bytes:
    """Line 1 of an attempt's log."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_at))
    return (
        f"# specctl run={run_id} attempt={attempt} nonce={nonce} bundle={bundle} boot={boot} started={started}\n"
    ).encode()


def closed(paths: RunPaths) -> str | None:
    """Why this user may not look into the run's directory; None when it may, or when there is none."""
    try:
        found = os.stat(paths.root)
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or os.access(paths.root, os.R_OK | os.X_OK):
        return None
    who, me = system.name_of(found.st_uid), system.name_of(os.geteuid())
    return f"it is a run of the user {who}, and {me} may not look into it"


def spec(paths: RunPaths) -> tuple[RunSpec, dict[str, Any]] | None:
    """What was asked, and the whole of run.json; None when there is no readable record of this run."""
    record = files.read_json(paths.record)
    if record is None:
        return None
    try:
        spec, frame = from_json(RunSpec, record.get("spec")), from_json(_Frame, record)
    except Misfit:
        return None
    if spec.run_id != paths.run_id:
        return None
    argv = frame.argv or spec.argv
    return spec, {
        **record, "argv": argv, "created_at": frame.created_at, "boot": frame.boot, "booted_at": frame.booted_at,
    }  # fmt: skip


def clock(paths: RunPaths) -> Clock:
    """The clock by which the run's times are noted."""
    found = spec(paths)
    return Clock.of(found[1], proc.boot_identity()) if found is not None else Clock(booted_at=booted_at())


def elsewhere(record: dict[str, Any]) -> str | None:
    """The host whose run it is, if that is not this one."""
    host = record.get("host")
    return str(host) if host is not None and host != os.uname().nodename else None


def supervisor(paths: RunPaths) -> SupervisorRecord | None:
    return _load(SupervisorRecord, paths.supervisor)


def exit_record(paths: RunPaths) -> ExitRecord | None:
    return _load(ExitRecord, paths.exit)


def stop_request(paths: RunPaths) -> StopRequest | None:
    return _load(StopRequest, paths.stop)


def stopper(paths: RunPaths) -> StopperRecord | None:
    return _load(StopperRecord, paths.stopper)


def gpu_claim(paths: RunPaths, nonce: str) -> GpuClaim | None:
    """Of this attempt, and only as a supervisor writes it: a program could write there, too."""
    claim = _load(GpuClaim, paths.gpus)
    if claim is None or claim.nonce != nonce or not claim.claims_dir.isprintable():
        return None
    devices = [*claim.pool, *claim.held]
    fit = all(one.card >= 0 and f"{one.number}{one.uuid}{one.name}".isprintable() for one in devices)
    return claim if fit and claim.pool else None


def gpu_numbers(spec: RunSpec, claim: GpuClaim | None) -> list[int]:
    """The GPUs that the run is to be seen to use, by nvidia-smi's numbers: those that it has claimed, once it has."""
    if claim is None or claim.granted_at is None or spec.wish is None:
        return spec.gpus
    return sorted({one.card for one in claim.held}) if spec.wish.wanted else []


def stop_under_way(paths: RunPaths, now: float) -> StopRequest | None:
    """The stop that somebody is carrying out, or has only just asked for, or whose KILL ends what is left once the
    kernel lets go of it; one whose stopper died is none."""
    request, worker = stop_request(paths), stopper(paths)
    if request is None:
        return None
    if worker is not None and worker.finished and worker.request_at >= request.at:
        return request
    working = worker is not None and proc.same(worker.pid, worker.start_ticks) is not None
    return request if working or abs(now - request.at) < STOP_BEGINS_S else None


def stopped(paths: RunPaths, ended_at: float) -> bool:
    """Whether an end at that time was the doing of a stop: after its first signal, and not long after its last word,
    unless that was that something had not ended of its KILL yet."""
    worker = stopper(paths)
    if worker is None or worker.signalled_at is None:
        return False
    return worker.signalled_at <= ended_at and (worker.finished or ended_at <= worker.alive_at + STOP_BEGINS_S)


def _load(cls: type[T], path: str) -> T | None:
    value = files.read_json(path, limit_bytes=RECORD_BYTES)
    try:
        return None if value is None else from_json(cls, value)
    except Misfit:
        return None


def heartbeat(paths: RunPaths, nonce: str, *, same_boot: bool = False) -> Heartbeat | None:
    """The trainer's heartbeat, if it is this attempt's and not one that was left lying.

    `same_boot`: the clock that nobody sets goes on since, and tells its age if it says what that one showed.
    """
    value = files.read_json(paths.heartbeat, limit_bytes=RECORD_BYTES)
    if value is None or value.get("nonce") != nonce:
        return None
    memory = value.get("gpu_memory_bytes") or {}
    try:
        beat = from_json(Heartbeat, {**value, "at": value.get("time"), "gpu_memory_bytes": memory})
        ticked = from_json(_Ticked, value) if same_boot else _Ticked()
    except Misfit:
        return None
    if ticked.monotonic_s is not None:
        beat = dataclasses.replace(beat, at=time.time() - max(0.0, time.monotonic() - ticked.monotonic_s))
    if beat.step is not None and beat.step < 0:
        return None
    phase = "".join(character if character.isprintable() else "?" for character in beat.phase[:PHASE_CHARS])
    return dataclasses.replace(beat, phase=phase)


def followed(paths: RunPaths, nonce: str) -> list[FollowedLog]:
    """What the supervisor last wrote of the logs it reads; the run's own log comes first."""
    value = files.read_json(paths.scan, limit_bytes=SCAN_BYTES)
    if value is None or value.get("nonce") != nonce:
        return []
    try:
        return from_json(_Scan, value).logs
    except Misfit:
        return []


def write_followed(paths: RunPaths, nonce: str, attempt: int, logs: list[FollowedLog]) -> None:
    value = {"nonce": nonce, "attempt": attempt, "logs": [to_json(log) for log in logs]}
    files.write_json(paths.scan, value, block_bytes=files.RESERVE_BYTES)
