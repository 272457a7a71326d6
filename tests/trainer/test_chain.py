"""The whole chain as a user types it, tiny: the target writes data, a drafter learns from it, is exported through the
gate, and decodes what was held out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import acceptance
from tests.trainer.support import events, write_config
from tests.trainer.taught import drafter_settings
from trainer.__main__ import main


@pytest.mark.timeout(600)
def test_from_nothing_but_a_target_to_a_drafter_that_decodes(
    taught_target: Path, tmp_path: Path, train: Callable[..., Any], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    synthesis = {
        "target": {"path": str(taught_target), "dtype": "float32"}, "output_dir": str(tmp_path / "data"),
        "conversations": 60, "batch_size": 12, "held_out_fraction": 0.2,
        "question": {"max_tokens": 24, "temperature": 0.9}, "answer": {"max_tokens": 40, "temperature": 0.5},
        "openings": {"sums": ["What is", "Add"], "counting": ["Count"]},
    }  # fmt: skip
    assert main(["synthesize", str(write_config(synthesis, tmp_path / "synthesis.yaml"))]) == 0
    held_out, run, export = tmp_path / "data" / "held-out.jsonl", tmp_path / "out", tmp_path / "drafter"

    settings = drafter_settings(taught_target, tmp_path / "data" / "train.jsonl", run)
    settings |= {"steps": 120, "evaluate_every": 60, "evaluation": {"paths": [str(held_out)], "max_tokens": 24}}
    train(settings)
    early, late = (one["tau"] for one in events(run, "evaluation"))

    assert main(["export", str(run), "--to", str(export)]) == 0
    capsys.readouterr()
    found = tmp_path / "found.json"
    options = ["--target", str(taught_target), "--max-tokens", "24"]
    assert main(["evaluate", str(export), "--data", str(held_out), "--out", str(found), *options]) == 0
    figures = json.loads(found.read_text())["all"]
    assert figures["different"] == figures["same_up_to_a_tie"] == 0 and figures["same"] == figures["prompts"]
    # It has learnt something, on questions that it has not seen, and the export is worth as much as the training said.
    assert early < late and late > 1.3 and figures["tau"] > 1.3

    # As the results page decodes with every checkpoint of a run, minutes beside it.
    asked = ["measure", str(run), "--data", str(held_out), "--max-tokens", "24", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["acceptance", *asked, "--out", str(tmp_path / "curve.jsonl")])
    acceptance.main()
    (point,) = map(json.loads, (tmp_path / "curve.jsonl").read_text().splitlines())
    assert point["step"] == 120 and point["tau"] == pytest.approx(figures["tau"], rel=1e-9)
    took = [one["time"] for one in events(run, "phase") if one["phase"] == "train"]
    assert 0 < 60 * point["minutes"] <= events(run, "ended")[-1]["time"] - took[0]

    capsys.readouterr()
    assert main(["generate", str(export), "--prompt", "Count from one to six.", *options]) == 0
    drafted = capsys.readouterr().out
    assert main(["generate", str(export), "--prompt", "Count from one to six.", "--alone", *options]) == 0
    assert capsys.readouterr().out == drafted != "\n"
    torch.set_num_threads(threads)
