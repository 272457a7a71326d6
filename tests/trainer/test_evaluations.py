"""Evaluations in the midst of a training say what decoding with its checkpoint says, and change nothing of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import events, losses, records, write_config
from tests.trainer.taught import drafter_settings
from trainer import compile_plan
from trainer.__main__ import main
from trainer.config import ConfigError
from trainer.decode import loaded
from trainer.decode.generate import generate
from trainer.decode.prompts import read_prompts
from trainer.report.console import step_lines
from trainer.report.reporter import RunStep, WorkerStep

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def evaluated(taught_target: Path, taught_run: Path, tmp_path: Path) -> dict[str, Any]:
    """20 steps of two drafters on the taught target, with an evaluation after every tenth."""
    settings = drafter_settings(taught_target, taught_run / "chat.jsonl", tmp_path / "out")
    return {
        **settings, "steps": 20, "evaluate_every": 10, "log_every": 7,
        "devices": {"target": ["cpu"], "drafter": ["cpu", "cpu"]},
        "evaluation": {"paths": [str(taught_run / "held-out.jsonl")], "prompts": 6, "max_tokens": 24},
    }  # fmt: skip


@pytest.mark.parametrize("ema", [None, 0.8])
def test_tau_beside_the_loss_is_what_decoding_with_the_checkpoint_gives(
    ema: float | None, evaluated: dict[str, Any], taught_run: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    evaluated["optimizer"] |= {"lr": 2e-2} | ({"ema": ema} if ema else {})
    training = train(evaluated)
    lines = {one["step"]: one for one in records(tmp_path / "out", "metrics.jsonl") if one["worker"] is None}
    assert {step for step, one in lines.items() if "tau" in one} == {10, 20}
    told = events(tmp_path / "out", "evaluation")
    assert [one["step"] for one in told] == [10, 20] and told[1]["tau"] == lines[20]["tau"]
    assert [one["phase"] for one in events(tmp_path / "out", "phase")].count("evaluate") == 2

    found = loaded.load(tmp_path / "out", target=None, device=torch.device("cpu"), say=lambda line: None)
    prompts = read_prompts(
        [taught_run / "held-out.jsonl"], found.target.tokenizer, kind=None, count=6, most_tokens=256, text_tokens=64
    )  # fmt: skip
    made = generate(found.target, found.block_drafter, [one.ids for one in prompts], max_tokens=24, batch_size=6)
    assert made.acceptance.tau == lines[20]["tau"]
    assert made.acceptance.by_slot == [lines[20][f"kept_{slot}"] for slot in range(1, 6)]
    assert training.steps_done == 20


def test_an_evaluation_changes_no_bit_of_the_training(
    evaluated: dict[str, Any], tmp_path: Path, train: Callable[..., Any]
) -> None:
    def weights(settings: dict[str, Any]) -> torch.Tensor:
        training = train(settings)
        result: torch.Tensor = training.members[0].flat.weights
        return result.clone()

    evaluated |= {"log_every": 1}
    without = {**evaluated, "output_dir": str(tmp_path / "without")}
    del without["evaluate_every"]
    assert torch.equal(weights(evaluated), weights(without))
    assert losses(tmp_path / "out") == losses(tmp_path / "without")


def test_nothing_compiles_for_an_evaluation_after_the_warm_up(
    evaluated: dict[str, Any], train: Callable[..., Any]
) -> None:
    """Which is forbidden then: the evaluation would end the run."""
    with compile_plan.watch.lifted():
        training = train({**evaluated, "steps": 10, "compile_on_cpu": "aot_eager"})
        assert training.steps_done == 10 and training.warmup.units
    compile_plan.watch.open()


def test_without_paths_it_decodes_what_is_trained_on(
    settings: dict[str, Any], tmp_path: Path, train: Callable[..., Any]
) -> None:
    settings |= {"steps": 2, "evaluate_every": 1, "evaluation": {"prompts": 3, "max_tokens": 8}}
    train(settings)
    assert [one["step"] for one in events(tmp_path / "out", "evaluation")] == [1, 2]


def test_a_step_line_has_tau_where_there_is_one() -> None:
    workers = [WorkerStep(name="drafter-0", loss=1.5, tok_s=10.0)]
    plain = RunStep(
        step=3, steps=9, loss=1.5, tok_s=10.0, lr=1e-3, grad_norm=1.0, queued=0, queue_size=1, workers=workers
    )  # fmt: skip
    step = dataclasses.replace(plain, tau=2.345, kept=[0.75, 0.5])
    assert " loss=1.5000 tau=2.35 tok/s=10.0 " in step_lines(step).splitlines()[-1]
    assert "tau" not in step_lines(plain) and "tau" not in plain.record()
    assert step.record()["tau"] == 2.345 and step.record()["kept_2"] == 0.5
    assert step.scalars()["eval/tau"] == 2.345 and step.scalars()["eval/kept_1"] == 0.75
    assert not [name for name in plain.scalars() if name.startswith("eval/")]


def test_held_out_data_that_cannot_be_decoded_are_refused_before_the_training(
    evaluated: dict[str, Any], tmp_path: Path, train: Callable[..., Any]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"messages": []}\n', encoding="utf-8")
    evaluated["evaluation"] |= {"paths": [str(empty)]}
    with pytest.raises(ConfigError, match=r"evaluate_every: evaluation\.paths: .*no prompt"):
        train(evaluated)
    evaluated["evaluation"] |= {"paths": [str(tmp_path / "none.jsonl")]}
    assert main(["plan", str(write_config(evaluated, tmp_path / "plan.yaml"))]) == 2
