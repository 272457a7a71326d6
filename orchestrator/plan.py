"""What a launch will do, as a value: everything that can be decided before the target is asked.

`plan` reads the configuration, bundles the code and chooses the interpreter; `verbs/launch.py` applies what it made.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import os
import posixpath
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from orchestrator import gpus, index, naming, wheelhouse
from orchestrator.bundle import Bundle, collect
from orchestrator.configuration import Config, read_config
from orchestrator.errors import ConfigError
from orchestrator.inventory import Inventory, Target
from orchestrator.model import RunSpec, make_run_id, slugify
from orchestrator.wheelhouse import Wheelhouse

Until = Literal["process", "step"]
SECRET_CHARS = 8
"""A shorter secret is not looked for in what is recorded: `1` or `yes` stand everywhere."""


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
    gpus: gpus.Asked = field(default_factory=gpus.Asked)


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
    """What the program reads on the target and must find there: see `configuration.Config.inputs`."""
    cuda: int = 0
    """How many CUDA devices the configuration counts on, declared or not."""

    @property
    def reads(self) -> dict[str, str]:
        """Each path of those, as it is written, by its key."""
        return {key: path for kind in ("model", "files", "drafter") for key, path in self.inputs.get(kind, {}).items()}


def plan(request: Request, inventory: Inventory) -> Plan:
    """Everything that can be decided without asking the target. Raises `ConfigError`, `BundleError`, `NotFound`."""
    target = inventory.resolve(request.target)
    place = request.target or "[TARGET]"
    if not request.config and not request.command:
        raise ConfigError(
            "nothing to launch: give --config FILE for the trainer, or a command after --",
            hint=f"specctl launch {place} --config FILE, or specctl launch {place} -- CMD...",
        )
    if request.command and not request.command[0].strip():
        raise ConfigError("the command after -- has an empty name", hint="specctl launch [TARGET] -- CMD...")
    if request.target is None and request.command and request.command[0] in inventory.targets:
        named = request.command[0]
        raise ConfigError(
            f"{named} is a target, and after -- stands the program's command",
            hint=f"specctl launch {named} -- {shlex.join(request.command[1:]) or 'CMD...'}",
        )
    if request.name is not None and (problem := naming.problem(request.name)):
        raise ConfigError(f"--name {request.name[:60]!r}: {problem}", hint=f"--name {slugify(request.name)}")
    if re.search(r"[\x00-\x1f\x7f]", request.note):
        raise ConfigError(f"--note {request.note[:60]!r}: is one line, without control characters", hint="--note TEXT")
    config = Config() if request.config is None else read_config(request.config, trainer=not request.command)
    keys = config.keys
    values = {}
    for name in target.secrets:
        if name not in os.environ:
            raise ConfigError(
                f"the secret {name} is not in your environment",
                target=target.name, hint=f"export {name}=..., or take it out of secrets: in {inventory.source}",
            )
        values[name] = os.environ[name]
    workdir = [Path(target.workdir).expanduser()] if target.ssh is None and target.vmid is None else []
    wheels = [request.wheelhouse.expanduser()] if request.wheelhouse else []
    bundle = collect(request.source, without=[*workdir, *wheels, index.folder()])
    _look_for_script(request, bundle)
    python, requirements = interpreter(
        target, keys.requirements, trainer=not request.command, extras=config.inputs.get("extras", [])
    )
    house = None
    if request.wheelhouse is not None:
        if not requirements:
            raise _nothing_to_install(target, python)
        house = wheelhouse.collect(request.wheelhouse)
    argv = request.command or [python or "python", "-m", "trainer", "train", "{config}"]
    slug = request.name or (request.config.stem if request.config and not request.command else naming.name_of(argv))
    cuda = _cuda(target, config)
    chosen = gpus.choose(request.gpus, target, cuda=cuda)
    env = {**target.env, **chosen.env}
    if not request.command:
        # The trainer that was shipped is meant, whatever the project has of that name in its own folder.
        env["PYTHONSAFEPATH"] = "1"
    spec = RunSpec(
        run_id=make_run_id(slug, datetime.now(timezone.utc), secrets.token_hex(2)), nonce=secrets.token_hex(16),
        argv=argv, trainer=not request.command, target=target.name, owner=index.owner(), bundle=bundle.hash, env=env,
        secrets=target.secrets,
        note=request.note, config_path=str(request.config) if request.config else None, config_text=config.text,
        git_commit=bundle.commit, git_diff=bundle.diff,
        env_hash=_env_hash(requirements, target.python, house) if requirements else None,
        gpus=chosen.numbers, wish=chosen.wish, patterns=dict(keys.patterns),
        specctl_version=importlib.metadata.version("specctl"),
    )  # fmt: skip
    _keep_secret(values, spec)
    return Plan(
        target=target, spec=spec, bundle=bundle, python=python, requirements=requirements,
        wheelhouse=house, secrets=values, until=request.until, timeout_s=request.timeout_s,
        inputs=config.inputs, cuda=cuda or 0,
    )  # fmt: skip


def _keep_secret(values: dict[str, str], spec: RunSpec) -> None:
    """Raises `ConfigError` when the value of a secret stands in what is recorded, or shown to everybody there."""
    places = {
        "the command after --": "\n".join(spec.argv), "--note": spec.note,
        "env: of hosts.yaml": "\n".join(spec.env.values()), spec.config_path or "": spec.config_text or "",
        "the uncommitted changes of the project": spec.git_diff or "",
    }  # fmt: skip
    for name, value in values.items():
        for place, text in places.items():
            if len(value) >= SECRET_CHARS and value in text:
                raise ConfigError(
                    f"the value of the secret {name} stands in {place}, which is recorded with the run",
                    target=spec.target, hint=f"take it out there: the program finds it as {name} in its environment",
                )  # fmt: skip


def _look_for_script(request: Request, bundle: Bundle) -> None:
    """Raises `ConfigError` when the script that the command runs is not among the files that are shipped."""
    script = naming.script_of(request.command)
    path = posixpath.normpath(script or ".")
    if path.startswith("."):
        return
    shipped = [name.removeprefix("project/") for name in bundle.files if name.startswith("project/")]
    links = {entry.path.removeprefix("project/") for entry in bundle.entries if entry.kind == "link"}
    parts = PurePosixPath(path)
    if links & {path, *map(str, parts.parents)} or any(f"{name}/".startswith(f"{path}/") for name in shipped):
        return
    if request.source is None:
        raise ConfigError(f"{script}: --no-source ships no project", hint="leave that out, or give a full path")
    problem = f"{script}: no such file among those that are shipped from {request.source}"
    if (request.source / path).exists():
        raise ConfigError(
            f"{problem}: it is there, but ignored, by git or as build, dist and their kind are",
            hint=f"git add -f {path}, or move it",
        )
    same = [name for name in shipped if PurePosixPath(name).name == parts.name]
    near = same or difflib.get_close_matches(path, shipped, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "--source DIR names the project's folder; a file there its full path"
    raise ConfigError(problem, hint=hint)


def _cuda(target: Target, config: Config) -> int | None:
    """How many CUDA devices the configuration counts on; None where it does not say. Raises `ConfigError` when more are
    named than declared."""
    if "devices" not in config.inputs:
        return None
    numbers = [int(name.removeprefix("cuda:")) for name in config.inputs["devices"] if name != "cpu"]
    if not numbers:
        return 0
    if target.gpus is not None and max(numbers) >= len(target.gpus):
        declared = f"only GPU {', '.join(map(str, target.gpus))}" if target.gpus else "no GPU"
        raise ConfigError(
            f"devices: names cuda:{max(numbers)}, and `gpus:` of the target declares {declared}", target=target.name,
            hint="the declared GPUs are cuda:0, cuda:1 ... of the run: change devices:, or gpus: in hosts.yaml",
        )  # fmt: skip
    return max(numbers) + 1


def _nothing_to_install(target: Target, python: str | None) -> ConfigError:
    why = f"the program runs on {python} as it is" if python else "the command needs no environment"
    return ConfigError(
        f"--wheelhouse is for making an environment, and none is made: {why}", target=target.name,
        hint="list what to install as requirements: in the file of --config",
    )  # fmt: skip


def interpreter(target: Target, wanted: list[str] | None, *, trainer: bool,
                extras: Sequence[str] = ()) -> tuple[str | None, list[str]]:  # fmt: skip
    """(the Python to use, or None; what to make an environment of, or nothing).

    The trainer runs on the target's own `python:`, on the interpreter that runs specctl if that is on this machine and
    has what it needs, or else in an environment made for it, with the extras that its configuration asks for. A command
    gets one only if `requirements:` asks for it.
    """
    if wanted:
        return None, wanted
    if target.python is not None:
        return target.python, []
    if not trainer or wanted is not None:
        return None, []
    if target.ssh is None and target.vmid is None and _has_trainer_extra():
        return sys.executable, []
    return None, trainer_requirements(extras)


def _has_trainer_extra() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors", "yaml", "pydantic"))


def trainer_requirements(extras: Sequence[str] = ()) -> list[str]:
    """The `trainer` extra of this very installation, and others of its extras."""
    found = []
    for line in importlib.metadata.requires("specctl") or []:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        if extra and extra[1] in ("trainer", *extras):
            found.append(requirement.strip())
    return found


def _env_hash(requirements: list[str], python: str | None, house: Wheelhouse | None) -> str:
    content = house.content if house else []
    return hashlib.sha256("\n".join([python or "", *sorted(requirements), *content]).encode()).hexdigest()[:16]
