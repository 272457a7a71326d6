"""`schema`: what the files that people write may hold, and what verbs print, as JSON Schema, from the very types that
read and print them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from orchestrator.commands import ANSWERS, FILES
from orchestrator.configuration import CommandKeys, LaunchKeys
from orchestrator.errors import ConfigError
from orchestrator.inventory import Entry, HostsFile, Target
from orchestrator.logscan.grammar import PATTERN_NAMES
from typedyaml.jsonschema import json_schema

ASK_S = 60.0
ASK = """
import sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from trainer.__main__ import main
sys.exit(main(["schema"]))
"""


def run(of: str) -> dict[str, Any]:
    """`of` is one of `commands.FILES`, or a verb that has a `--json`. Raises `ConfigError` for another word, and when
    the trainer that is shipped cannot be asked."""
    if of in ANSWERS:
        from orchestrator.answers.schema import schema_of  # it imports every verb

        return schema_of(of)
    if of not in FILES:
        there = f"of files {', '.join(FILES)}; of what a verb prints {', '.join(ANSWERS)}"
        raise ConfigError(f"there is no schema of {of!r}", hint=f"there are: {there}")
    if of == "hosts":
        return json_schema(HostsFile, title="specctl's hosts.yaml", described={Entry: Target})
    if of == "command":
        return _with_patterns(json_schema(CommandKeys, title="specctl's keys beside a command"))
    found = _trainers()
    # Both sides know these keys; what they may hold is specctl's to say.
    own = _with_patterns(json_schema(LaunchKeys, title=""))["properties"]
    for name, shape in own.items():
        found["properties"][name] = {**found["properties"].get(name, {}), **shape}
    return found


def _with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    schema["properties"]["patterns"]["propertyNames"] = {"enum": list(PATTERN_NAMES)}
    return schema


def _trainers() -> dict[str, Any]:
    """What the trainer that is shipped says of itself, asked as a program of its own."""
    found = importlib.util.find_spec("trainer")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("there is no trainer beside specctl", hint="pip install specctl again")
    home = Path(found.submodule_search_locations[0]).parent
    asked = subprocess.run(
        [sys.executable, "-c", ASK, str(home)], stdin=subprocess.DEVNULL, capture_output=True, check=False,
        timeout=ASK_S,
    )  # fmt: skip
    try:
        return dict(json.loads(asked.stdout))
    except ValueError as error:
        said = asked.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(
            f"the trainer does not say what its configuration may hold: {said[-1] if said else asked.returncode}",
            hint=f"{sys.executable} -m trainer schema",
        ) from error
