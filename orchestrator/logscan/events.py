"""What a scanner finds in a log, one dataclass a kind. Offsets are raw byte offsets of the line in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.model import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """A step line. `loss` may be nan or inf: that is what the line said."""

    step: int
    offset: int
    worker: str | None = None
    loss: float | None = None
    tok_s: float | None = None
    lr: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEvent:
    phase: str
    offset: int
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerUp:
    """A worker showed itself for the first time, or stepped again after it had been taken for dead."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDown:
    name: str
    finding: Finding | None
    """None where tracebacks are interleaved and nothing says whose is whose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingEvent:
    """An exception in the text. One that repeats is reported at its 1st, 2nd, 4th, 8th ... time; `count` says which."""

    finding: Finding


Event = StepEvent | PhaseEvent | WorkerUp | WorkerDown | FindingEvent
