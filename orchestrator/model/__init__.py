"""The words of specctl as types: run ids, paths, what was asked, what was seen, and the verdict.

Pure: no clock, no process, no file is touched here. Both sides import it: the laptop, and the agent in the container,
so it needs nothing but the standard library. Times are Unix seconds of the *container's* clock unless a name says
otherwise. `names.py` is how things are called, `records.py` what was asked and seen, `gpus.py` who has which GPU,
`logs.py` what was read out of the logs, `verdict.py` what may be said of it, `wire.py` how all of it travels.
"""

from orchestrator.model.gpus import Claimant, Device, GpuClaim, GpuWish, InLine, Obstacle, age, listed, ordinal, told
from orchestrator.model.logs import (
    EarlierFile,
    Finding,
    FollowedLog,
    ForeignLog,
    LastWords,
    LogFile,
    LogSummary,
    Moved,
    OpenFinding,
    ScanState,
    Worker,
)
from orchestrator.model.names import RunPaths, WorkPaths, is_run_id, make_run_id, slugify
from orchestrator.model.records import (
    Disk,
    ExitRecord,
    Heartbeat,
    Probe,
    Process,
    ProgramExit,
    RunSpec,
    StopperRecord,
    StopRequest,
    SupervisorRecord,
)
from orchestrator.model.verdict import BAD, ENDED, LIVE, RUNGS, Evidence, Rung, StateName, Verdict
from orchestrator.model.wire import Misfit, from_json, to_json

__all__ = [
    "BAD", "ENDED", "LIVE", "RUNGS", "SCHEMA_VERSION", "Claimant", "Device", "Disk", "EarlierFile", "Evidence",
    "ExitRecord", "Finding", "FollowedLog", "ForeignLog", "GpuClaim", "GpuWish", "Heartbeat", "InLine", "LastWords",
    "LogFile", "LogSummary", "Misfit", "Moved", "Obstacle", "OpenFinding", "Probe", "Process", "ProgramExit",
    "RunPaths", "RunSpec", "Rung", "ScanState", "StateName", "StopRequest", "StopperRecord", "SupervisorRecord",
    "Verdict", "WorkPaths", "Worker", "age", "from_json", "is_run_id", "listed", "make_run_id", "ordinal", "slugify",
    "to_json", "told",
]  # fmt: skip

SCHEMA_VERSION = 1
"""Of run.json; what commands print has versions of its own (`commands.ANSWERS`)."""
