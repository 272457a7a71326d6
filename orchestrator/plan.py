"""What a launch will do, as a value: everything that can be decided before the target is asked.

`plan` reads the configuration, bundles the code and chooses the interpreter; `verbs/launch.py` applies what it made.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import secrets
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import Field

from orchestrator import index, logscan
from orchestrator.bundle import Bundle, collect
from orchestrator.errors import ConfigError
from orchestrator.inventory import Inventory, Target
from orchestrator.model import RunSpec, make_run_id
from typedyaml import Model, Str, TypedYamlError, load

Until = Literal["process", "step"]


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


class LaunchKeys(Model, extra="ignore"):
    """The keys of a configuration that are specctl's; the program reads the others by itself."""

    requirements: list[Str] | None = None
    patterns: dict[Str, Str] = Field(default_factory=dict)


def plan(request: Request, inventory: Inventory) -> Plan:
    """Everything that can be decided without asking the target. Raises `ConfigError`, `BundleError`, `NotFound`."""
    target = inventory.resolve(request.target)
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
        argv=argv, trainer=not request.command, target=target.name, owner=index.owner(), bundle=bundle.hash, env=env,
        secrets=target.secrets,
        note=request.note, config_path=str(request.config) if request.config else None, config_text=text,
        git_commit=bundle.commit, git_diff=bundle.diff,
        env_hash=_env_hash(requirements, target.python) if requirements else None,
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


def _env_hash(requirements: list[str], python: str | None) -> str:
    return hashlib.sha256("\n".join([python or "", *sorted(requirements)]).encode()).hexdigest()[:16]


def _slug(argv: list[str]) -> str:
    """A name for a command: its script's, if it has one, else the program's."""
    shells = {"bash", "sh", "env", "python", "python3", "torchrun", "nohup", "exec"}
    names = [Path(word).stem for word in argv if not word.startswith("-") and len(word) < 200]
    return next((name for name in names if name not in shells), names[0] if names else "run")
