"""The words of specctl as types: run ids, paths, what was asked, what was seen, and the verdict.

Pure: no clock, no process, no file is touched here. Both sides import it: the laptop, and the agent in the container,
so it needs nothing but the standard library. Times are Unix seconds of the *container's* clock unless a name says
otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Literal, TypeVar, Union

SCHEMA_VERSION = 1
RUN_ID_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,78}[a-z0-9])?")

T = TypeVar("T")


# --- names ----------------------------------------------------------------------------------------------------------


def slugify(text: str) -> str:
    """`text` as a part of a run id: lower-case letters, digits and single dashes, at most 40 characters."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return slug or "run"


def make_run_id(slug: str, now: datetime, entropy: str) -> str:
    """A run id that sorts by time: `20261129-143512-smollm2-cpu-3fa9`.

    `now` is UTC; `entropy` is a few hex digits that keep two launches of one second apart.
    """
    return f"{now:%Y%m%d-%H%M%S}-{slugify(slug)}-{slugify(entropy)}"


def is_run_id(text: str) -> bool:
    return RUN_ID_PATTERN.fullmatch(text) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkPaths:
    """Every path of a target's workdir. `workdir` is absolute on the target."""

    workdir: str

    @property
    def runs(self) -> str:
        return f"{self.workdir}/runs"

    def agent(self, agent_hash: str) -> str:
        return f"{self.workdir}/agents/{agent_hash}"

    def bundle(self, bundle_hash: str) -> str:
        return f"{self.workdir}/bundles/{bundle_hash}"

    def env(self, env_hash: str) -> str:
        return f"{self.workdir}/envs/{env_hash}"

    @property
    def wheels(self) -> str:
        """Files of wheelhouses, each under the hash of its content."""
        return f"{self.workdir}/wheels"

    def tmux_socket(self, uid: int) -> str:
        """One tmux server a user: tmux refuses a socket that another user owns."""
        return f"{self.workdir}/tmux-{uid}"

    def run(self, run_id: str) -> RunPaths:
        return RunPaths(root=f"{self.runs}/{run_id}", run_id=run_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPaths:
    """Every file name of a run directory: the contract between agent, supervisor, trainer and laptop."""

    root: str
    run_id: str

    @property
    def record(self) -> str:
        return f"{self.root}/run.json"

    @property
    def events(self) -> str:
        return f"{self.root}/events.jsonl"

    @property
    def metrics(self) -> str:
        return f"{self.root}/metrics.jsonl"

    @property
    def heartbeat(self) -> str:
        return f"{self.root}/heartbeat.json"

    @property
    def exit(self) -> str:
        return f"{self.root}/exit.json"

    @property
    def supervisor(self) -> str:
        """Who supervises and what was spawned: pids with their start times."""
        return f"{self.root}/supervisor.json"

    @property
    def scan(self) -> str:
        """What the supervisor has read out of the log so far, so that a probe costs the same at any log size."""
        return f"{self.root}/scan.json"

    @property
    def stop(self) -> str:
        """The request to stop: who asked, when, with what grace period."""
        return f"{self.root}/stop.json"

    @property
    def stopper(self) -> str:
        """Who carries the stop out, and how far it is."""
        return f"{self.root}/stopper.json"

    @property
    def stop_lock(self) -> str:
        return f"{self.root}/stop.lock"

    @property
    def claim(self) -> str:
        """Taken by the supervisor before it spawns anything, or by a start that gives it up: by one of them only."""
        return f"{self.root}/claim"

    @property
    def start_lock(self) -> str:
        return f"{self.root}/start.lock"

    @property
    def env(self) -> str:
        """Mode 0600, read once by the supervisor and then deleted: it may hold secrets."""
        return f"{self.root}/env"

    @property
    def config(self) -> str:
        """The configuration as it was launched."""
        return f"{self.root}/config.yaml"

    @property
    def code(self) -> str:
        """This run's own copy of the bundle's project files: the program's working directory."""
        return f"{self.root}/code"

    def log(self, attempt: int) -> str:
        return f"{self.root}/{self.run_id}.a{attempt}.log"

    def index(self, attempt: int) -> str:
        return f"{self.root}/{self.run_id}.a{attempt}.idx"


# --- what was asked -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What the laptop asks an agent to start. Values of secrets travel beside it, never in it."""

    run_id: str
    nonce: str
    argv: list[str]
    target: str
    owner: str
    bundle: str
    """Content hash of the deployed code; the agent verifies it before anything starts."""
    trainer: bool = False
    """The program is the trainer that was shipped: `{config}` in `argv` stands for its configuration's place."""
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    """Names only."""
    note: str = ""
    config_path: str | None = None
    config_text: str | None = None
    git_commit: str | None = None
    git_diff: str | None = None
    env_hash: str | None = None
    gpus: list[int] = field(default_factory=list)
    patterns: dict[str, str] = field(default_factory=dict)
    """Extra grammar for the steps of a foreign log: step, tok_s, loss or worker -> expression with one group."""
    specctl_version: str = ""


# --- what was seen: records of the run directory and of /proc -------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process of a run's tree. `start_ticks` is field 22 of /proc/PID/stat: with it a pid is never mistaken."""

    pid: int
    start_ticks: int
    name: str
    state: str
    """One letter of /proc/PID/stat: R S D Z T ..."""
    marked: bool = False
    """Its environment carries this run's id and nonce."""

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An exception seen in the text of a log. It is the run's failure only if a process or a worker ended with it."""

    type: str
    message: str
    traceback: str
    fingerprint: str
    """Hash of the type and of the frames (file, function), so that the same bug looks the same in two runs."""
    offset: int
    """Byte offset in the log of the first line of the traceback."""
    at: float
    worker: str | None = None
    before_first_step: bool = False
    hint: str | None = None
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFinding:
    """A finding whose last line has been read, but which the next line may still continue."""

    finding: Finding
    down: list[str] = field(default_factory=list)
    """The workers that died with it."""
    followed: bool = False
    """A step came after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """What the log said of one worker (a trainer thread or rank)."""

    name: str
    step: int | None = None
    step_at: float | None = None
    tok_s: float | None = None
    loss: float | None = None
    died_at: float | None = None
    """Set by "Exception in thread NAME", cleared when the worker steps again."""
    error: str | None = None
    seen: bool = False
    """A line of its own named it (a step, a figure, a phase), not only the text of an exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanState:
    """What a `logscan.Scanner` needs, beside the summary itself, to go on exactly where another one stopped."""

    decided_offset: int = 0
    """Lines before it are counted and their steps applied, although an open traceback began earlier."""
    after_cr: bool = False
    whole_run: bool = False
    """Step lines without a worker were seen: they, not the workers, give the summary's step, tok/s and loss."""
    first_step_offset: int | None = None
    advance_at: float | None = None
    """When the step last advanced; `step_at` is when any worker's did."""
    advance_burst: int = 0
    """How many advances share `advance_at`."""
    tok_s_figures: int = 0
    recent_tok_s: list[float] = field(default_factory=list)
    recent_intervals_s: list[float] = field(default_factory=list)
    shm_hint_offset: int | None = None
    shapes: list[str] = field(default_factory=list)
    """How step lines look, numbers left out, to tell them from a traceback that was written into the same line."""
    bar: list[int] = field(default_factory=list)
    """[position, total] of the newest unfinished frame of a nameless progress bar."""
    bar_total: int | None = None
    """Total of the nameless bar that was seen to be the training's, by a loss line between its frames."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSummary:
    """What has been read out of a log up to `offset`. Constant size: a status costs the same at 1 KB and at 10 GB."""

    offset: int = 0
    lines: int = 0
    phase: str | None = None
    phase_at: float | None = None
    step: int | None = None
    step_at: float | None = None
    steps_seen: int = 0
    """How often the step advanced: 2 or more is progress, not only a sign of life."""
    loss: float | None = None
    tok_s: float | None = None
    tok_s_printed: bool = False
    """A tok/s was printed; `tok_s` is None while the last one is not finite."""
    tok_s_median: float | None = None
    """Median of this run's own figures, warm-up excluded."""
    step_interval_s: float | None = None
    """Median time between two steps."""
    workers: list[Worker] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """The first few findings, in order; `findings_total` counts all."""
    findings_total: int = 0
    nonfinite_step: int | None = None
    """The first step whose loss was nan or inf. `loss` is None while it is not finite."""
    tail: list[Finding] = field(default_factory=list)
    """The findings (first ones and the newest) that no step has followed: what an end may be blamed on."""
    open_findings: list[OpenFinding] = field(default_factory=list)
    """Tracebacks from `offset` on that the next line may still continue; `logscan.settled` counts them in."""
    scan: ScanState = field(default_factory=ScanState)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFile:
    """This attempt's log, and whether it is this attempt's."""

    path: str
    size: int
    modified_at: float
    verified: bool
    """Header, nonce, device and inode agree with what the supervisor recorded."""
    why: str | None = None
    """Why it is not verified: replaced, truncated, missing, another nonce."""
    header_bytes: int = 0
    """Length of the supervisor's first line; what is beyond it is the program's own output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierFile:
    """A file that bore a log's name until the program rotated it away; this run's bytes begin at `base`."""

    device: int
    inode: int
    base: int
    born: float | None = None
    """When it was made, where the file system says so: the inode number of a deleted file soon is another file's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignLog:
    """A log the program writes by itself. Only what comes after `base` (and before `until`) is this run's."""

    path: str
    base: int
    """Offset from which the bytes are this run's."""
    before: int
    """Bytes that were in the file before this run; they are never shown as this run's."""
    truncated: bool
    """The program emptied the file when it opened it: the bytes from before are gone."""
    exact: bool
    """False when the file was first seen only after the program had opened it: some bytes before `base` may be its."""
    device: int
    inode: int
    size: int = 0
    modified_at: float | None = None
    """When the file was last written, as the probe saw it."""
    shared: str | None = None
    """Who else writes it (`pid 7 (python)`, `run ...`): from `until` on nobody can tell whose a line is."""
    until: int | None = None
    """Where this run's bytes end; None: at the end of the file."""
    restarts: int = 0
    """How often it began again at byte 0 while the run went on: emptied, or rotated away under `earlier`."""
    earlier: list[EarlierFile] = field(default_factory=list)

    @property
    def own_bytes(self) -> int:
        """How many bytes of the file are this run's."""
        return max(0, (self.size if self.until is None else self.until) - self.base)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What the trainer last said of itself, if its nonce is this attempt's."""

    phase: str
    step: int | None
    at: float
    checkpointing: bool = False
    gpu_memory_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequest:
    """Who asked to stop, when, and how patiently (stop.json)."""

    at: float
    by: str
    grace_s: float
    now: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StopperRecord:
    """The process that carries out a stop, and how far it is (stopper.json)."""

    pid: int
    start_ticks: int
    request_at: float
    by: str
    doing: str
    """term, checkpoint (it waits for one), kill, done."""
    signalled_at: float | None
    """When it sent its first signal; an end before that is not its doing."""
    alive_at: float
    finished: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitRecord:
    """How an attempt ended, from the supervisor (or from the agent, when nothing could be started)."""

    at: float
    code: int | None = None
    signal: int | None = None
    never_started: str | None = None
    """Why the program never ran; `code` and `signal` are then None."""
    stopped: bool = False
    """The end followed a signal that a stop had sent."""
    oom_kills: int = 0
    """How many kills for memory the container's cgroup counted during the attempt."""
    last_step: int | None = None
    first_exception: str | None = None
    """Type and first line of the first exception in the text; whether the run ended with it is for `health` to say."""
    behind_pipe: str | None = None
    """Name of the process whose output a pipe handed to tee, which hides its end: `code` or `signal` is its, and a code
    of 0 means that nobody knows how it ended."""
    attempt: int = 1
    nonce: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramExit:
    """How the spawned process itself ended; others of its tree may live on."""

    at: float
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorRecord:
    """Who supervises an attempt, and what it spawned (supervisor.json)."""

    attempt: int
    nonce: str
    pid: int
    start_ticks: int
    boot: str
    """The container's boot identity when the attempt started."""
    started_at: float
    log_device: int
    log_inode: int
    header_bytes: int
    oom_kills: int = 0
    program_pid: int | None = None
    program_start_ticks: int | None = None
    program_exit: ProgramExit | None = None
    cgroup: str | None = None
    """Directory of the cgroup that was made for the program; None where none could be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedLog:
    """One log the supervisor reads, and what it has read out of it (an entry of scan.json)."""

    summary: LogSummary
    foreign: ForeignLog | None = None
    """None: the run's own log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Everything one look at one run saw. `health.judge` turns it into a verdict; nothing else may."""

    run_id: str
    attempt: int
    nonce: str
    observed_at: float
    created_at: float
    target: str
    owner: str
    note: str
    argv: list[str]
    exit: ExitRecord | None
    stop: StopRequest | None
    """A stop that is being carried out right now."""
    same_boot: bool | None
    """Whether the container has been up since the attempt started; None when no start was recorded."""
    supervisor_alive: bool
    program: Process | None
    """The process that was spawned, as it is now; None when it was never spawned or is gone."""
    program_seen: bool
    """Whether a spawn was recorded at all."""
    tree: list[Process]
    """Every living process of the run."""
    log: LogFile
    summary: LogSummary
    foreign_logs: list[ForeignLog] = field(default_factory=list)
    heartbeat: Heartbeat | None = None
    gpus_declared: list[int] = field(default_factory=list)
    gpu_devices: list[str] = field(default_factory=list)
    """/dev/nvidiaN that processes of this run hold open."""
    oom_kills: int = 0
    """Kills for memory in the container since the attempt started."""
    program_exit: ProgramExit | None = None
    """The spawned process has ended; `exit` follows once nothing of the run is left."""
    unreadable: list[str] = field(default_factory=list)
    """Records that are there, and are no such record: something else wrote into the run directory."""
    elsewhere: str | None = None
    """The host whose run this is, when it is not the one that was asked: a workdir may be shared, or copied."""
    closed: str | None = None
    """Why the user who was asked may not look into the run's directory: it is another user's run."""
    damaged: str | None = None
    """Why the run directory does not even say what the run is; only `tree` is then worth reading."""


# --- the verdict ----------------------------------------------------------------------------------------------------

StateName = Literal[
    "QUEUED", "STARTING", "RUNNING", "DEGRADED", "STALLED", "STOPPING",
    "SUCCEEDED", "FAILED", "STOPPED", "KILLED", "NEVER_STARTED", "LOST",
    "UNREACHABLE",
]  # fmt: skip
LIVE: frozenset[str] = frozenset({"QUEUED", "STARTING", "RUNNING", "DEGRADED", "STALLED", "STOPPING"})
ENDED: frozenset[str] = frozenset({"SUCCEEDED", "FAILED", "STOPPED", "KILLED", "NEVER_STARTED", "LOST"})

Rung = Literal["none", "accepted", "session", "process", "log", "gpu", "step"]
RUNGS: tuple[Rung, ...] = ("none", "accepted", "session", "process", "log", "gpu", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One thing that was seen: what, its value, and when (container clock)."""

    what: str
    value: str
    observed_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What may be said of a run, and why."""

    state: StateName
    why: str
    """One clause that names the evidence: `step 12, 310 tok/s` or `exit code 3`."""
    observed_at: float
    step: int | None = None
    tok_s: float | None = None
    loss: float | None = None
    last_progress_at: float | None = None
    workers_alive: int = 0
    workers_total: int = 0
    workers_gone: list[str] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    """Those that count: an older run's text names none."""
    error: Finding | None = None
    """The failure: what a process or worker ended with. Findings that ended nothing are not here."""

    @property
    def live(self) -> bool:
        return self.state in LIVE


# --- JSON -----------------------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """A dataclass of this module as plain JSON values."""
    return dataclasses.asdict(value)


class Misfit(ValueError):
    """What was read does not have the shape it should have; says where in it, and what stands there instead."""


def from_json(cls: type[T], data: Any) -> T:
    """The dataclass `cls` from what `to_json` made. Unknown keys are ignored, so that an older laptop reads a newer
    agent; whatever else does not fit (a missing key, a scalar of another type, a number JSON has no word for) raises
    `Misfit`: programs can write into their run directory, and a node can answer anything."""
    result: T = _load(cls, data, cls.__name__)
    return result


INT_LIMIT = 1 << 64


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _load(hint: Any, data: Any, where: str) -> Any:
    if hint is Any:
        return data
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        return _load(next(arm for arm in typing.get_args(hint) if arm is not type(None)), data, where)
    if origin is Literal:
        if data not in typing.get_args(hint):
            raise Misfit(f"{where} is none of {', '.join(map(str, typing.get_args(hint)))}")
        return data
    kind = origin or hint
    if dataclasses.is_dataclass(kind):
        return _load_dataclass(typing.cast(Any, kind), data, where)
    if kind is float and type(data) is int:
        data = float(data) if abs(data) < INT_LIMIT else math.inf
    if type(data) is not kind:  # not isinstance: a bool is no int here
        raise Misfit(f"{where} needs {kind.__name__}, not {type(data).__name__}")
    if kind is float and not math.isfinite(data):
        raise Misfit(f"{where} is not finite")
    if kind is int and abs(data) >= INT_LIMIT:
        raise Misfit(f"{where} is beyond 64 bits")
    arms = typing.get_args(hint)
    if kind is list:
        return [_load(arms[0], item, f"{where}[{index}]") for index, item in enumerate(data)]
    if kind is dict:
        return {_load(arms[0], key, where): _load(arms[1], item, f"{where}.{key}") for key, item in data.items()}
    return data


def _load_dataclass(cls: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise Misfit(f"{where} needs an object, not {type(data).__name__}")
    hints = _hints(typing.cast(Any, cls))
    values = {}
    for spec in dataclasses.fields(cls):
        if spec.name in data:
            values[spec.name] = _load(hints[spec.name], data[spec.name], f"{where}.{spec.name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise Misfit(f"{where} has no {spec.name}")
    return cls(**values)
