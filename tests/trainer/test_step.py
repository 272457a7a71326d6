"""An optimizer step with every option: the same for any number of drafters, and no device is waited for in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.support import losses, records
from trainer.config import ConfigError
from trainer.kernels import plain
from trainer.micro_batch import MicroBatch
from trainer.model.attention import DenseAttention
from trainer.model.drafter import Drafter
from trainer.model.loss import PLAIN, block_loss
from trainer.replica import Replica
from trainer.schedule import learning_rate

Train = Callable[..., Any]
PACE: dict[str, Any] = {"weights": "d-pace"}


def weights_of(training: Any, rank: int = 0) -> Tensor:
    weights: Tensor = training.members[rank].flat.weights
    return weights


def norms(directory: Path) -> list[float]:
    return [record["grad_norm"] for record in records(directory, "metrics.jsonl") if record["worker"] is None]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[MicroBatch]]:
    """All that the replicas of the runs to come are given, by step."""
    original, seen = Replica.loss_and_gradients, {}

    def noted(self: Replica, batch: MicroBatch) -> None:
        seen.setdefault(batch.step, []).append(batch)
        original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", noted)
    return seen


def slots(directory: Path) -> list[list[float]]:
    rows = [record for record in records(directory, "metrics.jsonl") if record["worker"] is None]
    return [[value for key, value in row.items() if key.startswith("slot_p_")] for row in rows]


@pytest.mark.parametrize("change", [{}, {"sync": "params"}, {"loss": PACE}], ids=["grads", "params", "d-pace"])
def test_a_step_says_how_probable_the_right_token_was_in_each_slot_over_all_replicas(
    train: Train, settings: dict[str, Any], tmp_path: Path, batches: dict[int, list[MicroBatch]], change: dict[str, Any]
) -> None:
    settings["devices"]["drafter"] = ["cpu"] * 3
    begun: list[Drafter] = []

    def note(training: Any) -> None:
        begun.append(Drafter(training.members[0].drafter.shape))
        begun[0].load_state_dict(training.members[0].drafter.state_dict())

    training = train({**settings, **change, "batch_size": 6, "steps": 2}, before=note)
    right: dict[int, list[float]] = {}
    for batch in batches[1]:
        blocks, ends = batch.blocks, training.members[0].ends
        drafted_BTH = begun[0](batch.features_BSF, blocks, ends, plain(DenseAttention()))
        p_BNKV = F.linear(drafted_BTH, ends.head_VH).softmax(dim=-1).unflatten(1, (-1, blocks.block_size))
        for row, block, slot in (blocks.weights_BNk > 0).nonzero().tolist():
            label = blocks.labels_BNk[row, block, slot]
            right.setdefault(slot, []).append(p_BNKV[row, block, slot + 1, label].item())
    expected = [sum(right[slot]) / len(right[slot]) for slot in sorted(right)]
    first, second = slots(tmp_path / "out")
    assert first == pytest.approx(expected, rel=1e-4) and len(first) == training.config.drafter.block_size - 1
    assert second != first


@pytest.mark.parametrize("clip_norm", [1.0, 1e-3])
def test_a_step_with_pace_weights_is_that_of_the_weighted_mean_over_all_replicas(
    train: Train, settings: dict[str, Any], tmp_path: Path, batches: dict[int, list[MicroBatch]], clip_norm: float
) -> None:
    """By torch's own AdamW and clipping, on the whole batch at once, divided by the sum of all its weights."""
    settings["devices"]["drafter"] = ["cpu"] * 3
    settings["optimizer"]["clip_norm"] = clip_norm
    begun: list[dict[str, Tensor]] = []

    def note(training: Any) -> None:
        begun.append({name: tensor.clone() for name, tensor in training.members[0].drafter.state_dict().items()})

    training = train({**settings, "batch_size": 6, "loss": PACE}, before=note)
    config, member = training.config, training.members[0]
    drafter = Drafter(member.drafter.shape)
    drafter.load_state_dict(begun[0])
    groups = [
        {"params": [one for one in drafter.parameters() if (one.dim() > 1) is matrix], "weight_decay": 0.01 * matrix}
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    expected_loss, expected_norm = [], []
    for step in range(1, config.steps + 1):
        found = [
            block_loss(
                drafter(batch.features_BSF, batch.blocks, member.ends, plain(DenseAttention())), batch.blocks,
                member.ends.head_VH, weight_sum=1.0, chunk_rows=1000, head_loss=PLAIN[False], alpha=0.5,
            ) for batch in batches[step]
        ]  # fmt: skip
        assert len(found) == 3
        loss = sum(one for one, *_ in found) / sum(weight for _, weight, _ in found)
        optimizer.zero_grad()
        loss.backward()
        expected_norm.append(torch.nn.utils.clip_grad_norm_(drafter.parameters(), clip_norm).item())
        expected_loss.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config=config.optimizer, steps=config.steps)
        optimizer.step()
    assert losses(tmp_path / "out") == pytest.approx(expected_loss, rel=1e-4)
    assert norms(tmp_path / "out") == pytest.approx(expected_norm, rel=1e-3)
    off = torch.cat([(one - drafter.state_dict()[name]).abs().flatten() for name, one in member.weights().items()])
    assert off.max() < 2e-3 and off.mean() < 1e-5


@pytest.mark.parametrize("loss", [PACE, {**PACE, "kernel": "chunked", "chunk_rows": 20}], ids=["fused", "chunked"])
def test_pace_weights_make_the_same_updates_for_any_number_of_drafters(
    train: Train, settings: dict[str, Any], tmp_path: Path, loss: dict[str, Any]
) -> None:
    runs = {}
    settings |= {"batch_size": 6, "loss": loss}
    settings["optimizer"]["ema"] = 0.9
    for name, count, early in (("1", 1, False), ("2", 2, False), ("3", 3, False), ("early", 3, True)):

        def exchange_early(training: Any, early: bool = early) -> None:
            for member in training.members.values():
                member.exchange_early() if early else None

        devices = {"target": ["cpu"], "drafter": ["cpu"] * count}
        training = train({**settings, "output_dir": str(tmp_path / name), "devices": devices}, before=exchange_early)
        assert bool(training.members[0].flat.parts) is early
        assert all(torch.equal(weights_of(training, rank), weights_of(training)) for rank in range(count))
        averages = [member.ema.weights for member in training.members.values()]
        assert all(torch.equal(average, averages[0]) for average in averages)
        runs[name] = losses(tmp_path / name), norms(tmp_path / name), weights_of(training).clone()
    for name in ("2", "3", "early"):
        assert runs[name][0] == pytest.approx(runs["1"][0], rel=1e-4)
        assert runs[name][1] == pytest.approx(runs["1"][1], rel=1e-3)
        assert (runs[name][2] - runs["1"][2]).abs().max() < 2e-3
        assert (runs[name][2] - runs["1"][2]).abs().mean() < 1e-5
    assert torch.equal(runs["early"][2], runs["3"][2]) and runs["early"][0] == runs["3"][0]


def test_a_lost_drafters_share_counts_by_its_pace_weights_too(train: Train, settings: dict[str, Any], tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Two micro-batches of one drafter, which have to add up their weights as well."""
    settings |= {"loss": PACE, "on_worker_death": "degrade"}
    train({**settings, "output_dir": str(tmp_path / "whole")})
    original = Replica.loss_and_gradients

    def broken(self: Replica, batch: MicroBatch) -> None:
        if batch.step == 3 and self is lost[0]:
            raise ValueError("planted")
        original(self, batch)

    lost: list[Replica] = []
    monkeypatch.setattr(Replica, "loss_and_gradients", broken)
    training = train(settings, before=lambda training: lost.append(training.members[1]))
    assert training.lost == ["drafter-1"]
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert norms(tmp_path / "out") == pytest.approx(norms(tmp_path / "whole"), rel=1e-3)
    for found, whole in zip(slots(tmp_path / "out"), slots(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(whole, rel=1e-3)


def test_replicas_that_step_on_their_own_divide_by_their_own_pace_weights(
    train: Train, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings |= {"loss": PACE, "steps": 1}
    train({**settings, "output_dir": str(tmp_path / "grads")})
    train({**settings, "sync": "params", "output_dir": str(tmp_path / "params")})
    assert losses(tmp_path / "params") == pytest.approx(losses(tmp_path / "grads"), rel=1e-5)
    own = {
        name: [
            record["loss"]
            for record in records(tmp_path / name, "metrics.jsonl")
            if "drafter" in (record["worker"] or "")
        ]
        for name in ("grads", "params")
    }
    assert own["params"] == pytest.approx(own["grads"], rel=1e-5) and len(own["grads"]) == 2


def test_a_run_with_pace_weights_resumes_to_the_bit_and_not_with_other_weights(
    train: Train, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["optimizer"] |= {"schedule": "wsd", "warmup_fraction": 0.0, "decay_fraction": 0.1, "ema": 0.9}
    settings["loss"] = PACE
    whole = train({**settings, "steps": 10, "output_dir": str(tmp_path / "whole")})
    split = {**settings, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": 10, "checkpoint_every": 4})
    shutil.rmtree(tmp_path / "split" / "checkpoints" / "step-10")
    resumed = train({**split, "steps": 10})
    assert losses(tmp_path / "split")[-2:] == losses(tmp_path / "whole")[-2:]
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert torch.equal(resumed.members[0].ema.weights, whole.members[0].ema.weights)
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    with pytest.raises(ConfigError, match="not the same loss as then"):
        train({**split, "steps": 11, "loss": {**PACE, "alpha": 0.4}})
    train({**split, "steps": 11, "loss": {**PACE, "kernel": "chunked", "chunk_rows": 20}})


class NoWaiting(TorchDispatchMode):
    """Refuses what would make a GPU's thread wait: values that reach the host, and sizes that depend on them. What is
    only copied to the CPU as a whole is none of torch's operations there: tests/gpu/test_step.py sees that, too."""

    REFUSED = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "_to_cpu")

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen += 1
        assert not name.startswith(self.REFUSED), f"{name} waits for the device"
        if name == "index":
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask's size is waited for"
        return func(*args, **(kwargs or {}))


def test_what_would_wait_is_seen() -> None:
    values = torch.arange(3.0)
    for waits in (values[0].item, values.nonzero, lambda: values[values > 1], lambda: bool(values[0])):
        with pytest.raises(AssertionError, match=r"waits for|waited for"), NoWaiting():
            waits()


@pytest.mark.parametrize("weights", ["exponential", "d-pace"])
@pytest.mark.parametrize("kernel", ["fused", "chunked"])
@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize(("drafters", "sync"), [(1, "grads"), (2, "grads"), (2, "params")])
def test_nothing_in_a_step_waits_for_the_device(train: Train, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
                                                weights: str, kernel: str, ema: float | None, drafters: int, sync: str
                                                ) -> None:  # fmt: skip
    """Each with gradients that are clipped, and several chunks."""
    settings |= {"steps": 3, "sync": sync, "loss": {"kernel": kernel, "weights": weights, "chunk_rows": 30}}
    settings["devices"]["drafter"] = ["cpu"] * drafters
    settings["optimizer"] |= {"ema": ema, "clip_norm": 1e-3}
    original, seen = Replica.step, []

    def watched(self: Replica, *positional: Any, **named: Any) -> Any:
        with NoWaiting() as mode:
            figures = original(self, *positional, **named)
        seen.append(mode.seen)
        return figures

    monkeypatch.setattr(Replica, "step", watched)
    train(settings)
    assert len(seen) == 3 * drafters and min(seen) > 100
