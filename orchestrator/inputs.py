"""Asks a target whether what the program reads is there, and says what is not and how to bring it."""

from __future__ import annotations

from pathlib import Path

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


def _hint(plan: Plan, problem: dict[str, str]) -> str:
    path, config = problem["path"], plan.spec.config_path
    mend = f"correct {problem['key']} in {config}"
    if not path:
        return mend
    if not path.startswith(("/", "~", "$")):
        return f"{mend}: a relative path is one of the files that are shipped (those that git does not ignore)"
    if plan.target.ssh is None and plan.target.vmid is None:
        return f"put it there, or {mend}"
    source = path if Path(path).expanduser().exists() else "SRC"
    return f"specctl push {plan.target.name} {source} {path}, or {mend}"
