"""The answers about targets, and about what is sent there, brought back, or removed."""

from __future__ import annotations

from typing import TypedDict

from orchestrator.answers.base import Head, PathWhy
from orchestrator.verbs import prune, pull
from orchestrator.verbs.targets import Problem, Survey


class Declared(TypedDict):
    """A target as hosts.yaml has it."""

    name: str
    ssh: str | None
    vmid: int | None
    place: str
    user: str | None
    workdir: str
    python: str | None
    gpus: list[int] | None
    claims_dir: str | None


class Why(TypedDict):
    message: str
    hint: str | None


class Surveyed(Declared):
    """A target, and what was found there."""

    reachable: bool
    ready: bool
    """A launch would work."""
    clock_offset_s: float | None
    """How far its clock is ahead, to within half of `asked_s`."""
    asked_s: float
    found: Survey | None
    error: Why | None
    problems: list[Problem]


class Targets(Head):
    """Whether launches would work, and what keeps them from it."""

    inventory: str
    default_target: str | None
    groups: dict[str, list[str]]
    asked: bool
    """false: nothing but hosts.yaml was read (`--offline`)."""
    targets: list[Surveyed | Declared]


class Checked(TypedDict):
    """What one check found; one check may find several things."""

    check: str


class Patient(TypedDict):
    """A target, and what the doctor found there."""

    name: str
    place: str
    reached: bool
    """false: the way there is broken, and what lies beyond was not looked at."""
    fails: int
    warnings: int
    took_s: float
    checks: list[Checked]
    """In the order in which they were made: the way there first."""


class Doctor(Head):
    """What is amiss with targets."""

    quick: bool
    """What takes seconds was left out (`--quick`)."""
    exit_code: int
    targets: list[Patient]


class Push(Head):
    """What was sent."""

    target: str
    source: str
    destination: str
    files: int
    """Files and links that were written."""
    same: int
    """Those that were there already, with the same content."""
    total_files: int
    total_bytes: int
    sent_bytes: int
    resumed_bytes: int
    """Bytes that an earlier transfer had left there."""
    took_s: float
    sha256: str | None
    """Of a single file."""
    failed: list[PathWhy]
    left_out: list[PathWhy]
    verified: bool
    """Both sides have the same hashes."""


class Pull(Head):
    """What was brought here."""

    run_id: str
    target: str
    state: str
    """The run's, when it was listed."""
    source: str
    destination: str
    items: list[pull.Item]
    checkpoint: int | None
    """The step of the checkpoint that was chosen."""
    export: pull.Export | None
    """What its contract says, with --export."""
    files: int
    same: int
    total_files: int
    total_bytes: int
    pulled_bytes: int
    resumed_bytes: int
    took_s: float
    sha256: dict[str, str]
    failed: list[PathWhy]
    left_out: list[PathWhy]
    verified: bool


class Kept(TypedDict):
    key: str
    why: str


class Pruned(TypedDict):
    """A target, what may go there, and what has gone."""

    name: str
    reachable: bool
    error: str | None
    same_as: str | None
    """The target under whose name the same place was looked at."""
    live: int
    """Runs that live there, or of which it is not known."""
    items: list[prune.Item]
    notes: list[str]
    """What stays although it may look as if it could go, and why."""
    gone: list[str]
    """Keys of the items that were removed."""
    freed_bytes: int
    failed: list[Kept]


class Prune(Head):
    """What nobody needs any more."""

    removed: bool
    """false: it was only looked for (without `--yes`)."""
    targets: list[Pruned]
