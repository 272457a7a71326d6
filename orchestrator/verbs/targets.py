"""`targets`: is the setup right? Every target asked at once for what a launch there needs; nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator import remote
from orchestrator.crew import Crew
from orchestrator.doctor.machine import LITTLE_DISK_BYTES
from orchestrator.doctor.resources import CLOCK_S
from orchestrator.errors import PythonError, SpecctlError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.remote import understood

PARALLEL = 32
DEADLINE_S = 45.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    path: str
    version: str | None
    why: str | None = None
    """Why it has no version: it does not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What was found on a target."""

    host: str
    user: str
    system: str
    workdir: str
    workdir_there: bool
    workdir_problem: str | None
    free_bytes: int | None
    total_bytes: int | None
    agent: bool
    """specctl's agent, of this very version, is there already."""
    python: Program
    """Runs the agent."""
    own_python: Program | None
    """`python:` of hosts.yaml."""
    venv: bool
    tmux: Program | None = None
    tmux_why: str | None = None
    tmux_hint: str | None = None
    grep: str | None
    gpus: list[dict[str, Any]]
    gpus_why: str | None
    """Why a launch with `gpus:` would be refused; without, what keeps nvidia-smi from answering."""
    gpus_hint: str | None
    live: int
    """Runs with a living process."""
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that keeps a launch from working there, and what mends it."""

    what: str
    mend: str | None
    fatal: bool = True
    """False: launches work, but not all, or not as one might think."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One target, and what is known of it."""

    target: Target
    survey: Survey | None = None
    error: SpecctlError | None = None
    asked_s: float = 0.0
    clock_offset_s: float | None = None
    """How far its clock is ahead of this machine's, to within half of `asked_s`."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def reachable(self) -> bool:
        """A Python that does not run is an answer, too."""
        return not isinstance(self.error, UnreachableError) or isinstance(self.error, PythonError)

    @property
    def ready(self) -> bool:
        return self.survey is not None and not any(problem.fatal for problem in self.problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    views: list[View]
    asked: bool
    """False: nothing but hosts.yaml was read."""

    @property
    def silent(self) -> list[View]:
        return [view for view in self.views if not view.reachable]


def run(fleet: Fleet, names: Sequence[str], *, offline: bool = False) -> Result:
    """`names` are targets and groups; none: all. Raises `NotFound`."""
    targets = fleet.inventory.expand(names) if names else list(fleet.inventory.targets.values())
    if offline:
        return Result(views=[View(target=target) for target in targets], asked=False)
    crew = Crew(PARALLEL)
    answers = [crew.do(partial(_ask, fleet, target)) for target in targets]
    return Result(views=[answer.result() for answer in answers], asked=True)


def _ask(fleet: Fleet, target: Target) -> View:
    agent, carried = fleet.agent(target), remote.agent_zip()
    began, begun = time.time(), time.monotonic()
    try:
        frame = agent.call(
            "survey", payload=carried, deadline_s=DEADLINE_S, size=len(carried), agent=remote.agent_hash(),
            python=target.python, gpus=target.gpus,
        )  # fmt: skip
        asked_s = time.monotonic() - begun
        survey, now = understood(Survey, frame, target), understood(float, frame.get("now"), target)
    except SpecctlError as error:
        return View(target=target, error=error, asked_s=time.monotonic() - begun)
    offset_s = now - (began + asked_s / 2)
    return View(
        target=target, survey=survey, asked_s=asked_s, clock_offset_s=offset_s,
        problems=_problems(target, survey, offset_s, asked_s),
    )  # fmt: skip


def _problems(target: Target, survey: Survey, offset_s: float, asked_s: float) -> list[Problem]:
    found = []
    if survey.tmux is None:
        found.append(Problem(what=survey.tmux_why or "no tmux works there", mend=survey.tmux_hint))
    if survey.grep is None:
        found.append(Problem(what="grep not found: logs cannot be searched", mend="apt-get install grep", fatal=False))
    if survey.workdir_problem:
        mend = "see that it can be written and has room, or choose another `workdir:` of this target in hosts.yaml"
        found.append(Problem(what=f"the workdir {survey.workdir} cannot be used: {survey.workdir_problem}", mend=mend))
    elif survey.free_bytes is not None and survey.free_bytes < LITTLE_DISK_BYTES:
        free = f"only {survey.free_bytes / 2**20:,.0f} MiB are free for the workdir {survey.workdir}"
        found.append(Problem(what=free, mend="make room there: specctl prune shows what can go", fatal=False))
    own = survey.own_python
    if own is not None and own.version is None:
        what = f"python: {own.path} does not run there: {own.why}"
        found.append(Problem(what=what, mend="check `python:` of this target in hosts.yaml"))
    if own is None and not survey.venv and (target.ssh is not None or target.vmid is not None):
        what = f"{survey.python.path} has no venv or no ensurepip: it makes no environments"
        mend = "apt-get install python3-venv, or name a whole Python as `python:` of this target in hosts.yaml"
        found.append(Problem(what=what, mend=mend, fatal=False))
    if survey.gpus_why is not None:
        found.append(Problem(what=survey.gpus_why, mend=survey.gpus_hint, fatal=bool(target.gpus)))
    if abs(offset_s) > CLOCK_S + asked_s / 2:
        ahead = "ahead of" if offset_s > 0 else "behind"
        what = f"its clock is {abs(offset_s):,.0f} s {ahead} this machine's: times of its runs are its own"
        mend = "set the clock of the node, whose containers share it (timedatectl set-ntp true), or of this machine"
        found.append(Problem(what=what, mend=mend, fatal=False))
    return found
