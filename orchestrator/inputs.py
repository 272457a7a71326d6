"""Asks a target whether what the program reads is there, and says what is not and how to bring it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from orchestrator.errors import PreflightError
from orchestrator.model import to_json
from orchestrator.plan import Plan
from orchestrator.remote import Agent

SHOWN = 5


def check(agent: Agent, plan: Plan) -> None:
    """Raises `PreflightError` with every problem at once. The code must be on the target already."""
    if not plan.inputs:
        return
    answer = agent.call(
        "preflight", spec=to_json(plan.spec), inputs=plan.inputs, secrets=plan.secrets,
        python=plan.python or plan.target.python,
    )  # fmt: skip
    problems = answer["problems"]
    if not problems:
        return
    said = "; ".join(f"{problem['key']}: {problem['why']}" for problem in problems[:SHOWN])
    if len(problems) > SHOWN:
        said += f"; and {len(problems) - SHOWN} more"
    raise PreflightError(f"on {plan.target.name}, {said}", hint=_hint(plan, problems[0]))


def _hint(plan: Plan, problem: dict[str, Any]) -> str:
    """How to mend the first of them: by the command that brings it, where it is a place on the target."""
    key, place = problem["key"], problem["place"]
    written = {**plan.inputs.get("model", {}), **plan.inputs.get("files", {})}.get(key, "")
    mend = f"correct {key} in {plan.spec.config_path}"
    if written and not written.startswith(("/", "~", "$")):
        return f"{mend}: a relative path is one of the files that are shipped (those that git does not ignore)"
    if place is None:
        return mend
    if not problem["bring"] or (plan.target.ssh is None and plan.target.vmid is None):
        return f"mend it there, or {mend}"
    here = Path(written).expanduser()
    source = str(here) if here.exists() else "SRC"
    return f"specctl push {plan.target.name} {shlex.quote(source)} {shlex.quote(place)}, or {mend}"
