"""What was asked, and what is seen of it: the records of a run directory, processes, and one whole look at a run."""

from __future__ import annotations

from dataclasses import field

from orchestrator.model.gpus import GpuClaim, GpuWish, InLine
from orchestrator.model.logs import ForeignLog, LastWords, LogFile, LogSummary
from orchestrator.record import record


@record
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
    """What `gpus:` or --gpus names by number: CUDA_VISIBLE_DEVICES, unless a claim says it by UUID."""
    wish: GpuWish | None = None
    """The GPUs that the run is to have to itself; None: it claims none."""
    patterns: dict[str, str] = field(default_factory=dict)
    """Extra grammar for the steps of a foreign log: step, tok_s, loss or worker -> expression with one group."""
    specctl_version: str = ""


@record
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

    @property
    def stopped(self) -> bool:
        """Somebody has sent it a SIGSTOP, or a terminal a Ctrl-Z."""
        return self.state in ("T", "t")


@record
class Heartbeat:
    """What the trainer last said of itself, if its nonce is this attempt's."""

    phase: str
    step: int | None
    at: float
    checkpointing: bool = False
    gpu_memory_bytes: dict[str, int] = field(default_factory=dict)


@record
class StopRequest:
    """Who asked to stop, when, and how patiently (stop.json)."""

    at: float
    by: str
    grace_s: float
    now: bool = False


@record
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


@record
class ExitRecord:
    """How an attempt ended, from the supervisor (or from the agent, when nothing could be started)."""

    at: float
    """By the wall clock of then."""
    clock_set_by_s: float = 0.0
    """By how much that had been set until then, since the run was accepted."""
    code: int | None = None
    signal: int | None = None
    never_started: str | None = None
    """Why the program never ran; `code` and `signal` are then None."""
    stopped: bool = False
    """The end followed a signal that a stop had sent; with `never_started`: it was stopped while it waited in line."""
    oom_kills: int = 0
    """How many kills for memory the container's cgroup counted during the attempt."""
    last_step: int | None = None
    first_exception: str | None = None
    """Type and first line of the first exception in the text; whether the run ended with it is for `health` to say."""
    behind_pipe: str | None = None
    """Name of the process whose output a pipe handed to tee, which hides its end: `code` or `signal` is its, and a code
    of 0 means that nobody knows how it ended."""
    last_words: LastWords | None = None
    """What it said last, if it ended badly."""
    attempt: int = 1
    nonce: str = ""


@record
class ProgramExit:
    """How the spawned process itself ended; others of its tree may live on."""

    at: float
    code: int | None = None
    signal: int | None = None
    last_words: LastWords | None = None
    """What the run had said last until then, if it ended badly."""


@record
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


@record
class Disk:
    """A file system, and the room in it."""

    mount: str
    free_bytes: int
    total_bytes: int
    free_inodes: int | None
    """None where they are made when they are needed."""
    read_only: bool

    @property
    def words(self) -> str:
        """`the file system at /data has 0.2 of 100.0 MiB free`."""
        if self.read_only:
            return f"the file system at {self.mount} is read-only"
        unit, name = (1 << 30, "GiB") if self.total_bytes >= 10 << 30 else (1 << 20, "MiB")
        free = f"{self.free_bytes / unit:,.1f} of {self.total_bytes / unit:,.1f} {name} free"
        if self.free_inodes == 0:
            return f"the file system at {self.mount} has no free inodes: it holds too many files ({free})"
        return f"the file system at {self.mount} has {free}"

    @property
    def problem(self) -> str | None:
        """Why nothing can be written there, if nothing can."""
        closed = self.read_only or self.free_bytes < FULL_BYTES or self.free_inodes == 0
        return self.words if closed else None


FULL_BYTES = 1 << 20
"""A program that has just failed to write leaves a little."""


@record
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
    gpu_claim: GpuClaim | None = None
    """What it has asked for, and has got; whether it has it still, its living supervisor says."""
    gpus_lost: list[str] = field(default_factory=list)
    """Numbers of what it has claimed, whose lock is not there any more, or is another's."""
    in_line: InLine | None = None
    """Where it stands in line; None when it does not wait."""
    oom_kills: int = 0
    """Kills for memory in the container since the attempt started."""
    program_exit: ProgramExit | None = None
    """The spawned process has ended; `exit` follows once nothing of the run is left."""
    unread_bytes: int = 0
    """So much of its logs had not been read yet when its supervisor, or this probe, wrote down what it had read."""
    unreadable: list[str] = field(default_factory=list)
    """Records that are there, and are no such record: something else wrote into the run directory."""
    supervisor_stopped: int | None = None
    """The pid of its supervisor, if somebody has stopped that (state T): it lives, and does nothing."""
    disk: Disk | None = None
    """Where the run directory is."""
    clock_set_by_s: float = 0.0
    """By how much the container's clock has been set since the run was accepted (as far as that is known, after a
    reboot until its end); the times here are by the clock as it is set now."""
    elsewhere: str | None = None
    """The host whose run this is, when it is not the one that was asked: a workdir may be shared, or copied."""
    closed: str | None = None
    """Why the user who was asked may not look into the run's directory: it is another user's run."""
    damaged: str | None = None
    """Why the run directory does not even say what the run is; only `tree` is then worth reading."""
