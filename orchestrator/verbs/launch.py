"""`launch`: ship, prepare, start, and climb the ladder of evidence until the run is proven or is not.

Nothing that the plan cannot say is done: `plan` makes a value, `run` applies it. The run id is made here, so a start
whose reply was lost is repeated safely: the second call adopts what the first one began.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import secrets
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from orchestrator import health, index, logscan
from orchestrator.bundle import Bundle, collect
from orchestrator.errors import AgentError, ConfigError, NotFound, SpecctlError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.model import RUNGS, Evidence, Probe, Rung, RunSpec, Verdict, from_json, make_run_id, to_json
from orchestrator.remote import Agent
from typedyaml import Model, Str, TypedYamlError, load

Until = Literal["process", "step"]
TIMEOUT_S = 600.0
COMPILE_S = 1800.0
SETTLE_S = 2.0
"""How long a run must go on stepping before the launch counts: a worker that dies beside others dies early, and its
traceback comes a moment after their first steps."""
SLOW_S = 5.0
"""How long after its first step a run may take to show a second one before the first is taken as proof enough."""
POLL_S = 0.3
PREPARE_S = 3600.0
TAIL_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was typed."""

    target: str | None
    config: Path | None
    command: list[str]
    name: str | None = None
    until: Until = "step"
    timeout_s: float | None = None
    note: str = ""
    source: Path | None = None
    """The project to ship; None ships only the trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a launch will do."""

    target: Target
    spec: RunSpec
    bundle: Bundle
    python: str | None
    """The interpreter that will run the program; None: the one of the environment below, or none is needed."""
    requirements: list[str]
    """What the environment is made of; empty: nothing is prepared."""
    secrets: dict[str, str]
    until: Until
    timeout_s: float | None


@dataclass(kw_only=True, slots=True)
class Result:
    """What was seen of the launch."""

    plan: Plan
    log: str
    verified: bool = False
    rung: Rung = "none"
    evidence: list[Evidence] = field(default_factory=list)
    verdict: Verdict | None = None
    probe: Probe | None = None
    why: str = ""
    """Why it is not verified."""
    tail: list[str] = field(default_factory=list)


class Watcher(Protocol):
    """Who is told how a launch comes along."""

    def step(self, text: str) -> None:
        """Something is being done before the run exists."""

    def rung(self, rung: Rung, evidence: Evidence) -> None:
        """A rung of the ladder was reached."""

    def phase(self, phase: str, detail: str) -> None:
        """What the run is busy with: in a word or two, and with the figures of this moment."""


class LaunchKeys(Model, extra="ignore"):
    """The keys of a configuration that are specctl's; the program reads the others by itself."""

    requirements: list[Str] | None = None
    patterns: dict[Str, Str] = Field(default_factory=dict)


def plan(request: Request, fleet: Fleet) -> Plan:
    """Everything that can be decided without asking the target. Raises `ConfigError`, `BundleError`, `NotFound`."""
    target = fleet.inventory.resolve(request.target)
    if not request.config and not request.command:
        raise ConfigError(
            "nothing to launch: give --config FILE for the trainer, or a command after --",
            hint="specctl launch local --config configs/smollm2-cpu.yaml",
        )
    keys, text = LaunchKeys(), None
    if request.config is not None:
        try:
            keys = load(request.config, LaunchKeys)
            text = request.config.read_text(encoding="utf-8")
        except TypedYamlError as error:
            raise ConfigError(str(error)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{request.config}: {getattr(error, 'strerror', None) or error}") from error
    try:
        logscan.Scanner(patterns=keys.patterns)
    except ValueError as error:
        raise ConfigError(f"{request.config}: patterns: {error}") from error
    values = {}
    for name in target.secrets:
        if name not in os.environ:
            raise ConfigError(
                f"the secret {name} is not in your environment", target=target.name, hint=f"export {name}=..."
            )
        values[name] = os.environ[name]
    bundle = collect(request.source)
    python, requirements = interpreter(target, keys.requirements, trainer=not request.command)
    argv = request.command or [python or "python", "-m", "trainer", "train", "{config}"]
    slug = request.name or (request.config.stem if request.config and not request.command else _slug(argv))
    env = dict(target.env)
    if not request.command:
        # The trainer that was shipped is meant, whatever the project has of that name in its own folder.
        env["PYTHONSAFEPATH"] = "1"
    spec = RunSpec(
        run_id=make_run_id(slug, datetime.now(timezone.utc), secrets.token_hex(2)), nonce=secrets.token_hex(16),
        argv=argv, target=target.name, owner=index.owner(), bundle=bundle.hash, env=env, secrets=target.secrets,
        note=request.note, config_path=str(request.config) if request.config else None, config_text=text,
        git_commit=bundle.commit, git_diff=bundle.diff, env_hash=_env_hash(requirements) if requirements else None,
        gpus=target.gpus or [], patterns=dict(keys.patterns), specctl_version=importlib.metadata.version("specctl"),
    )  # fmt: skip
    return Plan(
        target=target, spec=spec, bundle=bundle, python=python, requirements=requirements, secrets=values,
        until=request.until, timeout_s=request.timeout_s,
    )  # fmt: skip


def interpreter(target: Target, wanted: list[str] | None, *, trainer: bool) -> tuple[str | None, list[str]]:
    """(the Python to use, or None; what to make an environment of, or nothing).

    The trainer runs on the target's own `python:`, on the interpreter that runs specctl if that is on this machine and
    has what it needs, or else in an environment made for it. A command gets one only if `requirements:` asks for it.
    """
    if wanted:
        return None, wanted
    if target.python is not None:
        return target.python, []
    if not trainer or wanted is not None:
        return None, []
    if target.ssh is None and target.vmid is None and _has_trainer_extra():
        return sys.executable, []
    return None, trainer_requirements()


def _has_trainer_extra() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors", "yaml", "pydantic"))


def trainer_requirements() -> list[str]:
    """The `trainer` extra of this very installation."""
    found = []
    for line in importlib.metadata.requires("specctl") or []:
        requirement, _, marker = line.partition(";")
        if re.search(r"extra\s*==\s*['\"]trainer['\"]", marker):
            found.append(requirement.strip())
    return found


def _env_hash(requirements: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(requirements)).encode()).hexdigest()[:16]


def _slug(argv: list[str]) -> str:
    """A name for a command: its script's, if it has one, else the program's."""
    shells = {"bash", "sh", "env", "python", "python3", "torchrun", "nohup", "exec"}
    names = [Path(word).stem for word in argv if not word.startswith("-") and len(word) < 200]
    return next((name for name in names if name not in shells), names[0] if names else "run")


def run(plan: Plan, fleet: Fleet, watcher: Watcher) -> Result:
    """Applies `plan`. Raises when nothing was started; afterwards every outcome is a `Result`."""
    agent = fleet.agent(plan.target)
    spec = plan.spec
    watcher.step(f"connecting to {plan.target.name}")
    if not agent.call("put", bundle=spec.bundle, ask=True)["present"]:
        count = len(plan.bundle.files)
        watcher.step(f"sending the code: bundle {spec.bundle}, {count} files")
        _send(agent, plan.bundle)
    if plan.requirements:
        _prepare(agent, plan, watcher)
    watcher.step(f"starting {spec.run_id}")
    started = _start(agent, plan)
    index.add(index.Launch(run_id=spec.run_id, target=plan.target.name))
    result = Result(plan=plan, log=str(started["log"]))
    _reach(result, "accepted", f"{started['root']}, bundle {spec.bundle} verified", float(started["now"]), watcher)
    _climb(result, agent, watcher)
    if not result.verified:
        result.tail = _tail(agent, spec.run_id)
    return result


def _send(agent: Agent, bundle: Bundle) -> None:
    with agent.stream("put", payload=bundle.tar(), deadline_s=3600.0, idle_s=120.0, bundle=bundle.hash) as frames:
        for _ in frames:
            pass


def _prepare(agent: Agent, plan: Plan, watcher: Watcher) -> None:
    watcher.step(f"environment {plan.spec.env_hash}: {', '.join(plan.requirements)}")
    with agent.stream(
        "prepare", deadline_s=PREPARE_S, idle_s=900.0, env_hash=plan.spec.env_hash, requirements=plan.requirements,
        python=plan.target.python,
    ) as frames:  # fmt: skip
        for frame in frames:
            if line := frame.get("line"):
                watcher.step(f"environment: {line}")


def _start(agent: Agent, plan: Plan) -> dict[str, Any]:
    fields = {"spec": to_json(plan.spec), "secrets": plan.secrets, "python": plan.python or plan.target.python}
    try:
        return agent.call("start", deadline_s=60.0, **fields)
    except UnreachableError as error:
        if isinstance(error, AgentError):
            raise
        # The reply was lost, not necessarily the request. Asking again for the same run id adopts what there is.
        try:
            return agent.call("start", deadline_s=60.0, **fields)
        except SpecctlError as again:
            raise UnreachableError(
                f"the link failed during the start ({error.message}); whether it runs is unknown ({again.message})",
                target=plan.target.name, run_id=plan.spec.run_id, hint=f"specctl status {plan.spec.run_id}",
            ) from again  # fmt: skip


def _reach(result: Result, rung: Rung, value: str, at: float, watcher: Watcher) -> None:
    if RUNGS.index(rung) > RUNGS.index(result.rung):
        result.rung = rung
    evidence = Evidence(what=rung, value=value, observed_at=at)
    result.evidence.append(evidence)
    watcher.rung(rung, evidence)


def _climb(result: Result, agent: Agent, watcher: Watcher) -> None:
    """Looks at the run until it is proven, has ended, or the time is over; fills `result`."""
    plan = result.plan
    begun = time.monotonic()
    compiling_since: float | None = None
    stepped_since: float | None = None
    seen: set[str] = {"accepted"}
    while True:
        try:
            frame = agent.call("probe", runs=[plan.spec.run_id])
        except UnreachableError as error:
            if time.monotonic() - begun > (plan.timeout_s or TIMEOUT_S):
                raise UnreachableError(
                    f"the run was started, but {plan.target.name} can no longer be asked: {error.message}",
                    run_id=plan.spec.run_id, hint=f"specctl status {plan.spec.run_id}",
                ) from error  # fmt: skip
            watcher.phase(f"{plan.target.name} does not answer", f"{error.message}; asking again")
            time.sleep(POLL_S)
            continue
        if not frame["runs"]:
            raise NotFound(
                "its run directory has vanished from the target", target=plan.target.name, run_id=plan.spec.run_id
            )
        probe = from_json(Probe, frame["runs"][0])
        verdict = health.judge(probe)
        rung, evidence = health.rung(probe, verdict)
        result.probe, result.verdict = probe, verdict
        for item in evidence:
            if item.what not in seen:
                seen.add(item.what)
                result.evidence.append(item)
                watcher.rung(item.what, item)  # type: ignore[arg-type]
        if RUNGS.index(rung) > RUNGS.index(result.rung):
            result.rung = rung
        if not verdict.live:
            result.why = f"{verdict.state}: {verdict.why}"
            # A short program may have stepped and ended well before it was looked at.
            result.verified = verdict.state == "SUCCEEDED" and plan.until == "step" and rung == "step"
            return
        now = time.monotonic()
        if verdict.state == "DEGRADED":
            result.why = f"DEGRADED: {verdict.why}"
            return
        if probe.stop is not None:
            result.why = f"somebody is stopping it: {verdict.why}"
            return
        over = verdict.state == "STOPPING"  # it has ended, and its record is about to say how
        if plan.until == "process" and not over and probe.program is not None and "process" in seen:
            result.verified = True
            return
        if rung == "step" and not over:
            stepped_since = stepped_since or now
            if now - stepped_since >= (SETTLE_S if probe.summary.steps_seen > 1 else SLOW_S):
                result.verified = True
                return
        phase = (probe.heartbeat.phase if probe.heartbeat else None) or probe.summary.phase or ""
        compiling_since = (compiling_since or now) if "compil" in phase else None
        watcher.phase(phase or verdict.state, f"{phase}: {verdict.why}" if phase else verdict.why)
        limit_s = plan.timeout_s if plan.timeout_s is not None else TIMEOUT_S
        late = now - begun > limit_s
        if late and plan.timeout_s is None and compiling_since is not None:
            late = now - compiling_since > COMPILE_S
        if late:
            result.why = f"no {plan.until} within {limit_s:.0f} s; it is still {verdict.state} ({verdict.why})"
            return
        time.sleep(POLL_S)


def _tail(agent: Agent, run_id: str) -> list[str]:
    """The last lines of this attempt's log; empty when they cannot be had: the reason of the failure matters more."""
    try:
        agent.ensure()
        lines: list[str] = []
        with agent.stream("logs", deadline_s=30.0, run_id=run_id, last=TAIL_LINES) as frames:
            for frame in frames:
                lines += [line["line"] for line in frame.get("lines", [])]
        return lines
    except SpecctlError:
        return []
