"""What has been read out of a run's logs: steps, workers, exceptions, and which files they were."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from orchestrator.record import record

Moved = Literal["renamed", "deleted"]


@record
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


@record
class LastWords:
    """What a run that ended badly said last: evidence of how it ended, and not known to be the cause."""

    text: str
    """One line."""
    by: Literal["log", "program"] = "log"
    """log: the last line that says something; program: what its own `ended` event gives as the error."""
    log: str | None = None
    """The log of the program's own that the line stands in; None: the run's."""
    before: str | None = None
    """The exception of a launcher that came after it, and only says that a process has failed."""

    @property
    def told(self) -> str:
        """`last line: tool: error: no such option: --foo`."""
        if self.by == "program":
            return f"by its own word: {self.text}"
        of, before = f" of {self.log}" if self.log else "", f" before {self.before}" if self.before else ""
        return f"last line{of}{before}: {self.text}"


@record
class OpenFinding:
    """A finding whose last line has been read, but which the next line may still continue."""

    finding: Finding
    down: list[str] = field(default_factory=list)
    """The workers that died with it."""
    followed: bool = False
    """A step came after it."""


@record
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


@record
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


@record
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


@record
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
    moved: Moved | None = None
    """What became of its name; `path` is where it is now."""


@record
class EarlierFile:
    """A file that bore a log's name until the program rotated it away; this run's bytes begin at `base`."""

    device: int
    inode: int
    base: int
    born: float | None = None
    """When it was made, where the file system says so: the inode number of a deleted file soon is another file's."""


@record
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


@record
class FollowedLog:
    """One log the supervisor reads, and what it has read out of it (an entry of scan.json)."""

    summary: LogSummary
    foreign: ForeignLog | None = None
    """None: the run's own log."""
    grew_at: float | None = None
    """When it was last seen to have grown."""
