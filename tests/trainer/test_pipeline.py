"""The threads of a run: any number of them makes the same updates, the first to fail is the one that is named, and
others may go on without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import events, losses, poll, records
from trainer import feed
from trainer.micro_batch import MicroBatch
from trainer.model import blocks
from trainer.model.target import Target
from trainer.pipeline import Aborted, Channel, Worker
from trainer.replica import Replica
from trainer.report.stages import Stages
from trainer.sections import WatchdogConfig
from trainer.watchdog import Watchdog, who_holds_up

Train = Callable[..., Any]


def break_at(monkeypatch: pytest.MonkeyPatch, step: int, worker: str, error: Exception) -> None:
    """Let one drafter fail in the forward of a step."""
    original = Replica.loss_and_gradients

    def broken(self: Replica, batch: MicroBatch) -> None:
        if batch.step == step and threading.current_thread().name == worker:
            raise error
        return original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", broken)


# --- the same, whatever the number of threads -----------------------------------------------------------------------


def test_any_number_of_target_threads_makes_bitwise_the_same_run(train: Train, settings: dict[str, Any], tmp_path: Path
                                                                 ) -> None:  # fmt: skip
    weights = []
    for targets in (1, 3):
        settings["devices"]["target"] = ["cpu"] * targets
        training = train({**settings, "output_dir": str(tmp_path / str(targets))})
        weights.append(training.members[0].flat.weights.clone())
    assert losses(tmp_path / "1") == losses(tmp_path / "3")
    assert torch.equal(*weights)
    rows = records(tmp_path / "3", "metrics.jsonl")
    assert {row["worker"] for row in rows} >= {"loader-0", "target-0", "target-1", "target-2"}
    assert all(0 <= row[share] <= 1 for row in rows if row["worker"] for share in ("busy", "wait_input", "wait_peers"))


def test_the_threads_of_a_device_share_one_model_and_capture_each_their_own(tiny_target: Path) -> None:
    from trainer.model.target import load_targets
    from trainer.sections import TargetConfig

    config = TargetConfig(path=str(tiny_target), dtype="float32", captured_layers=2)
    one, other = load_targets(config, [torch.device("cpu")] * 2)
    assert one.model is other.model
    ids = [torch.randint(4, 400, (1, 20), generator=blocks.generator_for(number)) for number in range(2)]
    expected = [one.features(each) for each in ids]
    wrong: list[int] = []

    def work(target: Target, number: int) -> None:
        wrong.extend(number for _ in range(20) if not torch.equal(target.features(ids[number]), expected[number]))

    threads = [threading.Thread(target=work, args=pair) for pair in ((one, 0), (other, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_channel_hands_out_by_number_and_lets_nobody_run_ahead() -> None:
    channel: Channel[str] = Channel(2, first=5)
    put: list[int] = []

    def ahead() -> None:
        channel.put("six", 6)
        put.append(6)
        channel.put("seven", 7)
        put.append(7)

    thread = threading.Thread(target=ahead)
    thread.start()
    poll(lambda: put == [6])
    assert len(channel) == 1
    channel.put("five", 5)
    assert channel.get() == "five"
    thread.join()
    assert [channel.get(), channel.get()] == ["six", "seven"]
    channel.close()
    with pytest.raises(Aborted):
        channel.get()


# --- one fails ------------------------------------------------------------------------------------------------------


def test_a_failure_in_the_loader_ends_the_run_by_its_name(train: Train, settings: dict[str, Any], tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    original = feed.step_blocks

    def broken(*args: Any, step: int) -> Any:
        if step == 4:
            raise OSError("planted in the loader")
        return original(*args, step=step)

    monkeypatch.setattr(feed, "step_blocks", broken)
    train({**settings, "on_worker_death": "degrade"}, expect=1)
    said = capsys.readouterr()
    assert said.err.startswith("Exception in thread loader-0:\n") and said.err.count("Traceback") == 1
    assert "the run ends with loader-0: there is no other loader\n" in said.out
    (event,) = events(tmp_path / "out", "exception")
    assert (event["worker"], event["step"], event["doing"]) == ("loader-0", 4, "draws anchors")


def test_a_failure_in_the_backward_is_the_drafters_with_its_step(train: Train, settings: dict[str, Any], tmp_path: Path
                                                                 ) -> None:  # fmt: skip
    def plant(training: Any) -> None:
        calls: list[int] = []

        def broken(gradient: torch.Tensor) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise ArithmeticError("planted in the backward")

        next(training.members[1].drafter.parameters()).register_hook(broken)

    train(settings, expect=1, before=plant)
    (event,) = events(tmp_path / "out", "exception")
    assert (event["worker"], event["step"]) == ("drafter-1", 3)
    assert event["doing"] == "is in forward and backward" and "planted in the backward" in event["message"]


def test_of_two_workers_that_fail_by_themselves_the_first_is_reported_and_the_other_is_not(
    train: Train, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    original, other_is_in_it = Replica.loss_and_gradients, threading.Event()

    def broken(self: Replica, batch: MicroBatch) -> None:
        name = threading.current_thread().name
        if batch.step == 3 and name == "drafter-1":
            assert other_is_in_it.wait(60)
            raise ValueError("the first")
        if batch.step == 3 and name == "drafter-0":
            other_is_in_it.set()
            poll(lambda: events(tmp_path / "out", "exception"))
            raise KeyError("what came of it")
        return original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", broken)
    train(settings, expect=1)
    (event,) = events(tmp_path / "out", "exception")
    assert (event["worker"], event["step"], event["message"]) == ("drafter-1", 3, "the first")
    said = capsys.readouterr().err
    assert said.startswith("Exception in thread drafter-1:\n") and said.count("Traceback") == 1
    reasons = {event["worker"]: event["reason"] for event in events(tmp_path / "out", "worker_down")}
    assert reasons["drafter-0"] == reasons["drafter-1"] == "failed"


@pytest.mark.parametrize("sync", ["grads", "params"])
def test_the_others_do_a_lost_drafters_share_too(train: Train, settings: dict[str, Any], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                 sync: str) -> None:  # fmt: skip
    settings |= {"steps": 8, "batch_size": 6, "on_worker_death": "degrade", "sync": sync}
    settings["devices"]["drafter"] = ["cpu"] * 3
    train({**settings, "output_dir": str(tmp_path / "whole")})
    break_at(monkeypatch, 4, "drafter-1", ValueError("planted"))
    capsys.readouterr()
    training = train(settings)
    said = capsys.readouterr()
    assert said.err.startswith("Exception in thread drafter-1:\n") and said.err.count("Traceback") == 1
    (event,) = events(tmp_path / "out", "degraded")
    # On their own the others may have taken the step in which it failed.
    assert event["step"] == 3 or (sync == "params" and event["step"] == 4)
    left = "target-0, drafter-0, drafter-2 go on\n"
    assert f"degraded: without drafter-1, after {event['step']} steps; {left}" in said.out
    assert event["lost"] == ["drafter-1"] and "drafter-2" in event["left"]
    lines = [line for line in said.out.splitlines() if line.startswith("step=8 loss=")]
    assert len(lines) == 1 and lines[0].endswith(" lost=drafter-1")
    assert training.members.keys() == {0, 2}
    assert torch.equal(training.members[0].flat.weights, training.members[2].flat.weights)
    if sync == "grads":
        # All shares of every step are still trained on, as one step.
        assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_the_other_target_thread_does_a_lost_ones_work(train: Train, settings: dict[str, Any], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    train({**settings, "output_dir": str(tmp_path / "whole")})
    settings["devices"]["target"] = ["cpu", "cpu"]
    original = Target.features
    calls: list[int] = []

    def broken(self: Target, ids_BS: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "target-1":
            calls.append(1)
            if len(calls) == 3:
                raise KeyError("planted")
        return original(self, ids_BS)

    monkeypatch.setattr(Target, "features", broken)
    training = train({**settings, "on_worker_death": "degrade"})
    assert training.lost == ["target-1"]
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_the_last_drafter_cannot_be_done_without(train: Train, settings: dict[str, Any], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                                 ) -> None:  # fmt: skip
    settings["devices"]["drafter"] = ["cpu"]
    break_at(monkeypatch, 2, "drafter-0", ValueError("planted"))
    train({**settings, "on_worker_death": "degrade"}, expect=1)
    assert "the run ends with drafter-0: it was the last drafter\n" in capsys.readouterr().out


# --- one hangs ------------------------------------------------------------------------------------------------------


def test_a_worker_that_hangs_is_named_with_every_threads_stack_and_ends_the_run(
    train: Train, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    original = Replica.loss_and_gradients

    def hang_until_it_is_noticed(self: Replica, batch: MicroBatch) -> None:
        if batch.step == 3 and threading.current_thread().name == "drafter-1":
            poll(lambda: events(tmp_path / "out", "exception"))
        return original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", hang_until_it_is_noticed)
    train({**settings, "watchdog": {"least_s": 3, "factor": 1}, "on_worker_death": "degrade"}, expect=1)
    (event,) = events(tmp_path / "out", "no_progress")
    assert event["worker"] == "drafter-1" and event["step"] == 2
    assert "hang_until_it_is_noticed" in event["stacks"]["drafter-1"]
    assert "drafter-0 waits for its peers (step 3)" in event["message"]
    said = capsys.readouterr()
    assert said.out.count("  in drafter-1:\n") == 1 and "hang_until_it_is_noticed" in said.out
    assert said.err.startswith("Exception in thread drafter-1:\n") and "NoProgress: no step for " in said.err
    assert "the run ends with drafter-1: it has not ended, it hangs\n" in said.out


def test_the_watchdog_knows_slow_steps_checkpoints_and_a_process_that_was_frozen() -> None:
    def quiet(dog: Watchdog, seconds: float, start: float, *, away: bool = False) -> str | None:
        told = [dog.look(start + second, away=away) for second in range(1, round(seconds) + 1)]
        return next((one for one in told if one), None)

    dog = Watchdog(WatchdogConfig(), now=0.0)
    assert quiet(dog, 599, 0.0) is None, "the first step takes what is not compiled yet, and has no median"
    for step in range(10):
        dog.stepped(1000.0 + 5 * step)
    assert dog.limit_s(away=False) == 100.0
    assert quiet(dog, 99, 1045.0) is None
    dog.stepped(1145.0)
    assert quiet(dog, 499, 1145.0, away=True) is None
    dog.stepped(1650.0)
    assert dog.look(1651.0, away=False) is None
    assert dog.look(99999.0, away=False) is None, "it was frozen, not hanging"
    said = quiet(dog, 101, 99999.0)
    assert said is not None and said.startswith("no step for 10") and said.endswith("(limit 100.0 s)")
    assert quiet(dog, 500, 100_200.0) is None, "told once"


def test_waiting_is_counted_while_it_goes_on_and_a_worker_that_is_done_is_not_busy() -> None:
    waits, done = Worker("target-0"), Worker("loader-0")
    stages = Stages({"target-0": waits, "loader-0": done}, on_device=[], now=time.monotonic())
    done.end()
    with waits.waiting("input"):
        shares = stages.shares(time.monotonic() + 1000)
    assert shares["target-0"]["wait_input"] > 0.99 and shares["target-0"]["busy"] < 0.01
    assert shares["loader-0"]["wait_room"] > 0.99 and shares["loader-0"]["busy"] < 0.01


def test_who_holds_up_the_others_is_the_one_that_waits_for_none() -> None:
    loader, target, drafter = (Worker(name) for name in ("loader-0", "target-0", "drafter-0"))
    loader.end()
    with target.waiting("room"):
        assert who_holds_up([loader, target, drafter]) is drafter
        with drafter.waiting("input"):
            assert str(target) == "target-0 waits for room"
