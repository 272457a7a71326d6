"""What answers have in common."""

from __future__ import annotations

from typing import Literal, TypedDict


class Head(TypedDict):
    """How every answer that is one object begins."""

    schema_version: int
    """Of this verb's answer. It is another one only if a program that reads the answer has to be changed."""
    observed_at: float
    """When it was seen, in Unix seconds: by the container's clock where the answer is of one run, else by the clock of
    the machine that asked."""


class Said(TypedDict):
    """What an error says."""

    message: str
    """One line: what, and why."""
    hint: str | None
    """What to type or to change."""
    kind: str
    """Of which kind it is: `UnreachableError`, `NotFound`, `ConfigError`, ..."""


class Error(TypedDict):
    """Printed in an answer's place where there is none, alike for every verb; it stands on stderr, too."""

    schema_version: Literal[1]
    observed_at: float
    error: Said
    target: str | None
    run_id: str | None
    exit_code: int


class Reach(TypedDict):
    """A target that could not be asked."""

    name: str
    error: str
    hint: str | None


class Gpu(TypedDict):
    """A GPU as nvidia-smi tells of it; null: the driver does not say."""

    index: int | None
    name: str
    utilization_percent: int | None
    memory_used_mib: int | None
    memory_total_mib: int | None


class PathWhy(TypedDict):
    path: str
    why: str
