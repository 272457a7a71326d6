"""A loss or gradient that is not finite: no replica takes the step, the cause is named, and some may be skipped."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.logscan import Scanner
from tests.trainer.support import documents, events, losses, records
from trainer.checkpoint import OPTIMIZER, WEIGHTS, steps_on_disk
from trainer.micro_batch import MicroBatch
from trainer.replica import Replica
from trainer.saves import SaveFailed

Train = Callable[..., Any]


@pytest.fixture(scope="module")
def poisoned_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target, but for the embedding of one token, ~, which is infinite."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("poisoned") / "target"
    shutil.copytree(tiny_target, directory)
    model = LlamaForCausalLM.from_pretrained(tiny_target, tie_word_embeddings=False)
    model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone()
    (token,) = AutoTokenizer.from_pretrained(tiny_target)("~", add_special_tokens=False)["input_ids"]
    model.model.embed_tokens.weight.data[token] = math.inf
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def bad_sample(settings: dict[str, Any], poisoned_target: Path, tmp_path: Path) -> dict[str, Any]:
    """Eleven documents, one of which no step can take."""
    settings["target"]["path"] = str(poisoned_target)
    bad = tmp_path / "bad.txt"
    bad.write_text("0123456789~0123456789")
    settings["data"]["paths"] = [*documents(tmp_path), str(bad)]
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0, "ema": 0.9}
    return {**settings, "steps": 12, "checkpoint_every": 1, "keep_checkpoints": 100}


def steps_with_the_bad_sample(training: Any, steps: int) -> list[int]:
    found, cursor = [], type(training.cursor)()
    for step in range(1, steps + 1):
        rows, cursor = training.rows.take(cursor, training.config.batch_size)
        if any("bad.txt" in training.rows.where(row) for row in rows.tolist()):
            found.append(step)
    return found


def saved(training: Any, step: int) -> list[bytes]:
    return [(training.saves.root / f"step-{step}" / name).read_bytes() for name in (WEIGHTS, OPTIMIZER)]


@pytest.mark.parametrize("sync", ["grads", "params"])
def test_a_step_with_a_bad_sample_is_skipped_by_all_counted_and_named_and_a_resume_knows(
    train: Train, bad_sample: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], sync: str
) -> None:
    bad_sample |= {"on_nonfinite": "skip", "sync": sync}
    whole = train({**bad_sample, "output_dir": str(tmp_path / "whole")})
    out = capsys.readouterr().out
    bad = steps_with_the_bad_sample(whole, 12)
    assert 2 <= len(bad) < 10
    skipped = events(tmp_path / "whole", "nonfinite")
    assert [(event["step"], event["skipped"], event["action"]) for event in skipped] == [
        (step, number, "skip") for number, step in enumerate(bad, start=1)
    ]  # fmt: skip
    for step in range(2, 13):
        assert (saved(whole, step) == saved(whole, step - 1)) == (step in bad)
    assert torch.equal(whole.members[0].flat.weights, whole.members[1].flat.weights)
    assert all(any("bad.txt" in sample for sample in event["samples"]) for event in skipped)
    rows = [row for row in records(tmp_path / "whole", "metrics.jsonl") if row["worker"] is None]
    for figure in ("loss", "slot_p_1"):
        assert [row["step"] for row in rows if row[figure] is None] == bad
    assert [row["skipped"] for row in rows] == [sum(one <= step for one in bad) for step in range(1, 13)]
    (line,) = (line for line in out.splitlines() if line.startswith(("step=12 tok/s=", "step=12 loss=")))
    assert f" skipped={len(bad)}" in line
    scanner = Scanner()
    scanner.feed(out.encode(), 0.0)
    assert scanner.summary().nonfinite_step is None and scanner.summary().step == 12

    split = {**bad_sample, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": bad[1] - 1})
    resumed = train(split)
    assert saved(resumed, 12) == saved(whole, 12) and losses(tmp_path / "split") == losses(tmp_path / "whole")
    assert resumed.refusals.count == len(bad)
    assert torch.equal(resumed.members[1].ema.weights, whole.members[1].ema.weights)


def test_more_than_may_be_skipped_end_the_run_with_what_it_was_before_the_last_of_them(
    train: Train, bad_sample: dict[str, Any], tmp_path: Path
) -> None:
    bad_sample |= {"on_nonfinite": "skip", "max_skipped": 1, "steps": 40, "checkpoint_every": 3}
    training = train(bad_sample, expect=1)
    bad = steps_with_the_bad_sample(training, 40)
    last = (bad[1] - 1) // 3 * 3
    (event,) = events(tmp_path / "out", "exception")
    assert event["message"].endswith(
        "; 2 such steps are more than max_skipped: 1; no optimizer step has been taken since; last good checkpoint:"
        f" {training.saves.root / f'step-{last}' if last else 'none'}"
    )
    assert training.steps_done == bad[1] - 1
    # A resume has used up what may be skipped, too, unless more is allowed.
    again = train(bad_sample, expect=1)
    assert again.steps_done == bad[1] - 1
    more = train({**bad_sample, "max_skipped": 3, "steps": bad[1] + 1})
    assert more.steps_done == bad[1] + 1 and more.refusals.count == sum(step <= bad[1] + 1 for step in bad)


def test_a_resume_that_allows_fewer_goes_on_until_the_next_one(train: Train, bad_sample: dict[str, Any], tmp_path: Path
                                                               ) -> None:  # fmt: skip
    bad_sample |= {"on_nonfinite": "skip", "steps": 40, "checkpoint_every": 100}
    first = train({**bad_sample, "steps": 8})
    bad = steps_with_the_bad_sample(first, 40)
    assert first.refusals.count == sum(step <= 8 for step in bad) > 0
    stopped = train({**bad_sample, "on_nonfinite": "stop"}, expect=1)
    assert stopped.steps_done == next(step for step in bad if step > 8) - 1
    (event,) = events(tmp_path / "out", "exception")
    assert "the target's features are not finite" in event["message"]


def test_the_one_bad_sample_among_all_rows_is_named_with_the_targets_layer(
    train: Train, bad_sample: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = train(bad_sample, expect=1)
    step = steps_with_the_bad_sample(training, 12)[0]
    assert training.steps_done == step - 1 and steps_on_disk(training.saves.root) == list(range(1, step))
    (event,) = events(tmp_path / "out", "nonfinite")
    assert event["samples"] == [str(tmp_path / "bad.txt")] and event["action"] == "stop"
    layer = training.targets[0].layer_ids[0]
    assert event["where"] == f"the target's features are not finite, those of its layer {layer} first"
    said = capsys.readouterr().err.splitlines()[-1]
    assert f" at step {step}: {event['where']}; samples {tmp_path / 'bad.txt'} (data rows {event['rows']});" in said


def planted(name: str, value: float, rank: int = 1) -> Callable[[Any], None]:
    def plant(training: Any) -> None:
        member = training.members[rank]
        member.flat.named(member.flat.weights)[name].view(-1)[0] = value

    return plant


@pytest.mark.parametrize("sync", ["grads", "params"])
@pytest.mark.parametrize("module", ["hidden_norm", "layers.0.self_attn.qkv_proj", "layers.1.mlp.down_proj", "norm"])
def test_a_bad_weight_is_named_by_its_module_and_no_replica_takes_the_step(
    train: Train, settings: dict[str, Any], tmp_path: Path, sync: str, module: str
) -> None:
    fresh: list[torch.Tensor] = []

    def plant(training: Any) -> None:
        fresh.append(training.members[0].flat.weights.clone())
        planted(f"{module}.weight", math.nan)(training)

    training = train({**settings, "sync": sync, "sync_every": 2 if sync == "params" else 1}, expect=1, before=plant)
    (event,) = events(tmp_path / "out", "nonfinite")
    assert event["worker"] == "drafter-1"
    assert event["where"] == f"in the forward: the output of {module}, whose weights are not finite"
    assert torch.equal(training.members[0].flat.weights, fresh[0]) and not training.members[0].optimizer.taken


def test_in_compiled_code_the_layer_is_named(train: Train, settings: dict[str, Any], tmp_path: Path) -> None:
    train(
        {**settings, "compile_on_cpu": "aot_eager"}, expect=1,
        before=planted("layers.1.mlp.down_proj.weight", math.inf),
    )  # fmt: skip
    (event,) = events(tmp_path / "out", "nonfinite")
    assert event["where"] == "in the forward: the output of layers.1, whose weights are not finite"


def test_a_backward_whose_forward_was_finite_is_named_as_such(train: Train, settings: dict[str, Any], tmp_path: Path
                                                              ) -> None:  # fmt: skip
    def overflows(training: Any) -> None:
        training.members[1].drafter.layers[0].mlp.down_proj.weight.register_hook(lambda gradient: gradient * math.inf)

    training = train(settings, expect=1, before=overflows)
    (event,) = events(tmp_path / "out", "nonfinite")
    assert event["worker"] == "drafter-1" and "loss nan" not in event["what"] and "loss inf" not in event["what"]
    assert event["where"] == "in the backward: the gradient of layers.0.mlp.down_proj.weight"
    assert not training.members[0].optimizer.taken


@pytest.mark.parametrize(
    ("factor", "where"),
    [(1e30, "in the backward: gradients are too large for a norm, that of "), (1e37, "in the forward: the loss")],
)
def test_what_overflows_only_when_it_is_added_up_is_named(
    train: Train, settings: dict[str, Any], tmp_path: Path, factor: float, where: str
) -> None:
    def plant(training: Any) -> None:
        member = training.members[0]
        member.flat.named(member.flat.weights)["norm.weight"].mul_(factor)

    settings["devices"]["drafter"] = ["cpu"]
    train(settings, expect=1, before=plant)
    (event,) = events(tmp_path / "out", "nonfinite")
    assert event["where"].startswith(where)


def test_what_is_finite_the_second_time_is_told_to_be_the_hardware(train: Train, settings: dict[str, Any],
                                                                   tmp_path: Path) -> None:  # fmt: skip
    def plant(training: Any) -> None:
        calls = itertools.count(1)

        def flips(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * math.inf if next(calls) == 3 else gradient

        next(training.members[1].drafter.parameters()).register_hook(flips)

    training = train(settings, expect=1, before=plant)
    (event,) = events(tmp_path / "out", "nonfinite")
    assert (event["worker"], event["step"]) == ("drafter-1", 3) and training.steps_done == 2
    assert event["where"] == "done once more everything is finite, which points to the hardware"


def test_weights_that_an_update_itself_has_made_infinite_are_never_saved(
    train: Train, settings: dict[str, Any], tmp_path: Path
) -> None:
    training = train(settings)
    planted("layers.0.mlp.down_proj.weight", math.inf, rank=0)(training)
    with pytest.raises(SaveFailed, match=r"step-7 is not written, as its weights are not finite \(layers\.0\.mlp\."):
        training.saves.save(training.members[0], step=7, cursor=training.cursor, skipped=0, tokens=0)
    assert steps_on_disk(tmp_path / "out" / "checkpoints") == [6]


def test_steps_that_were_begun_after_one_refused_too_many_change_nothing_either(
    train: Train, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are under way before anybody on the host knows."""
    original, seen = Replica.loss_and_gradients, list[MicroBatch]()

    def noted(self: Replica, batch: MicroBatch) -> None:
        seen.append(batch)
        original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", noted)
    settings["devices"]["drafter"] = ["cpu"]
    member, good = train(settings).members[0], seen[-1]
    bad = dataclasses.replace(good, features_BSF=torch.full_like(good.features_BSF, float("nan")))
    before = member.flat.weights.clone()
    refused = [member.step([batch], lr=1e-2, hashed=False).refused for batch in (bad, good)]
    assert refused == [True, True] and torch.equal(member.flat.weights, before)
