"""typedyaml: every scalar means what the schema says, and every refusal is one line with file, line and key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from typedyaml import Bool, Float, Int, Model, ProblemAt, Str, TypedYamlError, load, loads
from typedyaml.loader import MOST_BYTES


class Optim(Model):
    lr: Float = 1e-3
    kind: Literal["adamw", "muon"] = "adamw"


class Everything(Model):
    vmid: Int | None = None
    steps: Int = Field(default=1, ge=1)
    name: Str = "default"
    note: Str | None = None
    fast: Bool = False
    gpus: list[Int] = Field(default_factory=list)
    shape: tuple[Int, Int] | None = None
    path: Path | None = None
    env: dict[Str, Str] = Field(default_factory=dict)
    optim: Optim = Optim()
    named: dict[Str, Optim] = Field(default_factory=dict)
    either: Int | Literal["auto"] = "auto"


def refusal(text: str) -> str:
    with pytest.raises(TypedYamlError) as caught:
        loads(text, Everything, "f.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ('vmid: "101"', "vmid", 101),
        ("vmid: 101", "vmid", 101),
        ("vmid: -3", "vmid", -3),
        ("vmid: null", "vmid", None),
        ("vmid: ~", "vmid", None),
        ("vmid:", "vmid", None),
        ("name: no", "name", "no"),
        ("name: 0123", "name", "0123"),
        ("name: 1e-4", "name", "1e-4"),
        ("name: 2024-01-01", "name", "2024-01-01"),
        ("name: 12:30:45", "name", "12:30:45"),
        ('name: ""', "name", ""),
        ('name: "null"', "name", "null"),
        ("name: '~'", "name", "~"),
        ("note: null", "note", None),
        ("name: =", "name", "="),
        ('name: "<<"', "name", "<<"),
        ("fast: true", "fast", True),
        ("fast: false", "fast", False),
        ("optim: {lr: 1e-4}", "optim", Optim(lr=1e-4)),
        ("optim: {lr: 0.1}", "optim", Optim(lr=0.1)),
        ("optim: {lr: 3}", "optim", Optim(lr=3.0)),
        ("gpus: [0, 1]", "gpus", [0, 1]),
        ("shape: [4, 5]", "shape", (4, 5)),
        ("path: /data/x", "path", Path("/data/x")),
        ("env: {NO: no, 1: 010}", "env", {"NO": "no", "1": "010"}),
        ("either: 3", "either", 3),
        ("either: auto", "either", "auto"),
    ],
)
def test_a_value_is_exactly_what_is_written(text: str, field: str, value: object) -> None:
    loaded = getattr(loads(text, Everything), field)
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(
    "value", ["0123", "10_1", "1.0", '"abc"', "0x10", "0b1", "+5", "1e3", "-0", "٣", "' 5'", "yes", "5 5", "9" * 5000]
)
def test_only_canonical_decimal_is_an_integer(value: str) -> None:
    message = refusal(f"name: x\nvmid: {value}")
    assert message.startswith("f.yaml:2: vmid: needs a whole number in plain decimal")
    assert len(message) < 200


@pytest.mark.parametrize("value", ["nan", ".inf", "1e999", "1_0.0", "1e-4x", "0123.5", "abc", "1,5", "[1]", "true"])
def test_only_a_finite_number_is_a_float(value: str) -> None:
    assert refusal(f"optim:\n  lr: {value}").startswith("f.yaml:2: optim.lr: needs a number")


@pytest.mark.parametrize("value", ["yes", "no", "on", "True", "1", "", "[]"])
def test_only_true_and_false_are_boolean(value: str) -> None:
    assert refusal(f"fast: {value}").startswith("f.yaml:1: fast: needs true or false")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: no", "f.yaml:1: gpus: needs a list (such as [a, b]), is 'no'"),
        ("gpus:\n- 0\n- no", "f.yaml:3: gpus[1]: needs a whole number in plain decimal (such as 8), is 'no'"),
        ("gpus:", "f.yaml:1: gpus: needs a list (such as [a, b]), is empty"),
        ("optim: no", "f.yaml:1: optim: needs a mapping (key: value), is 'no'"),
        ("env: [a]", "f.yaml:1: env: needs a mapping (key: value), is a list"),
        ("name:", 'f.yaml:1: name: needs text, is empty; an empty text is written ""'),
        ("name: null", 'f.yaml:1: name: needs text, is empty; an empty text is written ""'),
        ("name: [a]", 'f.yaml:1: name: needs text, is a list; an empty text is written ""'),
        ("steps: 0", "f.yaml:1: steps: must be greater than or equal to 1, is 0"),
        ("optim:\n  kind: sgd", "f.yaml:2: optim.kind: must be 'adamw' or 'muon', is 'sgd'"),
        ("optim: {lr:3}", "f.yaml:1: optim.\"lr:3\": unknown key; YAML wants a space behind the colon: `lr: 3`"),
        ("optim: {lr 3}", "f.yaml:1: optim.\"lr 3\": unknown key; YAML wants a colon and a space: `lr: 3`"),
        ("\nvmdi: 3", "f.yaml:2: vmdi: unknown key; did you mean 'vmid'?"),
        ("optim:\n  Lr: 3", "f.yaml:2: optim.Lr: unknown key; did you mean 'lr'?"),
        ("named:\n  a b:\n    knid: x", "f.yaml:3: named.\"a b\".knid: unknown key; did you mean 'kind'?"),
        ("optim:\n  zzz: 3", "f.yaml:2: optim.zzz: unknown key; known here: kind, lr"),
        ("vmid: 1\nname: a\nvmid: 1", "f.yaml:3: vmid: duplicate key (first on line 1)"),
        ("env:\n  A: 1\n  'A': 2", "f.yaml:3: env.A: duplicate key (first on line 2)"),
        ("env:\n  <<: {A: 1}", "f.yaml:2: <<: merge keys are not read here: write the keys out"),
        ("env:\n  ? [a]\n  : b", "f.yaml:2: env: a key must be plain text"),
        ("", "f.yaml:1: is empty; write {} to mean so"),
        ("# only words\n", "f.yaml:1: is empty; write {} to mean so"),
        ("- a", "f.yaml:1: needs a mapping (key: value) at the top, is a list"),
        ("a", "f.yaml:1: needs a mapping (key: value) at the top, is 'a'"),
    ],
)
def test_a_wrong_value_is_one_line_with_file_line_and_key(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("name: &x a\nnote: *x", 1, "anchors and aliases"),
        ("a: 1\nnote: *x", 2, "anchors and aliases"),
        ("name: a\nvmid: !!int 3", 2, "tags are not read"),
        ("name: !!python/object/apply:os.system [ls]", 1, "tags are not read"),
        ("name: [a", 1, "is not YAML"),
        ("name: a\n\tvmid: 3", 2, "is not YAML: a tab; YAML indents with spaces alone"),
        ("name: a: b", 1, "is not YAML"),
        ("name: a\n--- \nname: b", 2, "is not YAML"),
        ("name: a\nnote: \x07", 2, "not allowed"),
        ('name: "\\ud800"', 1, "surrogate"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_at_its_line(text: str, line: int, part: str) -> None:
    message = refusal(text)
    assert message.startswith(f"f.yaml:{line}: ")
    assert part in message


def test_depth_is_refused_without_a_traceback() -> None:
    assert "nested too deeply" in refusal("gpus: " + "[" * 20_000)


def test_a_typo_is_reported_before_the_key_that_it_leaves_missing() -> None:
    class Needs(Model):
        target: Str

    with pytest.raises(TypedYamlError) as caught:
        loads("x: 1\ntarge: a", Needs, "f.yaml")
    assert str(caught.value) == "f.yaml:1: x: unknown key; known here: target"
    with pytest.raises(TypedYamlError, match=r"^f\.yaml:1: is empty; needs target$"):
        loads("", Needs, "f.yaml")
    with pytest.raises(TypedYamlError) as caught:
        loads("{}", Needs, "f.yaml")
    assert str(caught.value) == "f.yaml:1: target: is missing"


def test_a_validator_can_blame_a_key_by_its_path() -> None:
    class Groups(Model):
        groups: dict[Str, list[Str]]

        @model_validator(mode="after")
        def known(self) -> Groups:
            raise ProblemAt(("groups", "lab", 1), "no such target")

    class Outer(Model):
        inner: Groups

    with pytest.raises(TypedYamlError) as caught:
        loads("inner:\n  groups:\n    lab:\n    - a\n    - b", Outer, "f.yaml")
    assert str(caught.value) == "f.yaml:5: inner.groups.lab[1]: no such target"
    assert (caught.value.file, caught.value.line, caught.value.key) == ("f.yaml", 5, "inner.groups.lab[1]")


def test_a_bare_int_in_a_schema_takes_no_text() -> None:
    class Careless(Model):
        n: int

    with pytest.raises(TypedYamlError, match=r"^f:1: n: must be a valid integer, is '0123'$"):
        loads("n: 0123", Careless, "f")


def test_a_model_can_be_built_in_code_and_is_frozen() -> None:
    made = Everything(vmid=3, optim=Optim(lr=1), fast=True)
    assert made == loads("{vmid: 3, optim: {lr: 1}, fast: true}", Everything)
    with pytest.raises(ValueError, match="frozen"):
        made.vmid = 4  # type: ignore[misc]


def test_a_file_is_read_and_one_that_cannot_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    with pytest.raises(TypedYamlError, match=rf"^{path}: cannot be read: No such file or directory$"):
        load(path, Everything)
    path.write_bytes(b"\xef\xbb\xbfname: \xc3\xa4\n")
    assert load(path, Everything).name == "ä"
    path.write_bytes(b"name: a\nnote: \xff\n")
    with pytest.raises(TypedYamlError, match=rf"^{path}:2: is not UTF-8 text$"):
        load(path, Everything)


def test_what_is_no_file_of_settings_is_refused_before_it_is_read(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(TypedYamlError) as caught:
            load(path, Everything, name="f.yaml")
        return str(caught.value)

    assert refused(tmp_path) == "f.yaml: is a directory, not a file"
    (tmp_path / "smollm2-cpu.yaml").write_text("{}")
    assert refused(tmp_path) == "f.yaml: is a directory, not a file; in it: smollm2-cpu.yaml"
    assert refused(tmp_path / "smolm2-cpu.yaml").endswith(f"; did you mean '{tmp_path}/smollm2-cpu.yaml'?")
    assert refused(tmp_path / "other.yaml") == "f.yaml: cannot be read: No such file or directory"
    assert refused(tmp_path / "no" / "x.yaml").endswith(f"(there is no folder {tmp_path}/no)")
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in refused(tmp_path / "pipe"), "nobody writes into it: reading would never end"
    (tmp_path / "huge.yaml").write_bytes(b"a" * (MOST_BYTES + 1))
    assert "has 1,048,577 bytes, and at most 1,048,576 are read" in refused(tmp_path / "huge.yaml")


@given(st.integers(min_value=-(10**29), max_value=10**29))
def test_every_integer_comes_back(number: int) -> None:
    assert loads(f"vmid: {number}", Everything).vmid == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_comes_back(number: float) -> None:
    assert loads(f"optim: {{lr: {number!r}}}", Everything).optim.lr == number


@given(st.text())
def test_no_text_ends_in_anything_but_a_model_or_one_line(text: str) -> None:
    try:
        loads(text, Everything)
    except TypedYamlError as error:
        assert "\n" not in str(error)


def test_the_package_imports_neither_side() -> None:
    code = "import sys, typedyaml; print([m for m in sys.modules if m.split('.')[0] in ('orchestrator', 'trainer')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
