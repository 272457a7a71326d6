"""Holds every `--json` that a test sees to its schema, without room for a field that the schema does not name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from orchestrator.answers import LINES
from orchestrator.answers.schema import closed, schema_of
from orchestrator.commands import ANSWERS

SAMPLE = 40
"""So many lines of an answer in lines are held to it, from either end: there may be millions."""


@cache
def validator(verb: str) -> Any:
    return Draft202012Validator(closed(schema_of(verb)))


def check(words: Sequence[str], out: str) -> None:
    """Raises `AssertionError` for an answer on `out` that is not what `specctl schema` says of it."""
    options = words[: words.index("--")] if "--" in words else words
    verb = next((word for word in words if not word.startswith("-")), "")
    if verb not in ANSWERS or "--json" not in options or not out.strip():
        return
    lines = out.splitlines()
    for line in [*lines[:SAMPLE], *lines[SAMPLE:][-SAMPLE:]] if verb in LINES else [out]:
        answer = json.loads(line)
        if (error := best_match(validator(verb).iter_errors(answer))) is not None:
            raise AssertionError(f"{verb} --json: {error.json_path}: {error.message[:600]}")
