"""The answers that are about runs as they are: launch, status, ls, show, logs, stop."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from orchestrator.answers.base import Gpu, Head, Reach
from orchestrator.model import (
    Evidence,
    Finding,
    ForeignLog,
    GpuClaim,
    GpuWish,
    InLine,
    LastWords,
    Probe,
    Rung,
    StateName,
)


class NotVerified(TypedDict):
    """Why a launch is not verified, where no exception is the reason."""

    type: str
    """The state, or `NotVerified`."""
    message: str


class Launch(Head):
    """A launch that came as far as a run: verified, or not."""

    run_id: str
    target: str
    state: StateName | None
    """null: nothing was seen of it after its start."""
    verified: bool
    """The run was seen to reach the rung that was wanted (`--until`)."""
    queued: bool
    """It waits in line for its GPUs, as `--queue` has asked for; then it is not verified, and nothing is wrong."""
    rung: Rung
    """The highest one that was reached."""
    evidence: list[Evidence]
    session: str
    """Its tmux session."""
    log: str
    """The path of this attempt's log, on the target."""
    tok_s: float | None
    error: Finding | NotVerified | None
    foreign_logs: list[ForeignLog]
    findings: list[Finding]
    """Exceptions in the text; `error` alone is one that something ended with."""
    tail: list[str]
    """The last lines of the log."""


class Plan(Head):
    """`launch --plan`: what would be done. Nothing was."""

    plan: Literal[True]
    run_id: str
    """Another one at each launch."""
    target: str
    place: str
    """`container 200 on pve1`, in words."""
    workdir: str
    argv: list[str]
    bundle: str
    """Hash of the code."""
    files: list[str]
    git_commit: str | None
    dirty: bool
    """There are uncommitted changes."""
    python: str | None
    """null: none is prepared, or a virtual environment is made."""
    requirements: list[str]
    wheelhouse: list[str] | None
    env: dict[str, str]
    reads: dict[str, Any]
    """What is looked for on the target before anything is prepared: the key of the configuration, and its path."""
    secrets: list[str]
    """Names only."""
    until: Rung
    wish: GpuWish | None
    """The GPUs that it will claim; null: none."""


class WorkerRow(TypedDict):
    name: str
    state: Literal["ALIVE", "ENDED", "GONE"]
    """GONE: it has died, whatever became of the run."""
    step: int | None


class RunRow(TypedDict):
    """One run as it was just seen."""

    run_id: str
    target: str
    attempt: int
    owner: str
    """`user@host` that launched it."""
    state: StateName
    why: str
    """One clause that names the evidence."""
    step: int | None
    tok_s: float | None
    loss: float | None
    last_progress_age_s: float | None
    observed_at: float
    workers: list[WorkerRow]
    error: Finding | None
    """What the run, or a worker of it, ended with."""
    last_words: LastWords | None
    """Where no exception says why it ended badly: what it said last. It is not known to be the cause."""
    log: str
    note: str
    foreign_logs: list[ForeignLog]
    gpu_claim: GpuClaim | None
    """The GPUs that it has asked for to itself, and those that it has got."""
    in_line: InLine | None
    """Where it stands in line, while it is QUEUED for GPUs."""


class TargetRow(TypedDict):
    """One target that was asked."""

    name: str
    reachable: bool
    no_workdir: bool
    """Nothing has ever been launched there."""
    state: Literal["UNREACHABLE"] | None
    error: str | None
    hint: str | None
    observed_at: float | None
    """By its own clock."""
    gpus: list[Gpu]
    gpus_error: str | None


class Status(Head):
    """Every run as it is right now."""

    runs: list[RunRow]
    targets: list[TargetRow]


class LsRow(TypedDict):
    """One run: as it was just seen, or as far as this machine's index knows of it."""

    run_id: str
    target: str
    state: StateName | Literal["GONE"]
    """GONE: its target answered, and has no such run."""
    why: str
    started_at: float | None
    took_s: float | None
    owner: str
    seen: RunRow | None
    """null: it was not seen, and `why` says why."""


class Ls(Head):
    """The runs there have been, newest first."""

    runs: list[LsRow]
    left_out: int
    """So many more fit, beyond `--limit`."""
    unreachable: list[Reach]


class Show(Head):
    """All that is known of one run."""

    run: RunRow
    rung: Rung
    evidence: list[Evidence]
    missing: str
    """What the next rung of the ladder wants and was not seen."""
    nonce: str
    argv: list[str]
    probe: Probe
    """The look itself, from which all else is judged. What is in it may change within a version."""
    gpus: list[Gpu]


class LogLine(TypedDict):
    """`logs`: a line of a log."""

    run_id: str
    attempt: int
    offset: int
    """The byte of the log at which it begins."""
    line: str
    """Without colours, and as a terminal would have left it."""
    log: str
    match: bool
    """false: it stands beside one (`-A`, `-B`, `-C`)."""


class ErrorGroup(TypedDict):
    """`logs --errors`: an exception, however often it came."""

    run_id: str
    attempt: int
    ended: Literal["run", "worker"] | None
    """null: it ended nothing that is known."""
    why: str


class Left(TypedDict):
    pid: int
    name: str
    state: str
    """One letter of /proc/PID/stat."""


class Stop(Head):
    """What a stop has left behind."""

    run_id: str
    target: str
    state: StateName
    why: str
    remaining: list[Left]
    """Processes of the run that live on; none: it is stopped."""
    gpu_memory_kept: list[str]
    """GPUs whose memory was not given back, in words."""
