"""docs/hosts.md: every key is there, with its true type and default, and every message is the one that is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.inventory import Entry, HostsFile, parse_inventory
from typedyaml import Model

PAGE = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```\n(?:```text\n(.*?)```\n)?", PAGE, re.DOTALL)
WRONG = [(text, said) for text, said in BLOCKS if said]
SHAPES = [
    (r"dict\[.*Entry\]", "mapping of targets by name"),
    (r"Entry", "mapping, the keys of a target"),
    (r"dict\[.*list\[.*\]", "mapping of lists of text by name"),
    (r"dict\[", "mapping of text by name"),
    (r"list\[.*int", "list of whole numbers"),
    (r"list\[", "list of text"),
    (r"Literal\[", "auto, pct or lxc"),
    (r"int", "whole number"),
    (r"str", "text"),
]


def rows(model: type[Model]) -> dict[str, tuple[str, str]]:
    """Key -> (type, what it is when it is left out), as the page says them."""
    found = {}
    for key, field in model.model_fields.items():
        kind = next(words for pattern, words in SHAPES if re.search(pattern, str(field.annotation)))
        default: Any = field.get_default(call_default_factory=True)
        said = "none" if default is None else "{}" if default == Entry() else str(default)
        found[key] = (kind, "an error" if field.is_required() else said)
    return found


def test_every_key_is_there_with_its_type_and_default() -> None:
    told = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert all(key == anchor for key, anchor, _, _ in told)
    assert {key: (kind, left_out) for key, _, kind, left_out in told} == {**rows(HostsFile), **rows(Entry)}
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == [key for key, *_ in told], "one section each, in that order"


def test_every_key_has_an_example_and_a_mistake() -> None:
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        key = section.partition("\n")[0]
        examples = re.findall(r"```yaml\n(.*?)```\n(```text)?", section, re.DOTALL)
        assert any(f"{key}:" in text and not said for text, said in examples), key
        assert any(f"{key}:" in text and said for text, said in examples), key


@pytest.mark.parametrize("text", [text for text, said in BLOCKS if not said])
def test_an_example_is_read_without_a_word(text: str) -> None:
    assert parse_inventory(text).targets


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_a_mistake_is_answered_as_the_page_says(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_inventory(text)
    assert said == f"error: {caught.value}\n"
