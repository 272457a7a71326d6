"""A run's configuration as specctl reads it: the keys that are its own, and what the program will read on the target.

The rest of a trainer's configuration belongs to the trainer, which is asked as a program of its own (`CHECK`): specctl
never imports it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from orchestrator import logscan
from orchestrator.errors import ConfigError
from orchestrator.inventory import HostsFile
from typedyaml import Model, ProblemAt, Str, TypedYamlError, load


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What specctl takes from a configuration; without one, nothing."""

    keys: LaunchKeys = field(default_factory=LaunchKeys)
    text: str | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    """What the program reads on the target: `model`, `files` and `drafter`, paths by their keys, and what is `wanted`
    of the model."""


def read_config(path: Path, *, trainer: bool) -> Config:
    """The configuration at `path`: the trainer's, or what stands beside a command. Raises `ConfigError` with file, line
    and key."""
    try:
        keys = load(path, TrainerKeys if trainer else CommandKeys)
        text = path.expanduser().read_text(encoding="utf-8")
    except TypedYamlError as error:
        raise ConfigError(str(error), hint=_hint(str(error), path, trainer=trainer)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(keys, CommandKeys):
        files = {f"data[{index}]": name for index, name in enumerate(keys.data)}
        return Config(keys=keys, text=text, inputs={"files": files} if files else {})
    return Config(keys=keys, text=text, inputs=_what_the_trainer_reads(path))


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
