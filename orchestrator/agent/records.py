"""Reading a run directory: whose log is this, who supervises, what was the end.

The identity of a log is decided here and nowhere else: line 1 carries this run's id and nonce, and the file is the one
(device, inode) that the supervisor opened.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, TypeVar

from orchestrator.agent import files, proc
from orchestrator.model import (
    ExitRecord,
    FollowedLog,
    Heartbeat,
    LogFile,
    RunPaths,
    RunSpec,
    StopperRecord,
    StopRequest,
    SupervisorRecord,
    from_json,
    to_json,
)

T = TypeVar("T")

STOP_BEGINS_S = 5.0
"""How long a stop may take to begin, and its effect to be seen."""


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


def stopper(paths: RunPaths) -> StopperRecord | None:
    return _load(StopperRecord, paths.stopper)


def stop_under_way(paths: RunPaths, now: float) -> StopRequest | None:
    """The stop that somebody is carrying out, or has only just asked for; one whose stopper died is none."""
    request, worker = stop_request(paths), stopper(paths)
    if request is None:
        return None
    working = worker is not None and proc.same(worker.pid, worker.start_ticks) is not None
    return request if working or now - request.at < STOP_BEGINS_S else None


def stopped(paths: RunPaths, ended_at: float) -> bool:
    """Whether an end at that time was the doing of a stop: after its first signal, and not long after its last word."""
    worker = stopper(paths)
    if worker is None or worker.signalled_at is None:
        return False
    return worker.signalled_at <= ended_at <= worker.alive_at + STOP_BEGINS_S


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


def last_mark(index: str, *, before: int) -> tuple[int, int] | None:
    """(offset, line number) of the last mark of an index up to the byte `before`; None without one."""
    found = None
    try:
        with open(index, "rb") as file:
            for line in file:
                mark = json.loads(line)
                if mark["offset"] > before:
                    break
                found = (int(mark["offset"]), int(mark["lines"]))
    except (OSError, ValueError, KeyError):
        pass
    return found


def log_file(
    paths: RunPaths, run_id: str, attempt: int, record: SupervisorRecord | None, *, same_boot: bool
) -> LogFile:
    """This attempt's log, and whether what stands under its name is what the supervisor opened.

    Device and inode numbers are a mount's own: after a restart of the container only the header can tell.
    """
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
    elif same_boot and (stat.st_dev, stat.st_ino) != (record.log_device, record.log_inode):
        why = "the log was replaced by another file"
    elif stat.st_size < record.header_bytes:
        why = "the log was truncated"
    elif f" run={run_id} attempt={attempt} nonce={record.nonce} ".encode() not in first:
        why = "the log was overwritten: its first line is not this attempt's header"
    return LogFile(
        path=path, size=stat.st_size, modified_at=stat.st_mtime, verified=why is None, why=why,
        header_bytes=record.header_bytes if record else 0,
    )  # fmt: skip
