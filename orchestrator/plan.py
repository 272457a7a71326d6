"""What a launch will do, as a value: everything that can be decided before the target is asked.

`plan` reads the configuration, bundles the code and chooses the interpreter; `verbs/launch.py` applies what it made.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from orchestrator import index, logscan, naming, wheelhouse
from orchestrator.bundle import Bundle, collect
from orchestrator.errors import ConfigError
from orchestrator.inventory import HostsFile, Inventory, Target
from orchestrator.model import RunSpec, make_run_id, slugify
from orchestrator.wheelhouse import Wheelhouse
from typedyaml import Model, ProblemAt, Str, TypedYamlError, load

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
    wheelhouse: Path | None = None
    """The folder of wheels that the environment is made from, and from nothing else."""


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
    wheelhouse: Wheelhouse | None
    secrets: dict[str, str]
    until: Until
    timeout_s: float | None
    inputs: dict[str, Any]
    """What the program reads on the target and must find there: `files` and `model`, each by its key; `wanted`."""


class LaunchKeys(Model):
    """The keys of a configuration that are specctl's."""

    requirements: list[Str] | None = None
    patterns: dict[Str, Str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _patterns_can_be_read(self) -> LaunchKeys:
        for name, text in self.patterns.items():
            try:
                logscan.Scanner(patterns={name: text})
            except ValueError as error:
                said = re.sub(rf"^patterns: ({re.escape(name)}: )?", "", str(error))  # the key is named already
                raise ProblemAt(("patterns", name), said) from None
        return self


class CommandKeys(LaunchKeys):
    """All that a configuration may hold beside a command."""

    data: list[Str] = Field(default_factory=list)
    """What the command reads on the target: looked for there before anything is started."""


class TrainerKeys(LaunchKeys, extra="ignore"):
    """The same keys of a trainer's configuration, which reads the others by itself."""


def plan(request: Request, inventory: Inventory) -> Plan:
    """Everything that can be decided without asking the target. Raises `ConfigError`, `BundleError`, `NotFound`."""
    target = inventory.resolve(request.target)
    if not request.config and not request.command:
        raise ConfigError(
            "nothing to launch: give --config FILE for the trainer, or a command after --",
            hint="specctl launch [TARGET] --config FILE, or specctl launch [TARGET] -- CMD...",
        )
    if request.command and not request.command[0].strip():
        raise ConfigError("the command after -- has an empty name", hint="specctl launch [TARGET] -- CMD...")
    if request.name is not None and (problem := naming.problem(request.name)):
        raise ConfigError(f"--name {request.name[:60]!r}: {problem}", hint=f"--name {slugify(request.name)}")
    keys, text, inputs = LaunchKeys(), None, {}
    if request.config is not None:
        keys, text, inputs = read_config(request.config, trainer=not request.command)
    values = {}
    for name in target.secrets:
        if name not in os.environ:
            raise ConfigError(
                f"the secret {name} is not in your environment",
                target=target.name, hint=f"export {name}=..., or take it out of secrets: in {inventory.source}",
            )
        values[name] = os.environ[name]
    workdir = [Path(target.workdir).expanduser()] if target.ssh is None and target.vmid is None else []
    bundle = collect(request.source, without=[*workdir, index.folder()])
    python, requirements = interpreter(target, keys.requirements, trainer=not request.command)
    house = None
    if request.wheelhouse is not None:
        if not requirements:
            raise _nothing_to_install(target, python)
        house = wheelhouse.collect(request.wheelhouse)
    argv = request.command or [python or "python", "-m", "trainer", "train", "{config}"]
    slug = request.name or (request.config.stem if request.config and not request.command else naming.name_of(argv))
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
        env_hash=_env_hash(requirements, target.python, house) if requirements else None,
        gpus=target.gpus or [], patterns=dict(keys.patterns), specctl_version=importlib.metadata.version("specctl"),
    )  # fmt: skip
    return Plan(
        target=target, spec=spec, bundle=bundle, python=python, requirements=requirements,
        wheelhouse=house, secrets=values, until=request.until, timeout_s=request.timeout_s,
        inputs=inputs,
    )  # fmt: skip


def _nothing_to_install(target: Target, python: str | None) -> ConfigError:
    why = f"the program runs on {python} as it is" if python else "the command needs no environment"
    return ConfigError(
        f"--wheelhouse is for making an environment, and none is made: {why}", target=target.name,
        hint="list what to install as requirements: in the file of --config",
    )  # fmt: skip


def read_config(path: Path, *, trainer: bool) -> tuple[LaunchKeys, str, dict[str, Any]]:
    """specctl's keys of a configuration, its text, and what the program must find on the target. Raises `ConfigError`
    with file, line and key."""
    try:
        keys = load(path, TrainerKeys if trainer else CommandKeys)
        text = path.expanduser().read_text(encoding="utf-8")
    except TypedYamlError as error:
        raise ConfigError(str(error), hint=_hint(str(error), path, trainer=trainer)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(keys, CommandKeys):
        return keys, text, {"files": {f"data[{index}]": name for index, name in enumerate(keys.data)}}
    return keys, text, _what_the_trainer_reads(path)


def _hint(problem: str, path: Path, *, trainer: bool) -> str | None:
    if "unknown key" not in problem:
        return None
    if any(f": {key}: unknown key" in problem for key in HostsFile.model_fields):
        return f"if this is a hosts.yaml, it belongs to --inventory {path}"
    return None if trainer else "beside a command the file is specctl's alone; what the program reads it says by itself"


CHECK = """
import json, sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from trainer.config import ConfigError, load_config
try:
    print(json.dumps(load_config(sys.argv[2]).what_must_be_there()))
except ConfigError as error:
    sys.exit(f"{error}")
"""


def _what_the_trainer_reads(path: Path) -> dict[str, Any]:
    """What the trainer that is shipped will read with this configuration, asked as a program of its own; nothing, if it
    could not be asked here: it is there that it will say so. Raises `ConfigError` with its words if it refuses."""
    found = importlib.util.find_spec("trainer")
    if found is None or not found.submodule_search_locations:
        return {}
    home = Path(found.submodule_search_locations[0]).parent
    asked = subprocess.run(
        [sys.executable, "-c", CHECK, str(home), str(path)], stdin=subprocess.DEVNULL, capture_output=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    said = asked.stderr.decode("utf-8", "replace").strip()
    if asked.returncode == 1 and said and "Traceback (most recent call last)" not in said:
        raise ConfigError(said, hint=_hint(said, path, trainer=True))
    return dict(json.loads(asked.stdout)) if asked.returncode == 0 else {}


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


def _env_hash(requirements: list[str], python: str | None, house: Wheelhouse | None) -> str:
    content = house.content if house else []
    return hashlib.sha256("\n".join([python or "", *sorted(requirements), *content]).encode()).hexdigest()[:16]
