"""`doctor`: what is amiss with a target, and the command that mends it; asked of a plain shell, nothing is sent.

The way there comes first (`doctor/reach.py`), then one exec of a script of sh (`doctor/script.py`); what it printed is
judged here (`doctor/checks.py`). A container costs one exec more, on its node.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator import pythons
from orchestrator.crew import Crew
from orchestrator.doctor import checks, machine, reach, report, script
from orchestrator.doctor.check import Examined, Outcome, Rung
from orchestrator.doctor.hands import Hands
from orchestrator.doctor.report import Report
from orchestrator.errors import ConfigError, DeadlineExceeded, NoAnswer, SpecctlError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.transport import Completed, Transport, open_transport, ssh_config
from orchestrator.transport.pct_errors import Entrance, Seen, seen_in

PARALLEL = 32
NODE_S = 30.0
QUICK_S, FULL_S = 45.0, 150.0
"""Every step of the script has a limit of its own; this is for what can not be ended, as a disk that hangs."""
NOW = re.compile(r" (?:python-says T )?now (\d+(?:\.\d+)?)$", re.MULTILINE)
"""`date` tells whole seconds, Python more; and Python's is the clock that a run's records go by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One target, and what was found there."""

    examined: Examined
    found: list[tuple[str, Outcome]]
    """(check, what it found), in the order of the round."""
    took_s: float

    @property
    def target(self) -> Target:
        return self.examined.target

    @property
    def reached(self) -> bool:
        return self.examined.report is not None

    def count(self, status: str) -> int:
        return sum(outcome.status == status for _, outcome in self.found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    views: list[View]
    quick: bool

    @property
    def exit_code(self) -> int:
        if not all(view.reached for view in self.views):
            return 3
        return int(any(view.count("fail") for view in self.views))


def run(fleet: Fleet, names: Sequence[str], *, quick: bool = False, limit_s: float | None = None) -> Result:
    """`names` are targets and groups; none: all. What keeps a target from being asked is among what was found, and so
    is what it was busy with when `limit_s` was over; raises `NotFound` for a name that hosts.yaml does not have."""
    limit_s = limit_s or (QUICK_S if quick else FULL_S)
    targets = fleet.inventory.expand(names) if names else list(fleet.inventory.targets.values())
    crew = Crew(PARALLEL)
    answers = [crew.do(partial(_view, fleet, target, quick, limit_s)) for target in targets]
    return Result(views=[answer.result() for answer in answers], quick=quick)


def _view(fleet: Fleet, target: Target, quick: bool, limit_s: float) -> View:
    begun = time.monotonic()
    examined = _examined(fleet, target, quick, limit_s)
    return View(examined=examined, found=list(checks.examine(examined)), took_s=time.monotonic() - begun)


def _examined(fleet: Fleet, target: Target, quick: bool, limit_s: float) -> Examined:
    hands = Hands(target=target, ssh=_ssh(fleet, target))
    local = target.ssh is None and target.vmid is None
    node, container = None, None
    begun = time.monotonic()

    def broken(rung: Rung, error: SpecctlError) -> Examined:
        return Examined(target=target, hands=hands, node=node, broken=rung, error=error, quick=quick, local=local)

    try:
        if target.vmid is not None:
            node, said = _look_at_node(fleet, target, target.vmid, quick, limit_s)
            container = seen_in(said)
            hands = _hands(hands, node)
            if not node.answered:
                return broken("shell", _silent_shell(target, said))
        connected_s = time.monotonic() - begun
        seen, clock_s = _look_inside(open_transport(target, fleet.pool), target, quick, limit_s, local)
    except SpecctlError as error:
        if node is not None and container is not None and target.vmid is not None:
            return broken(reach.of_container(container, frozen="frozen" in node.facts, vmid=target.vmid), error)
        return broken("shell" if isinstance(error, NoAnswer) else reach.of_error(error), error)
    examined = Examined(
        target=target, hands=_hands(hands, seen, node), node=node, report=seen, connected_s=connected_s,
        clock_s=clock_s, quick=quick, local=local,
    )  # fmt: skip
    if seen.looked_at("python") and any(outcome.status == "fail" for outcome in machine.python(examined)):
        hint = pythons.hint(open_transport(target, fleet.pool), target.user)
        examined = dataclasses.replace(examined, python_hint=hint)
    return examined


def _ssh(fleet: Fleet, target: Target) -> list[str]:
    if target.ssh is None:
        return []
    try:
        return ssh_config.typed(target.ssh, fleet.inventory.ssh_config)
    except ConfigError:  # which the first rung tells
        return ["ssh", target.ssh]


def _hands(hands: Hands, seen: Report, node: Report | None = None) -> Hands:
    login = (node or seen).one("login", hands.login)
    return Hands(
        target=hands.target, ssh=hands.ssh, login=login, manager=seen.one("manager") or hands.manager
    )


def _look_at_node(fleet: Fleet, target: Target, vmid: int, quick: bool, limit_s: float) -> tuple[Report, str]:
    """(what the node says, all that it printed)"""
    token = f"specctl-{secrets.token_hex(8)}"
    way = fleet.pool.node(target.ssh, target=target.name)
    done = way.run(script.on_node(token, vmid=vmid, quick=quick), deadline_s=min(NODE_S, limit_s))
    said = done.stdout.decode("utf-8", "replace")
    found = report.read(said, token)
    if not found.answered and (error := way.explain(done)) is not None:
        raise error
    return found, said if found.answered else f"{said}\n{done.stderr.decode('utf-8', 'replace')}"


def _look_inside(
    way: Transport, target: Target, quick: bool, limit_s: float, local: bool
) -> tuple[Report, tuple[float, float] | None]:
    """What the target says, and how far its clock is ahead: at least, at most. Raises why it says nothing at all; an
    answer that breaks off is one."""
    token = f"specctl-{secrets.token_hex(8)}"
    argv = script.on_target(
        token, user=target.user, workdir=target.workdir, quick=quick, env=target.env, gpus=target.gpus,
        python=target.python or (sys.executable if local else None),
    )  # fmt: skip
    said, broke, clock_s = bytearray(), "", None
    began = time.time()
    with way.stream(argv, deadline_s=limit_s) as stream:
        try:
            for chunk in stream:
                arrived, told = time.time(), NOW.findall(chunk.decode("utf-8", "replace"))
                if told:
                    now = told[-1]
                    clock_s = float(now) - arrived, float(now) + ("." not in now) - began
                said += chunk
        except DeadlineExceeded as error:
            broke = error.message
        except SpecctlError as error:
            if not said:
                raise
            broke = error.message
        found = report.read(said.decode("utf-8", "replace"), token, broke=broke)
        if not found.answered:
            done = Completed(exit_code=stream.exit_code, stdout=b"", stderr=stream.stderr, why_unknown=broke or None)
            raise way.explain(done) or _silent(target, bytes(said) + stream.stderr, broke)
    return found, clock_s


def _silent(target: Target, said: bytes, broke: str) -> SpecctlError:
    if broke:
        return DeadlineExceeded(broke, target=target.name, hint="the machine, or a shell start-up file there, hangs")
    return _silent_shell(target, said.decode("utf-8", "replace"))


def _silent_shell(target: Target, said: str) -> SpecctlError:
    what, mend = Entrance(vmid=target.vmid or 0, ssh=target.ssh, attach=target.attach).reason(
        said, None, Seen(answered=False)
    ) or ("", "")
    return NoAnswer(what, target=target.name, hint=mend)
