"""Many targets at once: one connection a node, one exec for all its containers, one row for what cannot answer."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import field
from functools import partial
from typing import Any

from orchestrator import frames
from orchestrator.crew import Crew
from orchestrator.errors import SpecctlError
from orchestrator.inventory import Inventory, Target
from orchestrator.model import Probe
from orchestrator.record import record
from orchestrator.remote import Agent, understood
from orchestrator.transport import Leg, NodePool, Request, fanout, open_transport

LEG_S = 20.0
PARALLEL_LEGS = 8
PARALLEL_NODES = 32


@record
class TargetView:
    """What one look at one target saw, or why it saw nothing."""

    target: Target
    error: SpecctlError | None = None
    now: float | None = None
    """The target's own clock."""
    runs: list[Probe] = field(default_factory=list)
    older: int = 0
    gpus: list[dict[str, Any]] = field(default_factory=list)
    gpus_error: str | None = None
    no_workdir: bool = False
    """Its workdir does not exist: nothing was ever launched there, and its GPUs were not asked for."""


class Fleet:
    """The targets of an inventory, and the connections to their nodes."""

    def __init__(self, inventory: Inventory, *, accept_new: bool = False) -> None:
        self.inventory = inventory
        self.pool = NodePool(ssh_config=inventory.ssh_config, accept_new=accept_new)

    def close(self) -> None:
        self.pool.close()

    def agent(self, target: Target) -> Agent:
        return Agent(target, open_transport(target, self.pool))

    def probe(
        self,
        targets: Sequence[Target],
        *,
        run_ids: list[str] | None = None,
        ended_within_s: float | None = None,
        gpus: bool = False,
        tell: Callable[[TargetView], None] = lambda view: None,
    ) -> list[TargetView]:
        """One look at each of `targets`, in their order. Never raises for a target: its view carries the error.

        `tell` gets each view as soon as it has come, whatever the others do, from several threads at once.
        """
        request = {"runs": run_ids, "ended_within_s": ended_within_s, "gpus": gpus}
        if run_ids is None:
            del request["runs"]
        # Containers of one node share one exec; everything else is asked by itself, all at the same time.
        nodes: dict[str | None, list[Target]] = {}
        alone: list[Target] = []
        for target in targets:
            (nodes.setdefault(target.ssh, []) if target.vmid is not None else alone).append(target)
        shared = {node: group for node, group in nodes.items() if len(group) > 1}
        alone += [target for node, group in nodes.items() if node not in shared for target in group]
        crew = Crew(PARALLEL_NODES)
        single = [crew.do(partial(self._ask, target, request, tell)) for target in alone]
        grouped = [crew.do(partial(self._ask_node, node, group, request, tell)) for node, group in shared.items()]
        views = {view.target.name: view for one in single for view in [one.result()]}
        views |= {view.target.name: view for several in grouped for view in several.result()}
        return each_run_once([views[target.name] for target in targets])

    def _ask(
        self, target: Target, request: dict[str, Any], tell: Callable[[TargetView], None], *, first: bool = False
    ) -> TargetView:
        """One look at one target; `first`: it is known to have no agent yet."""
        try:
            agent = self.agent(target)
            if first:
                agent.install("probe")
            view = _view(target, agent.call("probe", **request))
        except SpecctlError as error:
            view = TargetView(target=target, error=error)
        tell(view)
        return view

    def _ask_node(
        self, node: str | None, group: list[Target], request: dict[str, Any], tell: Callable[[TargetView], None]
    ) -> list[TargetView]:
        agents = [self.agent(target) for target in group]
        tokens = [secrets.token_hex(8) for _ in group]
        asked = [
            Request(
                vmid=target.vmid, argv=agent.argv(), stdin=agent.request("probe", token, LEG_S, **request),
                attach=target.attach, target=target.name,
            )
            for target, agent, token in zip(group, agents, tokens, strict=True)
        ]  # fmt: skip
        views: dict[str, TargetView] = {}
        # Those met for the first time are sent the agent, each as soon as it asks for it, while the others answer.
        crew, first_met = Crew(PARALLEL_LEGS), list[Future[TargetView]]()
        try:
            transport = self.pool.node(node, target=node or "this machine")
            for leg in fanout(transport, asked, leg_timeout_s=LEG_S, parallel=PARALLEL_LEGS, ssh=node):
                target = group[leg.index]
                view = _answer(target, agents[leg.index], tokens[leg.index], leg)
                if view is None:
                    first_met.append(crew.do(partial(self._ask, target, request, tell, first=True)))
                else:
                    views[target.name] = view
                    tell(view)
        except SpecctlError as error:
            for target in group:
                if target.name not in views:
                    views[target.name] = TargetView(target=target, error=error)
                    tell(views[target.name])
        views |= {view.target.name: view for one in first_met for view in [one.result()]}
        return [views[target.name] for target in group]


def _answer(target: Target, agent: Agent, token: str, leg: Leg) -> TargetView | None:
    """What one leg saw; None: there is no agent yet."""
    if isinstance(leg.result, SpecctlError):
        return TargetView(target=target, error=leg.result)
    reader = frames.FrameReader(token)
    final = next((frame for frame in reader.feed(leg.result.stdout) if frame.get("final")), None)
    try:
        if final is None:
            raise agent.unanswered(leg.result, reader)
        return None if final.get("missing") == "agent" else _view(target, agent.checked(final))
    except SpecctlError as error:
        return TargetView(target=target, error=error)


def each_run_once(views: list[TargetView]) -> list[TargetView]:
    """Two targets may be one place under two names; a run belongs to the one it was launched on, else to the first."""
    seen: dict[str, str] = {}
    for view in views:
        for probe in view.runs:
            if probe.nonce not in seen or probe.target == view.target.name:
                seen[probe.nonce] = view.target.name
    return [
        dataclasses.replace(view, runs=[probe for probe in view.runs if seen[probe.nonce] == view.target.name])
        for view in views
    ]


@record
class _Answer:
    """The final frame of a probe."""

    now: float
    runs: list[Probe]
    older: int
    gpus: list[dict[str, Any]]
    gpus_error: str | None


def _view(target: Target, frame: dict[str, Any]) -> TargetView:
    answer = understood(_Answer, frame, target)
    return TargetView(
        target=target, now=answer.now, runs=answer.runs, older=answer.older, gpus=answer.gpus,
        gpus_error=answer.gpus_error, no_workdir=frame.get("missing") == "workdir",
    )  # fmt: skip
