"""The moving average of the weights: what it is of, and that it lasts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.support import events
from trainer.checkpoint import AVERAGES, WEIGHTS
from trainer.config import Config
from trainer.micro_batch import MicroBatch
from trainer.optim import AdamW, Ema, FlatWeights
from trainer.plan import forecast
from trainer.replica import Replica
from trainer.sections import OptimizerConfig

Train = Callable[..., Any]


def test_it_is_the_weighted_mean_of_the_weights_after_every_step_that_was_taken() -> None:
    flat = FlatWeights(torch.nn.Linear(7, 5, bias=False))
    ema, optimizer = Ema(flat.weights, 0.9), AdamW(flat, OptimizerConfig(lr=0.1))
    seen: list[torch.Tensor] = []
    for step in range(12):
        flat.gradients.copy_(torch.randn(flat.gradients.shape, generator=torch.Generator().manual_seed(step)))
        # The very first step is broken, and one in the middle: they leave no trace, nor do the weights before.
        broken = torch.tensor(float(step in (0, 5)))
        before = ema.weights.clone()
        optimizer.step(norm=flat.gradients.norm(), broken=broken)
        ema.update(taken=optimizer.taken, broken=broken)
        if broken:
            assert torch.equal(ema.weights, before)
            continue
        seen.append(flat.weights.clone())
        shares = torch.tensor([0.9**age for age in reversed(range(len(seen)))])
        expected = (torch.stack(seen) * (shares / shares.sum())[:, None]).sum(dim=0)
        assert torch.allclose(ema.weights, expected, atol=1e-6)
    assert optimizer.taken == 10


@pytest.fixture
def averaged(settings: dict[str, Any]) -> dict[str, Any]:
    settings["optimizer"] |= {"ema": 0.8, "schedule": "constant", "warmup_fraction": 0}
    return settings


def average_of(training: Any, rank: int = 0) -> torch.Tensor:
    average: torch.Tensor = training.members[rank].ema.weights
    return average


@pytest.mark.parametrize("sync", ["grads", "params"])
def test_it_is_restored_to_the_bit_and_equal_over_the_replicas(train: Train, averaged: dict[str, Any], tmp_path: Path,
                                                               sync: str) -> None:  # fmt: skip
    averaged |= {"sync": sync, "sync_every": 3 if sync == "params" else 1, "checkpoint_every": 7}
    whole = train({**averaged, "steps": 10, "output_dir": str(tmp_path / "whole")})
    assert torch.equal(average_of(whole), average_of(whole, 1))
    split = {**averaged, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": 7})
    resumed = train({**split, "steps": 10})
    assert torch.equal(average_of(resumed), average_of(whole))
    assert not torch.equal(average_of(whole), whole.members[0].flat.weights)
    saved = tmp_path / "split" / "checkpoints" / "step-10"
    weights, average = load_file(saved / WEIGHTS), load_file(saved / AVERAGES)
    assert {name: tensor.shape for name, tensor in average.items()} == {n: t.shape for n, t in weights.items()}
    for name, tensor in resumed.members[0].averages().items():
        assert torch.equal(average[name], tensor)


def test_weights_that_are_averaged_over_replicas_leave_the_average_that_one_with_their_mean_would_have(
    train: Train, averaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that step apart and meet at every third step."""
    original, after = Replica.step, {}

    def noted(self: Replica, *positional: Any, **named: Any) -> Any:
        figures = original(self, *positional, **named)
        after.setdefault(self.steps_done, []).append(self.flat.weights.clone())
        return figures

    monkeypatch.setattr(Replica, "step", noted)
    training = train({**averaged, "sync": "params", "sync_every": 3})
    means = [torch.stack(weights).mean(dim=0) for _, weights in sorted(after.items())]
    shares = torch.tensor([0.8**age for age in reversed(range(len(means)))])
    expected = (torch.stack(means) * (shares / shares.sum())[:, None]).sum(dim=0)
    assert len(means) == 6 and torch.allclose(average_of(training), expected, atol=1e-6)


def test_one_that_is_switched_on_in_a_resume_begins_with_the_weights_of_then_and_is_said_to(
    train: Train, averaged: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = {**averaged, "optimizer": {**averaged["optimizer"], "ema": None}}
    first = train({**without, "steps": 3})
    assert not (tmp_path / "out" / "checkpoints" / "step-3" / AVERAGES).exists()
    weights = first.members[0].flat.weights.clone()
    begun: list[torch.Tensor] = []
    train({**averaged, "steps": 4}, before=lambda training: begun.append(average_of(training).clone()))
    assert torch.equal(begun[0], weights)
    said = capsys.readouterr().out
    assert "resume with changes since step-3: steps 3 -> 4, optimizer.ema None -> 0.8\n" in said
    assert [event["step"] for event in events(tmp_path / "out", "resume")] == [3]
    train({**without, "steps": 5})
    assert not (tmp_path / "out" / "checkpoints" / "step-5" / AVERAGES).exists()


@pytest.mark.parametrize("weights", ["exponential", "d-pace"])
def test_a_step_that_is_skipped_is_no_part_of_it_and_none_after_a_resume_either(
    train: Train, averaged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    averaged |= {"on_nonfinite": "skip", "loss": {"weights": weights}}
    original, after = Replica.loss_and_gradients, {}

    def poisoned(self: Replica, batch: MicroBatch) -> None:
        if batch.step in (1, 3):
            batch.features_BSF.fill_(float("nan"))
        original(self, batch)

    def noted(self: Replica, *positional: Any, **named: Any) -> Any:
        figures = stepped(self, *positional, **named)
        after[self.steps_done] = self.flat.weights.clone()
        return figures

    stepped = Replica.step
    monkeypatch.setattr(Replica, "loss_and_gradients", poisoned)
    monkeypatch.setattr(Replica, "step", noted)
    whole = train({**averaged, "steps": 6, "output_dir": str(tmp_path / "whole")})
    assert torch.equal(after[3], after[2])
    # Step 3 made none: the four that were taken count by their order alone.
    order = [0.8**3, 0.8**2, 0.8, 1.0]
    expected = sum(after[step] * share for step, share in zip((2, 4, 5, 6), order, strict=True)) / sum(order)
    assert torch.allclose(average_of(whole), expected, atol=1e-6)
    split = {**averaged, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": 4})
    resumed = train({**split, "steps": 6})
    assert torch.equal(average_of(resumed), average_of(whole))


def test_the_plan_counts_its_memory(averaged: dict[str, Any], tiny_target: Path) -> None:
    from transformers import AutoConfig

    model, found = AutoConfig.from_pretrained(tiny_target), []
    for ema in (None, 0.9):
        config = Config.model_validate({**averaged, "optimizer": {"lr": 1e-3, "ema": ema}})
        shape = forecast.shape_for(model, config.drafter, captured=3)
        found.append(forecast.memory(config, model, shape, layer_ids=[1, 2, 3], parameters=1000)["cpu"].drafters)
    # Beside weights, gradients and two moments.
    assert found[1] - found[0] == pytest.approx(found[0] / 4, rel=0.01)
