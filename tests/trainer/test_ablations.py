"""Benches that say what of a training matters: the same one again and again, one thing changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bench.ablations import VARIANTS, variant
from tests.trainer.support import REPOSITORY, write_config
from tests.trainer.taught import drafter_settings, write_conversations
from trainer.config import Config, load_config

CHANGED = {
    "base": set(), "flat-weights": {"loss"}, "one-layer-captured": {"target"}, "2-layers": {"drafter"},
    "32-anchors": {"drafter"}, "drawn-answers": {"data"}, "plain-text": {"data"},
}  # fmt: skip


def test_each_variant_of_the_published_training_is_one_and_changes_what_it_is_named_for(tmp_path: Path) -> None:
    settings = yaml.load((REPOSITORY / "configs/smollm2-h200.yaml").read_text(), Loader=yaml.BaseLoader)

    def of(name: str) -> Config:
        data = Path("drawn.jsonl" if name == "drawn-answers" else "greedy.jsonl")
        own = variant(settings, name, steps=450, work=tmp_path, data=data)
        return load_config(str(write_config(own, tmp_path / f"{name}.yaml")))

    base = of("base").model_dump()
    for name in VARIANTS:
        found = of(name).model_dump()
        assert found.pop("output_dir") == str(tmp_path / name)
        assert {key for key, value in found.items() if value != base[key]} == CHANGED[name], name


@pytest.mark.timeout(300)
def test_variants_are_trained_side_by_side_and_decoded_with_whatever_they_capture(
    taught_target: Path, tmp_path: Path
) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 24, seed=4)
    held_out = write_conversations(tmp_path / "held-out.jsonl", 24, seed=5)
    config = write_config(drafter_settings(taught_target, data, tmp_path / "out"), tmp_path / "config.yaml")

    def bench(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=REPOSITORY, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    work, out = tmp_path / "work", tmp_path / "found.jsonl"
    bench("bench.ablations", str(config), "--steps", "3", "--work", str(work), "--only", "base", "one-layer-captured")
    options = ["--last", "--prompts", "2", "--max-tokens", "8", "--device", "cpu", "--out", str(out)]
    bench("bench.acceptance", "measure", str(work), "--data", str(held_out), *options)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["run"], one["step"], one["captured"]) for one in found] == [
        ("base", 3, 3), ("one-layer-captured", 3, 1),
    ]  # fmt: skip
    assert all(one["tau"] >= 1 and one["speedup"] > 0 for one in found)
