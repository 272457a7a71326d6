"""`--json`: each verb that has one has a versioned schema, and no answer says more or less than its schema does."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import orchestrator.cli
from orchestrator.answers import ANSWERS, LINES
from orchestrator.answers.schema import closed, schema_of
from orchestrator.commands import ANSWERS as VERSIONS
from orchestrator.commands import COMMANDS
from tests.answers import check

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "scripts" / "json_page.py"
STOPPED = {
    "schema_version": 1, "observed_at": 1.5, "run_id": "r", "target": "t", "state": "STOPPED", "why": "asked to",
    "remaining": [{"pid": 7, "name": "python", "state": "S"}], "gpu_memory_kept": [],
}  # fmt: skip
ERROR = {
    "schema_version": 1, "observed_at": 1.5, "error": {"message": "m", "hint": None, "kind": "NotFound"},
    "target": None, "run_id": None, "exit_code": 4,
}  # fmt: skip


def test_every_verb_with_a_json_option_has_an_answer_with_a_version() -> None:
    commands = orchestrator.cli.app
    import typer

    group: Any = typer.main.get_command(commands)
    context = group.make_context("specctl", ["status"], resilient_parsing=True)
    with_json = set()
    for name in COMMANDS:
        _, command, _ = group.resolve_command(context, [name])
        with_json |= {name} if any("--json" in parameter.opts for parameter in command.params) else set()
    assert with_json == set(ANSWERS) == set(VERSIONS)
    assert set(ANSWERS) >= LINES


@pytest.mark.parametrize("verb", ANSWERS)
def test_a_schema_is_one_and_says_its_version_and_what_each_object_is(verb: str) -> None:
    schema = schema_of(verb)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"specctl:{verb}:{VERSIONS[verb]}"
    assert "additionalProperties" not in schema["$defs"]["Error"], "within a version fields may be added"
    for name, shape in schema["$defs"].items():
        assert shape["required"] == list(shape["properties"]), name


def test_an_answer_that_says_more_or_less_is_refused() -> None:
    check(["stop", "--json"], json.dumps(STOPPED))
    check(["stop", "--json"], json.dumps(ERROR))
    check(["launch", "--", "--json"], "whatever a program prints")
    for change in (
        {"more": 1}, {"state": "ASLEEP"}, {"why": None}, {"schema_version": 2}, {"remaining": [{"pid": 7}]},
        {"remaining": [{"pid": 7, "name": "python", "state": "S", "more": 1}]},
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="stop --json"):
            check(["stop", "r", "--json"], json.dumps({**STOPPED, **change}))
    with pytest.raises(AssertionError):
        check(["stop", "--json"], json.dumps({key: value for key, value in STOPPED.items() if key != "why"}))


def test_a_closed_schema_has_no_object_with_room_for_more() -> None:
    for verb in ANSWERS:
        for name, shape in closed(schema_of(verb))["$defs"].items():
            assert shape["additionalProperties"] is False, name


def test_the_command_prints_it() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "orchestrator", "schema", "plot"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout) == schema_of("plot")
    wrong = subprocess.run(
        [sys.executable, "-m", "orchestrator", "schema", "attach"], cwd=ROOT, capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "there is no schema of 'attach'" in wrong.stderr and "compare" in wrong.stderr


def test_page_and_files_are_what_the_types_say() -> None:
    done = subprocess.run([sys.executable, str(PAGE), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _page() -> Any:
    spec = importlib.util.spec_from_file_location("json_page", PAGE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_within_a_version_fields_and_values_may_be_added_and_nothing_else() -> None:
    page, old = _page(), schema_of("status")

    def changed(name: str, field: str, shape: Any) -> list[str]:
        new = copy.deepcopy(old)
        properties = new["$defs"][name]["properties"]
        if shape is None:
            del properties[field]
        else:
            properties[field] = shape
        new["$defs"][name]["required"] = list(properties)
        return list(page.broken(old, new))

    states = old["$defs"]["RunRow"]["properties"]["state"]["enum"]
    assert page.broken(old, old) == []
    assert changed("RunRow", "more", {"type": "string"}) == []
    assert changed("RunRow", "state", {"enum": [*states, "ASLEEP"]}) == []
    assert changed("RunRow", "step", {"type": "integer"}) == [], "it was integer or null"
    assert changed("RunRow", "loss", None) == ["$.runs[].loss is gone"]
    assert changed("RunRow", "why", {"type": ["string", "null"]}) == ["$.runs[].why may be null"]
    assert changed("RunRow", "step", {"type": "string"}) == ["$.runs[].step may be string"]
    assert changed("RunRow", "state", {"type": "string"}) == ["$.runs[].state is no longer one of certain values"]
    assert changed("RunRow", "error", {"type": "string"}) == ["$.runs[].error may be something new"]
    assert changed("Finding", "at", None) == ["$.runs[].error.at is gone"]
    assert changed("Status", "schema_version", {"const": 2}) == ["$.schema_version is 2, not 1"]
