"""`launch`: ship, prepare, start, and climb the ladder of evidence until the run is proven or is not.

`plan.py` says what will be done, this does it. The run id is made here, so a start
whose reply was lost is repeated safely: the second call adopts what the first one began.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from orchestrator import gpus, health, index, inputs, wheelhouse
from orchestrator.errors import (
    AgentError,
    BundleError,
    LinkLost,
    NotFound,
    PreflightError,
    SpecctlError,
    UnreachableError,
)
from orchestrator.fleet import Fleet
from orchestrator.model import RUNGS, Evidence, Probe, Rung, Verdict, to_json
from orchestrator.plan import Plan
from orchestrator.remote import QUICK_S, Agent, understood
from orchestrator.wheelhouse import Wheelhouse

TIMEOUT_S = 600.0
COMPILE_S = 1800.0
SETTLE_S = 2.0
"""How long a run must go on before the launch counts: a program that dies at import lives that long, and a worker that
dies beside others does so a moment after their first steps."""
SLOW_S = 5.0
"""How long after its first step a run may take to show a second one before the first is taken as proof enough."""
POLL_S = 0.3
WATCH_S = 600.0
"""How long one exec watches."""
LOGOUT_S, LOGOUT_SIGNALS = 5.0, (1, 9, 15)
"""How long after the login that started it has ended a death may still be put down to that."""
PREPARE_S = 3600.0
PUT_S = 40.0
WHEELS_S = 6 * 3600.0
TAIL_LINES = 15
LOGGED_OUT = (
    "It was alive while the login that had started it lasted, and not after that. If that machine's logind ends what a "
    "login leaves behind: set KillUserProcesses=no in its /etc/systemd/logind.conf, or loginctl enable-linger the user"
)


@dataclass(kw_only=True, slots=True)
class Result:
    """What was seen of the launch."""

    plan: Plan
    log: str
    verified: bool = False
    queued: bool = False
    """It waits in line for its GPUs, as it was asked to: it starts by itself, and nobody has seen that yet."""
    rung: Rung = "none"
    evidence: list[Evidence] = field(default_factory=list)
    verdict: Verdict | None = None
    probe: Probe | None = None
    why: str = ""
    """Why it is not verified."""
    tail: list[str] = field(default_factory=list)
    interrupted: bool = False
    """Whoever watched has left; the rest is what had been seen until then."""


class Watcher(Protocol):
    """Who is told how a launch comes along."""

    def step(self, text: str) -> None:
        """Something is being done before the run exists."""

    def rung(self, rung: Rung | Literal["preflight", "claim"], evidence: Evidence) -> None:
        """A rung of the ladder was reached, or something was seen on the way to it."""

    def phase(self, phase: str, detail: str) -> None:
        """What the run is busy with: in a word or two, and with the figures of this moment."""

    def output(self, line: str) -> None:
        """A line that a command of the preparation printed: worth a glance while it passes by, and kept by nobody."""


def run(plan: Plan, fleet: Fleet, watcher: Watcher) -> Result:
    """Applies `plan`. Raises when nothing was started; afterwards every outcome is a `Result`, a Ctrl-C too."""
    agent = fleet.agent(plan.target)
    spec = plan.spec
    # Before anything can fail: after a launch that never got far, @last must not mean the one before.
    noted = index.Launch(run_id=spec.run_id, target=plan.target.name)
    index.add(noted)
    watcher.step(f"connecting to {plan.target.name}")
    refused = None
    try:
        there = agent.call(
            "put", deadline_s=PUT_S, bundle=spec.bundle, ask=True, env_hash=spec.env_hash, gpus=spec.gpus,
            wish=to_json(spec.wish) if spec.wish else None, visible=spec.env.get(gpus.VISIBLE), cuda=plan.cuda,
            bytes=plan.bundle.size, **inputs.question(plan),
        )  # fmt: skip
        try:
            _make_ready(agent, plan, there, watcher)
        except (PreflightError, BundleError) as error:
            # It leaves a record, too: a launch that failed must be found where its run would have been.
            refused = f"{error.message}\n{error.hint}" if error.hint else error.message
    except (UnreachableError, PreflightError) as error:
        # Whatever was lost or refused on the way until now, it was no start.
        index.add(dataclasses.replace(noted, refused=True))
        hint = "launch again" if isinstance(error, LinkLost) else error.hint
        raise type(error)(f"{error.message}; nothing was started", target=plan.target.name, hint=hint) from error
    if there.get("claims") and spec.wish is not None:  # what was found there must not be done without a word
        plan = dataclasses.replace(plan, spec=dataclasses.replace(spec, wish=dataclasses.replace(spec.wish, must=True)))
    watcher.step(f"starting {spec.run_id}" if refused is None else f"recording why {spec.run_id} cannot start")
    try:
        started = _start(agent, plan, refused)
    except PreflightError:
        index.add(dataclasses.replace(noted, refused=True))
        raise
    result = Result(plan=plan, log=str(started["log"]))
    for gpu in there["gpus"]:
        seen = Evidence(what="preflight", value=str(gpu), observed_at=float(started["now"]))
        result.evidence.append(seen)
        watcher.rung("preflight", seen)
    if started["never_started"] is None:
        _reach(result, "accepted", f"{started['root']}, bundle {spec.bundle} verified", float(started["now"]), watcher)
    try:
        with closing(_looks(agent, plan)) as looks:
            _climb(result, agent, looks, watcher)
        if not (result.verified or result.queued):
            result.tail = _tail(agent, spec.run_id)
    except KeyboardInterrupt:
        result.interrupted = True
        result.why = result.why or f"the watching was broken off, no {plan.until} had been proven until then"
    return result


def _make_ready(agent: Agent, plan: Plan, there: dict[str, Any], watcher: Watcher) -> None:
    """Brings what the run needs and is not `there` yet."""
    if not there["present"]:
        watcher.step(f"sending the code: bundle {plan.bundle.hash}, {len(plan.bundle.files)} files")
        there["problems"] = _send(agent, plan)
    inputs.check(plan, there["problems"])
    if not there["env"]:
        if plan.wheelhouse is not None:
            _send_wheels(agent, plan.wheelhouse, watcher)
        _prepare(agent, plan, watcher)


def _send(agent: Agent, plan: Plan) -> list[dict[str, Any]]:
    """Sends the code; what it would read there and not find."""
    bundle = plan.bundle
    with agent.stream(
        "put", payload=bundle.tar(), deadline_s=3600.0, idle_s=120.0, bundle=bundle.hash, **inputs.question(plan)
    ) as frames:
        *_, last = frames
    return list(last["problems"])


def _send_wheels(agent: Agent, house: Wheelhouse, watcher: Watcher) -> None:
    """Sends the files that are not there yet, and tells how far it is by what has arrived."""
    missing: list[str] = []
    with agent.stream("wheels", deadline_s=WHEELS_S, idle_s=120.0, wheels=house.listing(), ask=True) as frames:
        for frame in frames:
            if name := frame.get("checking"):
                watcher.output(f"wheelhouse: looking at {name}, which is there already")
            missing = frame.get("missing_wheels", missing)
    wheels = [wheel for wheel in house.wheels if wheel.name in missing]
    total = sum(wheel.size for wheel in wheels)
    there = len(house.wheels) - len(wheels)
    watcher.step(
        f"wheelhouse {house.shown}: sending {len(wheels)} of {len(house.wheels)} files, {total / (1 << 20):,.1f} MiB"
        + (f"; {there} there already" if there else "")
    )
    if not wheels:
        return
    listing = [(wheel.name, wheel.sha256, wheel.size) for wheel in wheels]
    begun = time.monotonic()
    with agent.stream(
        "wheels", payload=wheelhouse.tar(wheels), deadline_s=WHEELS_S, idle_s=120.0, wheels=listing
    ) as frames:
        for frame in frames:
            if name := frame.get("receiving"):
                arrived, spent_s = int(frame["received"]), time.monotonic() - begun
                watcher.output(
                    f"wheelhouse: {arrived / (1 << 20):,.0f} of {total / (1 << 20):,.0f} MiB, "
                    f"{arrived / (1 << 20) / max(spent_s, 0.01):,.0f} MiB/s  {name}"
                )


def _prepare(agent: Agent, plan: Plan, watcher: Watcher) -> None:
    watcher.step(f"environment {plan.spec.env_hash}: {', '.join(plan.requirements)}")
    with agent.stream(
        "prepare", deadline_s=PREPARE_S, idle_s=900.0, env_hash=plan.spec.env_hash, requirements=plan.requirements,
        python=plan.target.python,
        wheels=plan.wheelhouse.listing() if plan.wheelhouse else None,
        wheelhouse=plan.wheelhouse.shown if plan.wheelhouse else None,
    ) as frames:  # fmt: skip
        for frame in frames:
            if step := frame.get("step"):
                watcher.step(f"environment: {step}")
            elif line := frame.get("line"):
                watcher.output(f"environment: {line}")


def _start(agent: Agent, plan: Plan, refused: str | None) -> dict[str, Any]:
    python = plan.python or plan.target.python
    fields = {"spec": to_json(plan.spec), "secrets": plan.secrets, "python": python, "refused": refused}
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


def _looks(agent: Agent, plan: Plan) -> Generator[dict[str, Any] | UnreachableError, None, None]:
    """What is seen of the run, again and again, over one exec for as long as that holds; in between why it did not."""
    runs = [plan.spec.run_id]
    quick_s = QUICK_S if plan.timeout_s is None else max(5.0, min(QUICK_S, plan.timeout_s))
    while True:
        try:
            with agent.stream(
                "probe", deadline_s=WATCH_S + QUICK_S, idle_s=quick_s, runs=runs, every_s=POLL_S, for_s=WATCH_S
            ) as frames:
                yield from frames
                continue
        except UnreachableError as error:
            yield error
        time.sleep(POLL_S)
        try:
            yield agent.call("probe", deadline_s=quick_s, runs=runs)  # which also brings an agent that has vanished
        except UnreachableError as error:
            yield error


def _climb(result: Result, agent: Agent, looks: Iterator[dict[str, Any] | UnreachableError], watcher: Watcher) -> None:
    """Looks at the run until it is proven, has ended, or the time is over; fills `result`."""
    plan = result.plan
    begun = time.monotonic()
    compiling_since: float | None = None
    proven_since: float | None = None
    # A login that ends may take along all that it started. So the proof is watched over a second one.
    plain_ssh = plan.target.ssh is not None and plan.target.vmid is None
    if plain_ssh:
        agent.transport.close()
    limit_s = plan.timeout_s if plan.timeout_s is not None else TIMEOUT_S
    seen = {item.what for item in result.evidence}
    for frame in looks:
        if isinstance(frame, UnreachableError):
            if time.monotonic() - begun > limit_s:
                raise UnreachableError(
                    f"the run was started, but {plan.target.name} can no longer be asked: {frame.message}",
                    run_id=plan.spec.run_id, hint=f"specctl status {plan.spec.run_id}",
                ) from frame  # fmt: skip
            watcher.phase(f"{plan.target.name} does not answer", f"{frame.message}; asking again")
            continue
        if not frame["runs"]:
            raise NotFound(
                "its run directory has vanished from the target", target=plan.target.name, run_id=plan.spec.run_id
            )
        probe = understood(Probe, frame["runs"][0], plan.target)
        verdict = health.judge(probe)
        rung, evidence = health.rung(probe, verdict)
        result.probe, result.verdict = probe, verdict
        if RUNGS.index(rung) > RUNGS.index(result.rung):
            result.rung = rung
        for item in [*evidence, *_claim(probe)]:
            if item.what not in seen:
                seen.add(item.what)
                result.evidence.append(item)
                watcher.rung(item.what, item)  # type: ignore[arg-type]
        if not verdict.live:
            result.why = f"{verdict.state}: {verdict.why}"
            if plain_ssh and _ended_from_outside(probe, verdict) and time.monotonic() - begun < LOGOUT_S:
                result.why += f"\n{LOGGED_OUT}"
            # A short program may have stepped and ended well before it was looked at.
            result.verified = verdict.state == "SUCCEEDED" and plan.until == "step" and rung == "step"
            if verdict.state == "SUCCEEDED" and not result.verified:
                result.why += f"\nit was over before a {plan.until} was seen{_without_steps(plan, verdict)}"
            return
        if verdict.state == "QUEUED" and probe.in_line is not None:
            result.queued, result.why = True, verdict.why
            return
        now = time.monotonic()
        if verdict.state == "DEGRADED":
            result.why = f"DEGRADED: {verdict.why}"
            return
        if probe.stop is not None:
            result.why = f"somebody is stopping it: {verdict.why}"
            return
        over = verdict.state == "STOPPING"  # it has ended, and its record is about to say how
        proven = RUNGS.index(rung) >= RUNGS.index(plan.until)  # whoever of the run lives: it may have left its first
        if proven and not over:
            if proven_since is None:
                proven_since = now
            enough = plan.until == "process" or probe.summary.steps_seen > 1
            if now - proven_since >= (SETTLE_S if enough else SLOW_S):
                result.verified = True
                return
        phase = (probe.heartbeat.phase if probe.heartbeat else None) or probe.summary.phase or ""
        compiling_since = (compiling_since or now) if "compil" in phase else None
        if proven and not over:
            watcher.phase("watching it go on", f"watching it go on: {verdict.why}")
        else:
            watcher.phase(phase or verdict.state, verdict.why if phase in verdict.why else f"{phase}: {verdict.why}")
        late = now - begun > limit_s
        if late and plan.timeout_s is None and compiling_since is not None:
            late = now - compiling_since > COMPILE_S
        if late and not proven:
            missing = health.missing(probe, verdict)
            result.why = f"no {plan.until} within {limit_s:.0f} s ({missing}); it is {verdict.state}: {verdict.why}"
            result.why += _without_steps(plan, verdict)
            return


def _claim(probe: Probe) -> list[Evidence]:
    """The GPUs that the run has to itself, as its living supervisor has them locked."""
    claim = probe.gpu_claim
    if claim is None or not claim.held or not probe.supervisor_alive:
        return []
    held = ", ".join(f"{one.number} ({one.uuid})" for one in claim.held)
    return [Evidence(what="claim", value=f"GPU {held}, locked in {claim.claims_dir}", observed_at=probe.observed_at)]


def _ended_from_outside(probe: Probe, verdict: Verdict) -> bool:
    """As logind ends what a login has left: by a signal that says nothing else, and mostly the supervisor first."""
    killed = probe.exit is not None and not probe.exit.oom_kills and probe.exit.signal in LOGOUT_SIGNALS
    return verdict.state == "LOST" or (verdict.state == "KILLED" and killed)


def _without_steps(plan: Plan, verdict: Verdict) -> str:
    """What to do where a program of somebody's own was waited on for a step, and has printed none."""
    if plan.until == "process" or plan.spec.trainer or verdict.step is not None:
        return ""
    return "; for a program without steps: --until process; for step lines of another form: docs/step-lines.md"


def _tail(agent: Agent, run_id: str) -> list[str]:
    """The last lines of this attempt's log; empty when they cannot be had: the reason of the failure matters more."""
    try:
        agent.ensure()
        lines: list[str] = []
        with agent.stream("logs", deadline_s=30.0, run_id=run_id, last=TAIL_LINES) as frames:
            for frame in frames:
                lines += frame.get("raw", b"").decode(errors="replace").split("\n")[:-1]
        return lines
    except SpecctlError:
        return []
