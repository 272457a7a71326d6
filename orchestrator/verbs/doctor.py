"""`doctor`: what is amiss with a target, and the command that mends it; asked of a plain shell, nothing is sent.

The way there comes first (`doctor/reach.py`), then one exec of a script of sh (`doctor/script.py`); what it printed is
judged here (`doctor/checks.py`). A container costs one exec more, on its node.
"""

from __future__ import annotations

import dataclasses
import os
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
from orchestrator.errors import ConfigError, DeadlineExceeded, NoAnswer, SpecctlError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.transport import Completed, Transport, open_transport, ssh_config
from orchestrator.transport.pct_errors import Entrance, Seen, seen_in

PARALLEL = 32
NODE_S = 30.0
QUICK_S, FULL_S = 45.0, 150.0
"""Every step of the script has a limit of its own; this is for what can not be ended, as a disk that hangs."""
FLOOD_BYTES = 16 << 20
"""More than that no script tells: a start-up file of the shell prints, and may go on for ever."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What came back of a script."""

    report: Report
    text: str
    """All of it, with what is no fact of the script's."""
    clock_s: tuple[float, float] | None
    """How far the clock there is ahead: at least, at most."""


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
            told = _ask_node(fleet, target, target.vmid, quick, limit_s)
            node, container = told.report, seen_in(told.text)
            hands = _hands(hands, node)
            if not node.looked_at("pve"):
                why = f"the look at pct and /etc/pve hangs: {node.broke}"
                mend = hands.on_node("systemctl restart pve-cluster")
                return broken("pct", UnreachableError(why, target=target.name, hint=mend))
        connected_s = time.monotonic() - begun
        told = _ask(open_transport(target, fleet.pool), target, quick, limit_s, local)
    except SpecctlError as error:
        if node is not None and container is not None and target.vmid is not None:
            return broken(reach.of_container(container, frozen="frozen" in node.facts, vmid=target.vmid), error)
        return broken("shell" if isinstance(error, NoAnswer) else reach.of_error(error), error)
    examined = Examined(
        target=target, hands=_hands(hands, told.report, node), node=node, report=told.report,
        connected_s=connected_s, clock_s=told.clock_s, quick=quick, local=local,
    )  # fmt: skip
    if told.report.looked_at("python") and any(outcome.status == "fail" for outcome in machine.python(examined)):
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


def _ask_node(fleet: Fleet, target: Target, vmid: int, quick: bool, limit_s: float) -> Told:
    token = f"specctl-{secrets.token_hex(8)}"
    argv = script.on_node(token, vmid=vmid, quick=quick)
    return _told(fleet.pool.node(target.ssh, target=target.name), target, argv, token, min(NODE_S, limit_s))


def _ask(way: Transport, target: Target, quick: bool, limit_s: float, local: bool) -> Told:
    token = f"specctl-{secrets.token_hex(8)}"
    argv = script.on_target(
        token, user=target.user, workdir=target.workdir, quick=quick, env=target.env, gpus=target.gpus,
        python=target.python or (sys.executable if local else None),
        home=os.environ.get("HOME", "") if local and target.user is None else "",
    )  # fmt: skip
    return _told(way, target, argv, token, limit_s)


def _told(way: Transport, target: Target, argv: list[str], token: str, limit_s: float) -> Told:
    """What a script told, be it only a part. Raises why it told nothing at all."""
    said, broke, clock_s = bytearray(), "", None
    began = time.time()
    with way.stream(argv, deadline_s=limit_s) as stream:
        try:
            for chunk in stream:
                arrived, times = time.time(), NOW.findall(chunk.decode("utf-8", "replace"))
                if times:
                    now = times[-1]
                    clock_s = float(now) - arrived, float(now) + ("." not in now) - began
                said += chunk
                if len(said) > FLOOD_BYTES:
                    broke = f"it prints without end: {FLOOD_BYTES >> 20} MiB so far"
                    break
        except SpecctlError as error:
            if not said and not isinstance(error, DeadlineExceeded):
                raise
            broke = error.message
        text = said.decode("utf-8", "replace")
        found = report.read(text, token, broke=broke)
        if not found.answered:
            done = Completed(exit_code=stream.exit_code, stdout=b"", stderr=stream.stderr, why_unknown=broke or None)
            text += stream.stderr.decode("utf-8", "replace")
            raise way.explain(done) or _silent(target, text, broke)
    return Told(report=found, text=text, clock_s=clock_s)


def _silent(target: Target, said: str, broke: str) -> SpecctlError:
    """What to say of a shell that ran nothing."""
    if len(said) > FLOOD_BYTES:
        hint = "a start-up file of that shell (~/.bashrc) prints it: it should be silent where nobody types"
        return NoAnswer(f"the login shell {broke.removeprefix('it ')}", target=target.name, hint=hint)
    if broke:
        return DeadlineExceeded(broke, target=target.name, hint="the machine, or a shell start-up file there, hangs")
    entrance = Entrance(vmid=target.vmid or 0, ssh=target.ssh, attach=target.attach)
    what, mend = entrance.reason(said, None, Seen(answered=False)) or ("", "")
    return NoAnswer(what, target=target.name, hint=mend)
