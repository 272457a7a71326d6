"""Configuration errors are one line with file, line and key; scalars mean what the schema says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.support import REPOSITORY
from trainer.config import ConfigError, DrafterConfig, expand_path, load_config

DEMO = REPOSITORY / "configs" / "smollm2-cpu.yaml"


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = DEMO.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path = tmp_path / "run.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def line_of(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1) if text in line)


def test_an_exponent_is_a_number(tmp_path: Path) -> None:
    assert load_config(str(edited(tmp_path, "lr: 1e-3", "lr: 1e-4"))).optimizer.lr == 0.0001


@pytest.mark.parametrize(
    ("old", "new", "key", "problem"),
    [
        ("steps: 2000", "steps: 0123", "steps", "whole number"),
        ("steps: 2000", "steps: 0", "steps", "greater than or equal to 1"),
        ("steps: 2000", "steps: 2_000", "steps", "whole number"),
        ("lr: 1e-3", "lr: fast", "optimizer.lr", "needs a number"),
        ("lr: 1e-3", "lr: -1", "optimizer.lr", "greater than 0"),
        ("layers: 1", "layer: 1", "drafter.layer", "did you mean 'layers'?"),
        ("batch_size: 2", "batch_size: 3", "batch_size", "multiple of the 2 drafters"),
        ("resume: auto", "resume: no", "resume", "'auto' or 'never'"),
        ("kind: python-docs", "kind: text", "data", "needs at least one file"),
        ("target: [cpu]", "target: [cpu, cpu]", "devices.target", "at most 1"),
        ("drafter: [cpu, cpu]", "drafter: [gpu]", "devices.drafter[0]", "pattern"),
        ("anchors: 16", "anchors: 128", "drafter.anchors", "less than data.sequence_length"),
    ],
)
def test_a_wrong_value_is_refused_with_file_line_and_key(tmp_path: Path, old: str, new: str, key: str, problem: str
                                                         ) -> None:  # fmt: skip
    path = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert problem in message
    # A key that is missing altogether is blamed on the mapping it is missing from.
    line = line_of(path, "data:" if key == "data" else new)
    assert message.startswith(f"{path}:{line}: {key}")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        load_config(str(tmp_path / "nowhere.yaml"))


def test_keys_that_specctl_reads_are_allowed(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings |= {"requirements": ["torch>=2.11"], "patterns": {"step": "it ([0-9]+)"}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert load_config(str(path)).requirements == ["torch>=2.11"]


def test_paths_know_home_and_variables_and_refuse_unset_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.delenv("UNSET", raising=False)
    assert expand_path("~/x", key="k") == Path("/home/someone/x")
    assert expand_path("$MODELS/a b", key="k") == Path("/models/a b")
    with pytest.raises(ConfigError, match=r"target\.path: \$UNSET is not set"):
        expand_path("$UNSET/x", key="target.path")


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0)])
def test_the_decay_of_a_block_size_is_the_published_one(size: int, gamma: float) -> None:
    assert DrafterConfig(layers=1, block_size=size, anchors=1, mask_token_id=3).gamma == gamma
