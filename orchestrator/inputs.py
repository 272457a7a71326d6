"""What the program reads: how a target is asked whether it is there, and what is said of what is not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from orchestrator.errors import PreflightError
from orchestrator.model import to_json
from orchestrator.plan import Plan

SHOWN = 5


def question(plan: Plan) -> dict[str, Any]:
    """What goes along with the code, for the agent to look at what it will read."""
    if not plan.inputs:
        return {}
    python = plan.python or plan.target.python
    return {"spec": to_json(plan.spec), "inputs": plan.inputs, "secrets": plan.secrets, "python": python}


def check(plan: Plan, problems: list[dict[str, Any]]) -> None:
    """Raises `PreflightError` with every problem that the agent has found at once."""
    if not problems:
        return
    said = "; ".join(f"{problem['key']}: {problem['why']}" for problem in problems[:SHOWN])
    if len(problems) > SHOWN:
        said += f"; and {len(problems) - SHOWN} more"
    raise PreflightError(f"on {plan.target.name}, {said}", hint=_hint(plan, problems[0]))


def _hint(plan: Plan, problem: dict[str, Any]) -> str:
    """How to mend the first of them: by the command that brings it, where it is a place on the target."""
    key, place = problem["key"], problem["place"]
    written = plan.reads.get(key, "")
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
