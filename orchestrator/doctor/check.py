"""What a check of the doctor's is: what it looks at (`Examined`), and what it says (`Outcome`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from orchestrator.doctor.hands import Hands
from orchestrator.doctor.report import Report
from orchestrator.errors import SpecctlError
from orchestrator.inventory import Target
from orchestrator.record import record

Status = Literal["ok", "warn", "fail", "unknown"]
Rung = Literal["ssh", "reachable", "host key", "login", "shell", "pct", "container", "entry"]
RUNGS: tuple[Rung, ...] = ("ssh", "reachable", "host key", "login", "shell", "pct", "container", "entry")
"""The way to a target, from here: each is worth asking only when the one before it stands."""


@record
class Outcome:
    """One thing that was found."""

    status: Status
    """fail: launches cannot work there. warn: they can, but not all, or not as one might think. unknown: it was not
    looked at, and `what` says why."""
    what: str
    evidence: str = ""
    """What was seen that says so."""
    mend: str = ""
    """The command that mends it, to be typed on this machine; words, where no command does."""


@record
class Examined:
    """All that was seen of a target."""

    target: Target
    hands: Hands
    node: Report | None = None
    """Of the node of a container."""
    report: Report | None = None
    """Of the target itself; None: the way there is broken."""
    broken: Rung | None = None
    error: SpecctlError | None = None
    """What the broken rung's trouble is."""
    connected_s: float | None = None
    """How long the first answer took, with the login."""
    clock_s: tuple[float, float] | None = None
    """How far its clock is ahead of this machine's: at least, at most."""
    python_hint: str | None = None
    """Which Python there would do, where the one that was asked for does not."""
    quick: bool = False
    local: bool = False
    """This machine: neither node nor container."""

    @property
    def seen(self) -> Report:
        assert self.report is not None, "checks of a machine are made only where it was reached"
        return self.report

    @property
    def wants_gpus(self) -> bool:
        return bool(self.target.gpus)

    @property
    def has_gpus(self) -> bool:
        """Whether GPUs are declared, or anything of one is there."""
        seen = self.seen
        return self.wants_gpus or bool(seen.devices) or bool(seen.all("smi")) or "/dev/dxg" in seen.text("device")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One question to a target. `look` gives what it found; with nothing amiss a single outcome that is ok."""

    name: str
    asks: str
    """What it is about, for the page that lists them all."""
    look: Callable[[Examined], Iterator[Outcome]]
    part: str
    """The part of the script that has to have been left behind."""
    full: bool = False
    """Not among the quick ones."""
    launch: bool = False
    """A launch asks the same before it sends anything."""
    personal: bool = False
    """The answer is the run's user's alone: without that user there is none."""


def ok(what: str) -> Outcome:
    return Outcome(status="ok", what=what)
