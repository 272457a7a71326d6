"""JSON Schema for editors: what the loader takes is valid, what it refuses for a typo is not.

The checker below knows the words of JSON Schema that typedyaml writes, and fails on any other.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.configuration import CommandKeys
from orchestrator.inventory import HostsFile
from trainer.config import Config
from typedyaml import TypedYamlError, loads
from typedyaml.jsonschema import DRAFT

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "configs/smollm2-cpu.yaml").read_text()
KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip
BOUNDS = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}
MODELS = {"hosts": HostsFile, "config": Config, "command": CommandKeys}
SILENT = {"title", "description", "default", "$schema", "$defs"}


def schema(file: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "schema", file], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def schemas() -> dict[str, dict[str, Any]]:
    return {file: schema(file) for file in ("hosts", "config", "command")}


def is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS[kind])


def problems(value: Any, shape: dict[str, Any], root: dict[str, Any], where: str = "$") -> list[str]:
    """Where `value` does not fit `shape`."""
    found: list[str] = []
    for word, wanted in shape.items():
        text, number = isinstance(value, str), isinstance(value, (int, float)) and not isinstance(value, bool)
        if word in SILENT:
            continue
        if word == "$ref":
            found += problems(value, root["$defs"][wanted.removeprefix("#/$defs/")], root, where)
        elif word == "type":
            kinds = [wanted] if isinstance(wanted, str) else wanted
            found += [] if any(is_kind(value, kind) for kind in kinds) else [f"{where} is no {wanted}"]
        elif word == "enum":
            same = any(value == one and type(value) is type(one) for one in wanted)
            found += [] if same else [f"{where} not in enum"]
        elif word == "anyOf":
            found += [] if any(not problems(value, one, root, where) for one in wanted) else [f"{where} fits none"]
        elif word == "pattern":
            found += [f"{where} has not the form"] if text and not re.search(wanted, value) else []
        elif word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            found += [f"{where} is out of bounds"] if number and not BOUNDS[word](value, wanted) else []
        elif word in ("minItems", "maxItems"):
            over = isinstance(value, list) and (len(value) < wanted if word == "minItems" else len(value) > wanted)
            found += [f"{where} has {len(value)} items"] if over else []
        elif word == "items":
            if isinstance(value, list):
                found += [text for one in value for text in problems(one, wanted, root, f"{where}[]")]
        elif word == "required":
            found += [f"{where}.{name} is missing" for name in wanted if isinstance(value, dict) and name not in value]
        elif word == "propertyNames":
            found += [text for name in value for text in problems(name, wanted, root, f"{where}.{name}")]
        elif word == "properties":
            if isinstance(value, dict):
                for name, one in wanted.items():
                    found += problems(value[name], one, root, f"{where}.{name}") if name in value else []
        elif word == "additionalProperties":
            if isinstance(value, dict):
                for name in value.keys() - shape.get("properties", {}).keys():
                    found += [f"{where}.{name} unknown"] if wanted is False else problems(
                        value[name], wanted, root, f"{where}.{name}"
                    )
        else:
            raise AssertionError(f"the checker does not know {word!r}")
    return found


def of(text: str, schema: dict[str, Any]) -> list[str]:
    return problems(yaml.safe_load(text), schema, schema)


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
        ("hosts", "targets: {a: {sssh: pve}}", "$.targets.a.sssh unknown"),
        ("hosts", "target: {}", "$.target unknown"),
        ("hosts", "targets: {a: {vmid: 7}}", "$.targets.a.vmid is out of bounds"),
        ("hosts", "targets: {a: {vmid: 10_1x}}", "$.targets.a.vmid has not the form"),
        ("hosts", "targets: {a: {gpus: all}}", "$.targets.a.gpus is no"),
        ("hosts", "targets: {a: {attach: ssh}}", "$.targets.a.attach not in enum"),
        ("config", CONFIG.replace("batch_size", "batchsize"), "$.batchsize unknown"),
        ("config", re.sub(r"(?m)^steps:.*", "steps: many", CONFIG), "$.steps has not the form"),
        ("config", re.sub(r"(?m)^steps:.*", "steps: 0", CONFIG), "$.steps is out of bounds"),
        ("config", CONFIG + "patterns: {stp: x}\n", "$.patterns.stp not in enum"),
        ("command", "steps: 3", "$.steps unknown"),
    ],
)
def test_what_specctl_refuses_is_not(schemas: dict[str, dict[str, Any]], file: str, text: str, said: str) -> None:
    assert any(problem.startswith(said) for problem in of(text, schemas[file])), of(text, schemas[file])
    if "patterns" not in said:  # which patterns there are is specctl's to know, not the trainer's
        with pytest.raises(TypedYamlError):
            loads(text, MODELS[file])
