"""The answers that compare: compare, errors, diff, plot, report."""

from __future__ import annotations

from typing import Literal, TypedDict

from orchestrator.answers.base import Head
from orchestrator.comparison import Kind, Told
from orchestrator.model import LastWords, StateName
from orchestrator.verbs.compare import Change
from orchestrator.verbs.plot import By


class Mean(TypedDict):
    count: int
    """So many steps were written down."""
    mean: float | None
    spread: float | None
    """The standard deviation, of two or more."""


class Stretch(TypedDict):
    """A figure of both runs over the same steps."""

    first: int
    last: int
    a: Mean
    b: Mean


class Compared(TypedDict):
    """One of the two runs."""

    target: str
    observed_at: float
    bundle: str
    git_commit: str | None


class File(TypedDict):
    """A file that differs."""

    added: int
    removed: int


class Compare(Head):
    """What became of A's failure in B, what changed between them, and how both train."""

    answer: Kind
    """`gone` and `fine` are a yes; `same`, `printed`, `different` and `new` a no; with `not_yet` and `no_answer`
    nothing can be said of the fix."""
    sentence: str
    failures: list[Told]
    """Every failure of both, and what became of it."""
    a: Compared
    b: Compared
    files: list[File]
    files_unknown: str | None
    """Why the code could not be compared."""
    config_diff: str
    changes: list[Change]
    """What else differs: versions, requirements, target, devices, ..."""
    training: dict[str, list[Stretch]]
    """Figure -> both runs at equal steps."""


class Diff(Head):
    """A run's code, and what stands here now."""

    run_id: str
    target: str
    bundle: str
    git_commit: str | None
    source: str
    same: bool
    files: list[File]


class SeenIn(TypedDict):
    """An exception in one run. Times are by the clock of the machine that asked."""

    run_id: str
    target: str
    state: StateName
    ended: Literal["run", "worker"] | None
    """null: it ended nothing that is known."""
    why: str
    count: int
    workers: dict[str, int]
    """How often in which worker."""
    first_at: float
    last_at: float


class OneError(TypedDict):
    """One exception, by its type and frames, over all runs."""

    fingerprint: str
    type: str
    message: str
    count: int
    hint: str | None
    traceback: str
    first_at: float
    last_at: float
    runs: list[SeenIn]


class NotSearched(TypedDict):
    run_id: str
    why: str


class FailedRun(TypedDict):
    run_id: str
    target: str
    state: StateName
    why: str
    at: float
    """When it ended, by the clock of the machine that asked."""


class FailedAlike(TypedDict):
    """Runs that ended badly in the same way, with no exception that they ended with."""

    how: str
    """`exit code 2`, `SIGABRT`; of an end that has neither, the state and why."""
    last_words: LastWords | None
    """What the newest of them said last; no evidence of the cause. null: nothing, or it is not known."""
    runs: list[FailedRun]


class Errors(Head):
    """The exceptions of many runs, each once."""

    runs: int
    """How many were looked at."""
    unreachable: list[str]
    not_searched: list[NotSearched]
    errors: list[OneError]
    without_exception: list[FailedAlike]
    """Runs that ended badly, and no exception says why."""


class PlotRun(TypedDict):
    run_id: str
    target: str
    state: StateName
    observed_at: float
    figures: list[str]
    """All that it has written down."""
    whole: bool
    """false: its metrics are so many that they were read in parts."""


class PlotLine(TypedDict):
    """One line, ready to be drawn: null, null is a gap."""

    label: str
    """The run's id, and the worker's name behind it."""


class Plot(Head):
    """Lines, ready to be drawn."""

    metrics: list[str]
    by: By
    runs: list[PlotRun]
    lines: dict[str, list[PlotLine]]
    """Figure -> its lines, run by run."""


class Reported(TypedDict):
    """A run of the page."""

    run_id: str
    target: str
    state: StateName
    observed_at: float
    not_seen: list[str]
    """Why parts of it could not be read."""


class Unseen(TypedDict):
    run: str
    """As it was asked for."""
    why: str
    hint: str | None


class Report(Head):
    """The page that was written."""

    path: str
    bytes: int
    runs: list[Reported]
    unreachable: list[Unseen]
    """Runs that could not be looked at, as the page says, too."""
