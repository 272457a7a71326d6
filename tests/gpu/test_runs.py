"""Whole runs on a GPU: several drafters on a device, their work recorded as CUDA graphs, nothing compiled late."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import TrainerProcess, documents, events, losses, poll, records, write_config
from trainer.compile_plan import watch
from trainer.config import ConfigError
from trainer.micro_batch import MicroBatch
from trainer.replica import Replica

Settings = dict[str, Any]
CHANGE_A_SHAPE = """
import trainer.replica, dataclasses
original = trainer.replica.Replica.loss_and_gradients
def shorter(self, batch):
    if batch.step == 5:
        batch = dataclasses.replace(batch, features_BSF=batch.features_BSF[:, :-16])
    return original(self, batch)
trainer.replica.Replica.loss_and_gradients = shorter
"""


def test_three_drafters_on_one_device_train_after_the_warm_up_and_hold_the_memory_they_name(
    start_trainer: Callable[..., TrainerProcess], on_gpu: dict[str, Any], tmp_path: Path
) -> None:
    run = start_trainer(write_config({**on_gpu, "steps": 100_000}, tmp_path / "config.yaml"))
    run.wait_for_step(60, timeout_s=300)
    assert run.heartbeat()["gpu_memory_bytes"]["cuda:0"] > 0
    run.terminate()
    code, out, err = run.finish()
    assert (code, err) == (0, ""), out
    assert re.search(r"phase=compile_warmup unit=1/1 device=cuda:0 shape=2x128\+16x8 compiled=\d+ seconds=", out)
    of_step = losses(run.run_dir)
    assert sum(of_step[55:60]) < sum(of_step[:5])
    times = [record["time"] for record in records(run.run_dir, "metrics.jsonl") if record["worker"] is None]
    print(f"{(times[-1] - times[4]) / (len(times) - 5) * 1000:.1f} ms a step")
    print("\n".join(out.splitlines()[-12:]))


def test_a_run_over_buckets_compiles_nothing_after_the_warm_up(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path
) -> None:
    on_gpu["data"] |= {"paths": documents(tmp_path), "buckets": [16, 32, 128]}
    training = train({**on_gpu, "steps": 60, "cuda_graphs": "on"})  # a late compile would end it
    assert len({unit.context_length for unit in training.warmup.units}) == 3 and watch.sealed
    assert all(len(member._graphs._graphs) == 4 for member in training.members.values())


def test_a_shape_that_was_not_warmed_is_an_error_of_the_worker_and_no_silent_compile(
    start_trainer: Callable[..., TrainerProcess], on_gpu: dict[str, Any], tmp_path: Path
) -> None:
    run = start_trainer(write_config(on_gpu, tmp_path / "config.yaml"), planted=CHANGE_A_SHAPE)
    poll(lambda: run.process.poll() is not None or run.events("exception"), timeout_s=300)
    died = time.monotonic()
    code, _, err = run.finish()
    assert time.monotonic() - died < 15
    assert code == 1 and err.startswith("Exception in thread drafter-")
    (event,) = run.events("exception")
    assert "a micro-batch of 2 x (112 tokens, 16 anchors) on cuda:0 is not in the compile plan" in event["message"]
    # Step 4 has been begun by all; whether its figures have arrived is the device's affair.
    assert max(record["step"] for record in records(run.run_dir, "metrics.jsonl")) in (3, 4)


def test_recorded_steps_leave_the_bits_of_steps_that_are_launched_kernel_by_kernel(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path
) -> None:
    """With gradients that are averaged, with weights that are, and with one drafter alone."""
    for name, change in {
        "grads": {}, "params": {"sync": "params", "sync_every": 4},
        "alone": {"devices": {"target": ["cuda:0"], "drafter": ["cuda:0"]}},
    }.items():  # fmt: skip
        found = {}
        for graphs in ("on", "off"):
            out = tmp_path / f"{name}-{graphs}"
            # Compiled, the target's layers round in another way.
            on_gpu["target"]["compile"] = "off"
            training = train({**on_gpu, **change, "cuda_graphs": graphs, "output_dir": str(out)})
            member = training.members[0]
            assert len(member._graphs._graphs) == (2 if graphs == "on" else 0)
            found[graphs] = losses(out), member.flat.weights.cpu(), records(out, "metrics.jsonl")[-1]["grad_norm"]
        assert len(found["on"][0]) == 30 and found["on"][0] == found["off"][0]
        assert torch.equal(found["on"][1], found["off"][1]) and found["on"][2] == found["off"][2]


def test_a_run_that_loses_a_drafter_records_for_those_that_are_left(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train({**on_gpu, "output_dir": str(tmp_path / "whole")})
    original = Replica.loss_and_gradients

    def broken(self: Replica, batch: MicroBatch) -> None:
        if batch.step == 7 and threading.current_thread().name == "drafter-1":
            raise ValueError("planted")
        original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", broken)
    out = tmp_path / "lost"
    training = train({**on_gpu, "cuda_graphs": "on", "on_worker_death": "degrade", "output_dir": str(out)})
    assert training.lost == ["drafter-1"] and events(out, "degraded")
    # First and later micro-batches of a step, and the optimizer.
    assert [len(member._graphs._graphs) for member in training.members.values()] == [3, 3]
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=1e-2)
    assert watch.sealed and whole.steps_done == training.steps_done == 30


def test_a_step_that_cannot_be_recorded_is_launched_kernel_by_kernel_with_a_word(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    original = Replica._finish

    def looks(self: Replica, *positional: Any, **named: Any) -> None:
        assert self._loss.item() >= 0  # waits for the device, which no recording can
        original(self, *positional, **named)

    monkeypatch.setattr(Replica, "_finish", looks)
    train(on_gpu)
    said = capsys.readouterr().out
    assert re.search(r"graphs=target-0 seconds=", said)
    assert len(re.findall(r"graphs=drafter-\d none: every kernel is launched by itself, much slower: ", said)) == 3
    assert len(events(tmp_path / "out", "no_graphs")) == 3 and len(losses(tmp_path / "out")) == 30
    with pytest.raises(ConfigError, match="cannot record the work of drafter-0"):
        train({**on_gpu, "cuda_graphs": "on", "resume": "never", "output_dir": str(tmp_path / "on")})


@pytest.mark.parametrize("sync", ["grads", "params"])
def test_a_loss_that_is_not_finite_touches_no_weights_of_a_recorded_step(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    original, before = Replica.loss_and_gradients, {}

    def poisoned(self: Replica, batch: MicroBatch) -> None:
        if batch.step == 5 and threading.current_thread().name == "drafter-2":
            torch.cuda.current_stream().wait_event(batch.ready)  # or the target would write over it
            batch.features_BSF.fill_(float("nan"))
        if batch.step == 5:
            before[threading.current_thread().name] = self, self.flat.weights.clone()
        original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", poisoned)
    train({**on_gpu, "cuda_graphs": "on", "sync": sync}, expect=1)
    (event,) = events(tmp_path / "out", "exception")
    assert event["worker"] == "drafter-2" and "at step 5: done once more everything is finite" in event["message"]
    assert len(before) == 3 and all(torch.equal(member.flat.weights, weights) for member, weights in before.values())


def test_the_layer_of_a_bad_weight_is_named_from_compiled_code_and_nothing_compiles_for_it(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path
) -> None:
    def plant(training: Any) -> None:
        member = training.members[1]
        member.flat.named(member.flat.weights)["layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
        member.flat.spread()
        torch.cuda.synchronize()
        compiles.append(watch.compiles)

    compiles: list[int] = []
    train({**on_gpu, "cuda_graphs": "on"}, expect=1, before=plant)
    (event,) = events(tmp_path / "out", "nonfinite")
    assert event["worker"] == "drafter-1"
    assert event["where"] == "in the forward: the output of layers.1, whose weights are not finite"
    assert watch.sealed and watch.compiles == compiles[0]


@pytest.mark.parametrize("sync", ["grads", "params"])
def test_recorded_steps_that_are_skipped_leave_the_bits_of_steps_that_are_not_recorded(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    original = Replica.loss_and_gradients

    def poisoned(self: Replica, batch: MicroBatch) -> None:
        if batch.step in (4, 9, 10) and threading.current_thread().name == "drafter-1":
            torch.cuda.current_stream().wait_event(batch.ready)
            batch.features_BSF.fill_(float("inf"))
        original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", poisoned)
    on_gpu |= {"on_nonfinite": "skip", "max_skipped": 3, "sync": sync}
    on_gpu["target"]["compile"] = "off"
    weights = []
    for graphs in ("on", "off"):
        training = train({**on_gpu, "cuda_graphs": graphs, "output_dir": str(tmp_path / graphs)})
        assert [event["step"] for event in events(tmp_path / graphs, "nonfinite")] == [4, 9, 10]
        assert all(member.refused == 3 and int(member.optimizer.taken) == 27 for member in training.members.values())
        weights.append(training.members[2].flat.weights.cpu())
    assert torch.equal(*weights) and bool(torch.isfinite(weights[0]).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_drafters_on_two_devices_exchange_inside_the_recorded_backward_to_the_same_losses(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path
) -> None:
    found = {}
    on_gpu["target"]["compile"] = "off"
    for name, drafters, graphs in (
        ("one", ["cuda:0", "cuda:0"], "on"), ("two", ["cuda:0", "cuda:1"], "on"), ("plain", ["cuda:0", "cuda:1"], "off")
    ):  # fmt: skip
        devices = {"target": ["cuda:0"], "drafter": drafters}
        training = train({**on_gpu, "devices": devices, "cuda_graphs": graphs, "output_dir": str(tmp_path / name)})
        assert bool(training.members[0].flat.parts) == (name != "one")
        found[name] = losses(tmp_path / name)
    assert found["two"] == found["plain"]
    # Each device has kernels of its own, and what torch tunes by measuring, it may tune differently for each.
    assert found["two"] == pytest.approx(found["one"], rel=1e-3)

