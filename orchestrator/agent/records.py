"""Reading a run directory: whose log is this, who supervises, what was the end.

The identity of a log is decided here and nowhere else: line 1 carries this run's id and nonce, and the file is the one
(device, inode) that the supervisor opened.
"""

from __future__ import annotations

import os
import time
from typing import Any, TypeVar

from orchestrator.agent import files
from orchestrator.model import (
    ExitRecord,
    FollowedLog,
    Heartbeat,
    LogFile,
    RunPaths,
    RunSpec,
    StopRequest,
    SupervisorRecord,
    from_json,
    to_json,
)

T = TypeVar("T")


def header(*, run_id: str, attempt: int, nonce: str, bundle: str, boot: str, started_at: float) -> bytes:
    """Line 1 of an attempt's log."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_at))
    return (
        f"# specctl run={run_id} attempt={attempt} nonce={nonce} bundle={bundle} boot={boot} started={started}\n"
    ).encode()


def spec(paths: RunPaths) -> tuple[RunSpec, dict[str, Any]] | None:
    """What was asked, and the whole of run.json; None when there is no readable record."""
    record = files.read_json(paths.record)
    if record is None:
        return None
    try:
        return from_json(RunSpec, record["spec"]), record
    except (KeyError, TypeError):
        return None


def supervisor(paths: RunPaths) -> SupervisorRecord | None:
    return _load(SupervisorRecord, paths.supervisor)


def exit_record(paths: RunPaths) -> ExitRecord | None:
    return _load(ExitRecord, paths.exit)


def stop_request(paths: RunPaths) -> StopRequest | None:
    return _load(StopRequest, paths.stop)


def _load(cls: type[T], path: str) -> T | None:
    value = files.read_json(path)
    if value is None:
        return None
    try:
        return from_json(cls, value)
    except (KeyError, TypeError):
        return None


def heartbeat(paths: RunPaths, nonce: str) -> Heartbeat | None:
    """The trainer's heartbeat, if it is this attempt's and not one that was left lying."""
    value = files.read_json(paths.heartbeat)
    if value is None or value.get("nonce") != nonce:
        return None
    try:
        return Heartbeat(
            phase=str(value["phase"]),
            step=value.get("step"),
            at=float(value["time"]),
            checkpointing=bool(value.get("checkpointing")),
            gpu_memory_bytes=dict(value.get("gpu_memory_bytes") or {}),
        )
    except (KeyError, TypeError, ValueError):
        return None


def followed(paths: RunPaths, nonce: str) -> list[FollowedLog]:
    """What the supervisor last wrote of the logs it reads; the run's own log comes first."""
    value = files.read_json(paths.scan)
    if value is None or value.get("nonce") != nonce:
        return []
    try:
        return [from_json(FollowedLog, item) for item in value["logs"]]
    except (KeyError, TypeError):
        return []


def write_followed(paths: RunPaths, nonce: str, attempt: int, logs: list[FollowedLog]) -> None:
    files.write_json(paths.scan, {"nonce": nonce, "attempt": attempt, "logs": [to_json(log) for log in logs]})


def log_file(paths: RunPaths, run_id: str, attempt: int, record: SupervisorRecord | None) -> LogFile:
    """This attempt's log, and whether what stands under its name is what the supervisor opened."""
    path = paths.log(attempt)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return LogFile(path=path, size=0, modified_at=0.0, verified=False, why=os.strerror(error.errno or 0))
    with os.fdopen(fd, "rb") as file:
        stat = os.fstat(fd)
        first = file.readline(4096)
    why = None
    if record is None:
        why = "no supervisor has recorded this log"
    elif (stat.st_dev, stat.st_ino) != (record.log_device, record.log_inode):
        why = "the log was replaced by another file"
    elif stat.st_size < record.header_bytes:
        why = "the log was truncated"
    elif f" run={run_id} attempt={attempt} nonce={record.nonce} ".encode() not in first:
        why = "the log was overwritten: its first line is not this attempt's header"
    return LogFile(
        path=path, size=stat.st_size, modified_at=stat.st_mtime, verified=why is None, why=why,
        header_bytes=record.header_bytes if record else 0,
    )  # fmt: skip
