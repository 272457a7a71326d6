"""Whole runs on the tiny target: reproducible to the bit, the same for any number of drafters, resumable, NaN-proof."""

from __future__ import annotations

import collections
import itertools
import math
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.support import documents, events, losses, records
from trainer.checkpoint import WEIGHTS, steps_on_disk
from trainer.config import Config, ConfigError
from trainer.feed import step_blocks
from trainer.micro_batch import MicroBatch
from trainer.replica import Replica
from trainer.report.throughput import Decay, SpeedChange

Train = Callable[..., Any]


def weights_of(training: Any, rank: int = 0) -> torch.Tensor:
    return training.members[rank].flat.weights


def test_the_same_seed_gives_bitwise_the_same_losses_and_another_seed_does_not(train: Train, settings: dict[str, Any],
                                                                               tmp_path: Path) -> None:  # fmt: skip
    runs = []
    for name, seed in (("one", 11), ("two", 11), ("three", 12)):
        training = train({**settings, "output_dir": str(tmp_path / name), "seed": seed})
        runs.append((losses(tmp_path / name), weights_of(training).clone()))
    assert len(runs[0][0]) == 6 and all(math.isfinite(loss) for loss in runs[0][0])
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


def test_what_is_drawn_for_a_row_follows_from_seed_step_and_place_and_from_nothing_drawn_before(
    settings: dict[str, Any]
) -> None:
    def anchors(*, seed: int = 11, step: int = 1, rows: int = 2) -> list[list[int]]:
        ids_BS = torch.arange(48).expand(rows, -1)
        config = Config.model_validate({**settings, "seed": seed})
        found: list[list[int]] = step_blocks(
            config, ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), torch.zeros_like(ids_BS), step=step
        ).anchors_BN.tolist()
        return found

    torch.manual_seed(0)
    first, second = anchors()
    torch.manual_seed(1)
    assert anchors(rows=3)[:2] == [first, second]
    drawn = [first, second, *anchors(step=2), *anchors(seed=12), *anchors(seed=12, step=2)]
    assert len(set(map(tuple, drawn))) == 8


@pytest.mark.parametrize("drafters", [2, 3])
def test_more_drafters_make_the_same_updates_from_the_same_batch(train: Train, settings: dict[str, Any],
                                                                 tmp_path: Path, drafters: int) -> None:  # fmt: skip
    runs = []
    settings["batch_size"] = 6
    for count in (1, drafters):
        devices = {"target": ["cpu"], "drafter": ["cpu"] * count}
        training = train({**settings, "output_dir": str(tmp_path / str(count)), "devices": devices})
        runs.append((losses(tmp_path / str(count)), weights_of(training).clone()))
        for rank in range(count):
            assert torch.equal(weights_of(training, rank), weights_of(training))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-4)
    # Adam's first steps are of size lr whatever the gradient, so a rounding difference can show at that scale.
    assert (runs[0][1] - runs[1][1]).abs().max() < 2e-3
    assert (runs[0][1] - runs[1][1]).abs().mean() < 1e-5


def test_a_resumed_run_is_to_the_bit_the_run_that_never_ended(train: Train, settings: dict[str, Any], tmp_path: Path
                                                              ) -> None:  # fmt: skip
    # A constant rate, since the schedule knows the number of steps, which the first half must not reach.
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0}
    document = tmp_path / "short.txt"
    document.write_text("a document of few rows, so that the resume lands in a later epoch. " * 20)
    settings["data"]["paths"] = [str(document)]
    whole = train({**settings, "steps": 10, "output_dir": str(tmp_path / "whole")})
    split = {**settings, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": 7})
    resumed = train({**split, "steps": 10})
    assert resumed.saves.last == str(tmp_path / "split" / "checkpoints" / "step-10")
    events = records(tmp_path / "split", "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "resume"] == [7]
    assert losses(tmp_path / "split") == losses(tmp_path / "whole")
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert resumed.cursor == whole.cursor and whole.cursor.epoch > 0
    moments = resumed.members[0].moments()
    assert all(torch.equal(moments[name], moment) for name, moment in whole.members[0].moments().items())


def test_what_changes_no_bit_may_change_on_a_resume(train: Train, settings: dict[str, Any], tmp_path: Path) -> None:
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0}
    whole = train({**settings, "steps": 9, "output_dir": str(tmp_path / "whole")})
    train({**settings, "steps": 4})
    settings |= {"log_every": 4, "queue_depth": 5, "checkpoint_every": 2, "replica_check_every": 3}
    settings["devices"]["target"] = ["cpu"] * 3
    resumed = train({**settings, "steps": 9})
    assert torch.equal(weights_of(resumed), weights_of(whole)) and resumed.cursor == whole.cursor
    rows = [row for row in records(tmp_path / "out", "metrics.jsonl") if row["worker"] is None]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6, 8, 9]
    assert [row["loss"] for row in rows[4:]] == [losses(tmp_path / "whole")[step - 1] for step in (6, 8, 9)]
    assert resumed.tally.tokens == whole.tally.tokens


def in_buckets(settings: dict[str, Any], directory: Path) -> dict[str, Any]:
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0}
    settings["data"] |= {"paths": documents(directory), "buckets": [16, 32, 48]}
    return settings


def test_a_run_over_buckets_resumes_to_the_bit(train: Train, settings: dict[str, Any], tmp_path: Path) -> None:
    settings = in_buckets(settings, tmp_path)
    whole = train({**settings, "steps": 12, "output_dir": str(tmp_path / "whole")})
    split = {**settings, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": 7})
    resumed = train({**split, "steps": 12})
    assert losses(tmp_path / "split") == losses(tmp_path / "whole")
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert resumed.cursor == whole.cursor and whole.cursor.epoch > 1


def test_a_step_is_of_one_bucket_and_the_same_step_for_any_number_of_drafters(
    train: Train, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = in_buckets(settings, tmp_path)
    original, seen = Replica.loss_and_gradients, collections.defaultdict(list)

    def noted(self: Replica, batch: MicroBatch) -> torch.Tensor:
        seen[batch.step].append((batch.shape[1:], batch.rows))
        return original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", noted)
    runs = []
    for drafters in (1, 2):
        settings["devices"]["drafter"] = ["cpu"] * drafters
        training = train({**settings, "steps": 10, "output_dir": str(tmp_path / str(drafters))})
        assert all(len({shape for shape, _ in batches}) == 1 for batches in seen.values())
        steps = {step: (batches[0][0], sorted(row for _, rows in batches for row in rows)) for step, batches in
                 seen.items()}  # fmt: skip
        runs.append((steps, losses(tmp_path / str(drafters))))
        seen.clear()
    assert runs[0][0] == runs[1][0] and runs[0][1] == pytest.approx(runs[1][1], rel=1e-4)
    assert {shape for shape, _ in runs[0][0].values()} == {(16, 8), (32, 8), (48, 8)}
    for (length, _), rows in runs[0][0].values():
        assert all(length - 16 < training.rows.lengths_R[row] <= length for row in rows)


def test_a_checkpoint_from_before_there_were_buckets_is_gone_on_from(train: Train, settings: dict[str, Any],
                                                                     ) -> None:  # fmt: skip
    training = train({**settings, "steps": 1})
    kept = training.saves.must_keep["data"]
    assert kept == {"kind": "text", "sequence_length": 48}, "what it held then"
    train({**settings, "steps": 2, "data": {**settings["data"], "buckets": [48]}})
    with pytest.raises(ConfigError, match="step-2: not the same data as then"):
        train({**settings, "steps": 3, "data": {**settings["data"], "buckets": [24, 48]}})


def test_replicas_that_step_on_their_own_agree_every_few_steps_and_resume_to_the_bit(
    train: Train, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings |= {"sync": "params", "sync_every": 3, "checkpoint_every": 100}
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0}
    apart: list[bool] = []

    def watch(training: Any) -> None:
        judge = training._judge

        def judged(step: Any, *, log: bool) -> None:
            apart.append(not torch.equal(weights_of(training, 0), weights_of(training, 1)))
            judge(step, log=log)

        training._judge = judged

    whole = train({**settings, "steps": 9, "output_dir": str(tmp_path / "whole")}, before=watch)
    assert apart == [True, True, False] * 3
    assert torch.equal(weights_of(whole, 0), weights_of(whole, 1))
    split = {**settings, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": 6})
    resumed = train({**split, "steps": 9})
    assert losses(tmp_path / "split") == losses(tmp_path / "whole")
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]


def test_one_replica_on_its_own_is_one_of_one(train: Train, settings: dict[str, Any], tmp_path: Path) -> None:
    settings["devices"]["drafter"] = ["cpu"]
    for sync in ("grads", "params"):
        train({**settings, "steps": 3, "sync": sync, "output_dir": str(tmp_path / sync)})
    assert losses(tmp_path / "grads") == losses(tmp_path / "params")


def test_a_stop_between_two_averagings_waits_for_the_next_and_moves_nothing(
    train: Train, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings |= {"sync": "params", "sync_every": 5, "steps": 15}

    def stop(training: Any) -> None:
        judge = training._judge

        def judged(step: Any, *, log: bool) -> None:
            training.stop.requested = step.number == 6 or training.stop.requested
            judge(step, log=log)

        training._judge = judged

    whole = train({**settings, "output_dir": str(tmp_path / "whole")})
    stopped = train(settings, before=stop)
    assert stopped.steps_done == 10 and steps_on_disk(stopped.saves.root) == [10]
    assert "stops after step=10, where the drafters agree on their weights\n" in capsys.readouterr().out
    assert torch.equal(weights_of(train(settings)), weights_of(whole))
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_checkpoint_holds_the_weights_under_the_names_servers_load(train: Train, settings: dict[str, Any]) -> None:
    training = train({**settings, "steps": 2, "checkpoint_every": 1, "keep_checkpoints": 1})
    assert steps_on_disk(training.saves.root) == [2]
    saved = load_file(training.saves.root / "step-2" / WEIGHTS)
    assert saved.keys() == training.members[0].drafter.state_dict().keys()
    assert "layers.1.self_attn.q_norm.weight" in saved
    assert not any("embed" in name or "head" in name for name in saved)


def test_what_a_save_is_given_is_the_optimizers_own_state_and_no_copy(train: Train, settings: dict[str, Any]) -> None:
    training = train({**settings, "steps": 1})
    member = training.members[0]
    moments = member.moments()
    before = {name: moment.clone() for name, moment in moments.items()}
    member.optimizer.lr.fill_(1e-3)
    member.optimizer.step(norm=torch.ones(()), broken=torch.zeros(()))
    assert len(before) == 2 * len(member.drafter.state_dict())
    assert not any(torch.equal(moment, before[name]) for name, moment in moments.items())


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(train: Train, settings: dict[str, Any],
                                                                               capsys: pytest.CaptureFixture[str]
                                                                               ) -> None:  # fmt: skip
    training = train({**settings, "steps": 4, "checkpoint_every": 2})
    file = training.saves.root / "step-4" / WEIGHTS
    file.write_bytes(file.read_bytes()[:100])
    train(settings)
    out = capsys.readouterr().out
    assert "checkpoint step-4 skipped: drafter.safetensors has 100 bytes of " in out
    assert "resume from step-2" in out


@pytest.mark.parametrize(
    ("change", "named"),
    [({"seed": 12}, "seed"), ({"batch_size": 8}, "batch_size"), ({"drafter": {"layers": 1}}, "drafter, shape")],
)
def test_a_resume_that_could_not_be_exact_is_refused_by_name(train: Train, settings: dict[str, Any],
                                                             change: dict[str, Any], named: str) -> None:  # fmt: skip
    train({**settings, "steps": 1})
    changed = {**settings, **{key: {**settings[key], **value} if isinstance(value, dict) else value
                              for key, value in change.items()}}  # fmt: skip
    with pytest.raises(ConfigError, match=f"step-1: not the same {named} as then;"):
        train(changed)


def test_other_data_or_another_target_under_the_same_path_is_refused_by_name(train: Train, settings: dict[str, Any],
                                                                             tmp_path: Path) -> None:  # fmt: skip
    data, target = tmp_path / "data.txt", tmp_path / "target"
    text = Path(subprocess.__file__).read_text()
    data.write_text(text)
    shutil.copytree(settings["target"]["path"], target)
    settings["data"]["paths"] = [str(data)]
    settings["target"]["path"] = str(target)
    train({**settings, "steps": 1})

    data.write_text(text.replace("Popen", "nepoP", 1))
    with pytest.raises(ConfigError, match="step-1: not the same rows of data as then; restore that"):
        train(settings)
    data.write_text(text)
    weights = load_file(target / "model.safetensors")
    weights["model.layers.2.self_attn.v_proj.weight"][0, 0] += 1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"step-1: not the same model\.safetensors of the target as then;"):
        train(settings)


def test_a_resume_says_what_it_does_otherwise(train: Train, settings: dict[str, Any],
                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    train({**settings, "steps": 1})
    assert "changes" not in capsys.readouterr().out
    train({**settings, "steps": 2, "optimizer": {"lr": 0.001}})
    assert "resume with changes since step-1: steps 1 -> 2, optimizer.lr 0.003 -> 0.001\n" in capsys.readouterr().out


def test_starting_over_on_top_of_checkpoints_or_resuming_from_none_is_refused(train: Train, settings: dict[str, Any]
                                                                              ) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match="--resume: no complete checkpoint"):
        train(settings, must_resume=True)
    train({**settings, "steps": 1})
    with pytest.raises(ConfigError, match="already holds checkpoints, up to step-1; add --resume"):
        train({**settings, "resume": "never"})
    train({**settings, "resume": "never", "steps": 2}, must_resume=True)


def test_nan_ends_the_run_before_the_optimizer_and_names_worker_step_and_last_checkpoint(
    train: Train, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train({**settings, "steps": 2})
    kept: list[torch.Tensor] = []

    def poison(training: Any) -> None:
        kept.append(weights_of(training, 0).clone())
        training.members[1].weights()["fc.weight"][0, 5] = math.nan

    training = train(settings, expect=1, before=poison)
    assert torch.equal(weights_of(training, 0), kept[0])
    assert training.steps_done == 2 and steps_on_disk(training.saves.root) == [2]
    (event,) = [event for event in records(tmp_path / "out", "events.jsonl") if event["event"] == "exception"]
    assert event["worker"] == "drafter-1" and event["type"].endswith("NonFinite")
    said = "drafter-1: loss nan, gradient norm nan at step 3: in the forward: the output of fc, whose weights are not"
    assert event["message"].startswith(f"{said} finite; samples {subprocess.__file__}")
    assert event["message"].endswith(f"last good checkpoint: {training.saves.root / 'step-2'}")
    assert capsys.readouterr().err.count("Exception in thread") == 1


@pytest.mark.parametrize(
    ("change", "seen_after"),
    [({"replica_check_every": 2}, 2), ({"checkpoint_every": 3}, 3), ({"steps": 4}, 4), ({}, 1)],
    ids=["regularly", "before a checkpoint", "at the last step", "when it is told to stop"],
)
def test_replicas_that_drift_apart_end_the_run_and_are_never_saved(
    train: Train, settings: dict[str, Any], tmp_path: Path, change: dict[str, Any], seen_after: int
) -> None:
    def drift(training: Any) -> None:
        weights_of(training, 1)[5] += 1e-3
        training.stop.requested = not change

    training = train({**settings, "replica_check_every": 1000, **change}, expect=1, before=drift)
    (event,) = [event for event in records(tmp_path / "out", "events.jsonl") if event["event"] == "exception"]
    assert event["type"].endswith("ReplicasDiffer") and f"after step {seen_after} " in event["message"]
    # A step that was to be saved from its beginning brings the proof with it; any other has been counted by then.
    assert training.steps_done == seen_after - bool(change) and steps_on_disk(training.saves.root) == []


@pytest.mark.parametrize(("drafters", "expected"), [(1, 3), (2, 12)])
def test_the_gradients_norm_is_taken_once_and_once_more_when_others_were_added(
    train: Train, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, drafters: int, expected: int
) -> None:
    taken: list[int] = []
    norm = torch.Tensor.norm
    monkeypatch.setattr(torch.Tensor, "norm", lambda *args, **options: taken.append(1) or norm(*args, **options))
    train({**settings, "steps": 3, "devices": {"target": ["cpu"], "drafter": ["cpu"] * drafters}})
    assert len(taken) == expected


def test_tok_s_and_positions_s_count_real_tokens_and_supervised_slots_only(
    train: Train, settings: dict[str, Any], tmp_path: Path
) -> None:
    document = tmp_path / "short.txt"
    document.write_text("a few words, not a whole row")
    settings["data"] |= {"paths": [str(document)] * 4}
    settings["drafter"]["anchors"] = 47
    training = train({**settings, "steps": 1})
    amounts, length = [share.amount for share in training._begun.values()], int(training.rows.lengths_R[0])
    assert sum(amount.tokens for amount in amounts) == 4 * length < 4 * 48
    # Each token but the last is an anchor, and supervises the three behind it that there are.
    slots = sum(min(3, length - 1 - anchor) for anchor in range(length - 1))
    assert sum(amount.positions for amount in amounts) == 4 * slots < 4 * 47 * 3


def test_a_run_that_becomes_slower_says_so_in_an_event_with_its_step(train: Train, settings: dict[str, Any],
                                                                     tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                     ) -> None:  # fmt: skip
    steps = itertools.count(1)

    def stepped(_decay: Decay, tokens: float, *, now: float) -> SpeedChange | None:
        assert tokens == 4 * 48 and now > 0
        return SpeedChange(kind="decay", tok_s=10.0, median_tok_s=30.0) if next(steps) == 3 else None

    monkeypatch.setattr(Decay, "stepped", stepped)
    train(settings)
    (event,) = events(tmp_path / "out", "decay")
    assert (event["step"], event["tok_s"], event["median_tok_s"]) == (3, 10.0, 30.0)


def test_the_log_says_how_the_rows_fill_the_buckets(train: Train, settings: dict[str, Any], tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    training = train({**in_buckets(settings, tmp_path), "steps": 1})
    lengths = training.rows.lengths_R
    counts = [int(((low < lengths) & (lengths <= high)).sum()) for low, high in ((0, 16), (16, 32), (32, 48))]
    padding = 1 - int(lengths.sum()) / (counts[0] * 16 + counts[1] * 32 + counts[2] * 48)
    expected = f" buckets 16:{counts[0]} 32:{counts[1]} 48:{counts[2]} padding={100 * padding:.1f}%\n"
    assert expected in capsys.readouterr().out
    assert min(counts) > 0


def test_no_worker_outlives_a_run(train: Train, settings: dict[str, Any]) -> None:
    train({**settings, "steps": 1})
    workers = ("target-", "drafter-", "heartbeat")
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(workers)] == []


def test_a_disk_without_room_for_what_is_to_be_kept_is_told_before_the_training(train: Train, settings: dict[str, Any]
                                                                                ) -> None:  # fmt: skip
    saves = train({**settings, "keep_checkpoints": 2, "checkpoint_every": 2, "steps": 2}).saves
    saves.config = saves.config.model_copy(update={"steps": 9})
    free_bytes = shutil.disk_usage(saves.root).free
    saves.check_room(free_bytes // 3, steps_done=2)
    expected = rf"keep_checkpoints: 2 more checkpoints of [\d,]+ MiB each .*, and {saves.root} has [\d,]+ MiB free;"
    with pytest.raises(ConfigError, match=expected):
        saves.check_room(free_bytes, steps_done=2)
    saves.check_room(free_bytes * 9 // 10, steps_done=8)
    saves.check_room(free_bytes * 2, steps_done=9)
