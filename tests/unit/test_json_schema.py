"""JSON Schema for editors: what the loader takes is valid, what it refuses for a typo is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from orchestrator.configuration import CommandKeys
from orchestrator.inventory import HostsFile
from trainer.config import Config
from typedyaml import TypedYamlError, loads
from typedyaml.jsonschema import DRAFT

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "configs/smollm2-cpu.yaml").read_text()
MODELS = {"hosts": HostsFile, "config": Config, "command": CommandKeys}


def schema(file: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "schema", file], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def schemas() -> dict[str, dict[str, Any]]:
    return {file: schema(file) for file in ("hosts", "config", "command")}


def of(text: str, schema: dict[str, Any]) -> list[str]:
    """Where `text` does not fit `schema`: `targets.a.vmid minimum`."""
    Draft202012Validator.check_schema(schema)
    errors = [innermost for error in Draft202012Validator(schema).iter_errors(yaml.safe_load(text))
              for innermost in error.context or [error]]  # fmt: skip
    return [f"{'.'.join(map(str, error.absolute_path))} {error.validator}".strip() for error in errors]


def test_each_is_of_the_draft_it_names_and_says_what_its_keys_mean(schemas: dict[str, dict[str, Any]]) -> None:
    for one in schemas.values():
        assert one["$schema"] == DRAFT and one["additionalProperties"] is False
    entry = schemas["hosts"]["$defs"]["Entry"]["properties"]
    assert all(shape.get("description") for shape in entry.values()), "an editor shows it beside the key"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("hosts", (ROOT / "hosts.yaml").read_text()),
        ("hosts", "targets: {a: {ssh: root@pve:22, vmid: '101', gpus: [0, 1], env: {A: 1, B: yes, C: x}, user: }}"),
        ("hosts", "default_target: a\ndefaults: {workdir: /w}\ntargets: {a: {attach: lxc, vmid: 100}}"),
        ("hosts", "targets: {a: {}, b: {}}\ngroups: {all: [a, b]}"),
        ("config", CONFIG),
        ("config", CONFIG + "requirements: [torch]\npatterns: {step: 'iter (\\d+)'}\n"),
        ("config", re.sub(r"(?m)^(\s*lr:).*", r"\1 1e-4", CONFIG)),
        ("command", "patterns: {step: 'iter (\\d+)', tok_s: 'speed (\\S+)'}\nrequirements: [a, 'b>1']\ndata: [/x]"),
        ("command", "{}"),
    ],
)
def test_what_specctl_reads_is_valid(schemas: dict[str, dict[str, Any]], file: str, text: str) -> None:
    assert of(text, schemas[file]) == []
    loads(text, MODELS[file])


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("hosts", "targets: {a: {sssh: pve}}", "targets.a additionalProperties"),
        ("hosts", "target: {}", "additionalProperties"),
        ("hosts", "targets: {a: {vmid: 7}}", "targets.a.vmid minimum"),
        ("hosts", "targets: {a: {vmid: 10_1x}}", "targets.a.vmid pattern"),
        ("hosts", "targets: {a: {gpus: all}}", "targets.a.gpus type"),
        ("hosts", "targets: {a: {attach: ssh}}", "targets.a.attach enum"),
        ("config", CONFIG.replace("batch_size", "batchsize"), "additionalProperties"),
        ("config", re.sub(r"(?m)^steps:.*", "steps: many", CONFIG), "steps pattern"),
        ("config", re.sub(r"(?m)^steps:.*", "steps: 0", CONFIG), "steps minimum"),
        ("config", CONFIG + "patterns: {stp: x}\n", "patterns enum"),
        ("command", "steps: 3", "additionalProperties"),
    ],
)
def test_what_specctl_refuses_is_not(schemas: dict[str, dict[str, Any]], file: str, text: str, said: str) -> None:
    assert said in of(text, schemas[file])
    if "patterns" not in said:  # which patterns there are is specctl's to know, not the trainer's
        with pytest.raises(TypedYamlError):
            loads(text, MODELS[file])
