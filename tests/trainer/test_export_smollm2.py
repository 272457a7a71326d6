"""The real SmolLM2: what a run trains on it comes through the gate, in bfloat16 too, and is loaded again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import export
from trainer.__main__ import main
from trainer.model.target import load_target
from trainer.sections import TargetConfig

TARGET = Path("~/.cache/specctl/models/SmolLM2-135M-Instruct").expanduser()


def test_a_drafter_of_smollm2_comes_through_the_gate(train: Callable[..., Any], settings: dict[str, Any],
                                                     tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                     ) -> None:  # fmt: skip
    if not (TARGET / "COMPLETE.json").exists():
        missing = f"no target in {TARGET}: run scripts/fetch_smollm2.py"
        if os.environ.get("CI") == "true":
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    train({
        **settings, "steps": 2, "batch_size": 1, "devices": {"target": ["cpu"], "drafter": ["cpu"]},
        "target": {"path": str(TARGET), "dtype": "bfloat16"},
        "drafter": {"layers": 1, "block_size": 8, "anchors": 8, "mask_token_id": 3},
    })  # fmt: skip
    (tmp_path / "prompts.txt").write_text("What is the capital of France?\n")
    capsys.readouterr()
    code = main([
        "export", settings["output_dir"], "--to", str(tmp_path / "export"), "--dtype", "bfloat16",
        "--prompts", str(tmp_path / "prompts.txt"), "--json",
    ])  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    seen = json.loads(said.out)["gate"]
    assert seen["passed"] and seen["blocks"] == 24 and seen["kept_by_trainer"] == seen["kept_by_reference"]

    config = TargetConfig(path=str(TARGET), dtype="bfloat16", layer_ids=[1, 8, 14, 20, 27])
    target = load_target(config, torch.device("cpu"))
    drafter, found = export.load(tmp_path / "export", target)
    assert found.layout.rope.theta == 100_000.0 and found.layout.rope.dims == 64
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
