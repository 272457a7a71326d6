"""A run that starts from weights that are there: that they are these, what does not fit, and what is kept of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.support import TrainerProcess, events, losses, small_run, train_here, write_config
from trainer import starting
from trainer.checkpoint import WEIGHTS
from trainer.config import Config, ConfigError, check_inputs
from trainer.data.order import Cursor
from trainer.decode import loaded
from trainer.decode.generate import generate
from trainer.export import loading, package, source
from trainer.model.target import Target, drafter_shape, load_target
from trainer.sections import TargetConfig

Train = Callable[..., Any]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of 20 steps."""
    directory = tmp_path_factory.mktemp("first")
    train_here({**small_run(tiny_target, directory), "steps": 20})
    return directory


@pytest.fixture(scope="module")
def next_loss(run: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of the step that the run would have taken next, on the rows and anchors of a first step."""
    directory = shutil.copytree(run, tmp_path_factory.mktemp("on") / "run")

    def at_the_beginning(training: Any) -> None:
        assert training.steps_done == 20
        training.steps_done, training.cursor = 0, Cursor()

    train_here({**small_run(tiny_target, directory), "steps": 1}, before=at_the_beginning)
    return losses(directory)[-1]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target), dtype="float32", layer_ids=[1, 2, 3]), CPU)


def export(run: Path, to: Path, *, dtype: Any = "float32", format: Any = "zlab") -> Path:
    found = source.find(run, which="auto", target=None, say=pytest.fail)
    to.mkdir()
    package.package(found, format=format, dtype=dtype, target_name="").write(to, gate=None)
    return to


def publish(run: Path, to: Path, **changes: Any) -> Path:
    """As others publish a drafter: two shards with an index, no contract, and the fields that older ones have."""
    export(run, to, dtype="bfloat16")
    (to / "contract.json").unlink()
    tensors = load_file(to / "model.safetensors")
    (to / "model.safetensors").unlink()
    index = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in index if index[name] == file}, to / file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = json.loads((to / "config.json").read_bytes())
    del config["rope_parameters"], config["dflash_config"]["block_size"]
    configure(to, **{**config, "rope_theta": int(config["rope_theta"]), **changes})
    return to


def configure(directory: Path, **fields: Any) -> None:
    (directory / "config.json").write_text(json.dumps(fields))


def checkpoint_of(run: Path, to: Path) -> Path:
    return shutil.copytree(run / "checkpoints" / "step-20", to / "step-20")


# --- they are these -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rounding"), [
    (lambda run, to: run, 0), (checkpoint_of, 0), (export, 0),
    (lambda run, to: export(run, to, format="speculators"), 0),
    (lambda run, to: export(run, to, dtype="bfloat16"), 1e-2), (publish, 1e-2),
], ids=["run", "checkpoint", "export", "speculators", "bfloat16", "z-lab"])  # fmt: skip
def test_the_first_loss_is_what_the_next_step_would_have_had(
    run: Path, next_loss: float, train: Train, settings: dict[str, Any], tmp_path: Path,
    kind: Callable[[Path, Path], Path], rounding: float,
) -> None:  # fmt: skip
    settings["drafter"]["start_from"] = str(kind(run, tmp_path / "there"))
    train({**settings, "steps": 1})
    first, fresh = losses(tmp_path / "out")[0], losses(run)[0]
    assert first == (next_loss if rounding == 0 else pytest.approx(next_loss, rel=rounding))
    assert fresh - first > 10 * rounding * next_loss and fresh - first > 0.5, "and not what fresh weights have"


def test_another_block_size_is_said_and_trained_on(
    run: Path, train: Train, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings["drafter"] |= {"start_from": str(run), "block_size": 6}
    train({**settings, "steps": 1})
    said = capsys.readouterr().out
    assert "drafter.start_from: drafter.block_size is 4 there and 6 here: it learns to fill other blocks\n" in said
    assert f"starts from {run}/checkpoints/step-20 (step 20, last weights); the optimizer begins anew\n" in said


def test_a_moving_average_begins_with_them_in_a_resumed_run_as_well(
    run: Path, train: Train, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["drafter"]["start_from"] = str(run)
    settings["optimizer"] |= {"ema": 0.8, "schedule": "constant", "warmup_fraction": 0}
    held: list[torch.Tensor] = []
    one = train({**settings, "steps": 1, "output_dir": str(tmp_path / "one")},
                before=lambda training: held.append(training.members[0].flat.weights.clone()))  # fmt: skip
    member = one.members[0]
    assert torch.allclose(member.ema.weights, 0.8 * held[0] + 0.2 * member.flat.weights, atol=1e-7)
    assert not torch.equal(member.ema.weights, member.flat.weights)
    whole = train({**settings, "steps": 4, "output_dir": str(tmp_path / "whole")})
    split = {**settings, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": 2})
    resumed = train({**split, "steps": 4})
    assert torch.equal(resumed.members[0].ema.weights, whole.members[0].ema.weights)


def test_of_a_run_with_a_moving_average_that_is_taken(learnt_run: Path, target: Target, settings: dict[str, Any]
                                                      ) -> None:  # fmt: skip
    found = look(settings, learnt_run, target)
    average = load_file(learnt_run / "checkpoints" / "step-6" / "ema.safetensors")
    assert found.what == "step 6, moving average" and [file.name for file in found.files] == ["ema.safetensors"]
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in average.items())


# --- what is kept of it ---------------------------------------------------------------------------------------------


def test_records_and_checkpoints_say_from_where_and_a_resume_looks_there_no_more(
    run: Path, train: Train, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = shutil.copytree(run, tmp_path / "there")
    settings["drafter"]["start_from"] = str(there)
    train({**settings, "steps": 2})
    weights = (there / "checkpoints" / "step-20" / WEIGHTS).read_bytes()
    expected = {
        "path": f"{there}/checkpoints/step-20", "what": "step 20, last weights",
        "files": {WEIGHTS: hashlib.sha256(weights).hexdigest()},
    }  # fmt: skip
    [event] = events(tmp_path / "out", "start")
    assert {key: event[key] for key in expected} == expected
    shutil.rmtree(there)
    for steps, start in ((3, str(there)), (4, "/no/other")):
        settings["drafter"]["start_from"] = start
        capsys.readouterr()
        train({**settings, "steps": steps})
        said = capsys.readouterr().out
        assert f"resume with changes since step-{steps - 1}: steps {steps - 1} -> {steps}\n" in said
        state = json.loads((tmp_path / "out" / "checkpoints" / f"step-{steps}" / "trainer.json").read_bytes())
        assert state["start"] == expected and state["step"] == steps
    assert len(events(tmp_path / "out", "start")) == 1


def test_a_resumed_process_does_not_look_there_either_and_a_first_one_says_what_is_missing_before_torch(
    run: Path, start_trainer: Callable[..., TrainerProcess], settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["drafter"]["start_from"] = "/no/drafter"
    config = write_config({**settings, "steps": 21}, tmp_path / "config.yaml")
    first = start_trainer(config, planted="import sys; sys.modules['torch'] = None")
    said = "trainer: drafter.start_from: no drafter in /no/drafter (there is no such directory)\n"
    assert first.finish() == (2, "phase=import\n", said)
    resumed = start_trainer(config, run_dir=shutil.copytree(run, tmp_path / "again"))
    code, out, err = resumed.finish()
    assert (code, err) == (0, "") and "resume from step-20" in out


# --- what does not fit ----------------------------------------------------------------------------------------------


def look(settings: dict[str, Any], path: Path, target: Target) -> starting.Start:
    settings["drafter"]["start_from"] = str(path)
    config = Config.model_validate(settings)
    found = starting.find(config, target, drafter_shape(target, config.drafter), say=lambda line: None)
    assert found is not None
    return found


@pytest.mark.parametrize(("change", "said"), [
    ({"layers": 3}, "drafter.layers is 2 there and 3 here"),
    ({"heads": 2}, "drafter.heads is 4 there and 2 here"),
    ({"intermediate_size": 128}, "drafter.intermediate_size is 96 there and 128 here"),
    ({"mask_token_id": 5}, "drafter.mask_token_id is 3 there and 5 here"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [lambda run, to: run, export, publish], ids=["run", "export", "z-lab"])
def test_another_drafter_than_is_configured_is_refused_with_both_values(
    run: Path, target: Target, settings: dict[str, Any], tmp_path: Path, kind: Callable[[Path, Path], Path],
    change: dict[str, Any], said: str,
) -> None:  # fmt: skip
    settings["drafter"] |= change
    with pytest.raises(ConfigError, match=f"drafter.start_from: .* does not fit the configuration: .*{said}") as said_:
        look(settings, kind(run, tmp_path / "there"), target)
    assert "\n" not in str(said_.value)


@pytest.mark.parametrize("kind", [lambda run, to: run, export, publish], ids=["run", "export", "z-lab"])
def test_other_layers_of_the_target_are_refused(
    run: Path, tiny_target: Path, settings: dict[str, Any], tmp_path: Path, kind: Callable[[Path, Path], Path]
) -> None:
    other = load_target(TargetConfig(path=str(tiny_target), dtype="float32", layer_ids=[0, 2, 3]), CPU)
    with pytest.raises(ConfigError, match=r"target.layer_ids are \[1, 2, 3\] there and \[0, 2, 3\] here; configure"):
        look(settings, kind(run, tmp_path / "there"), other)


def test_a_drafter_of_another_target_is_refused(run: Path, tiny_target: Path, settings: dict[str, Any],
                                                tmp_path: Path) -> None:  # fmt: skip
    other = shutil.copytree(tiny_target, tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    settings["target"]["path"] = str(other)
    target = load_target(TargetConfig(path=str(other), dtype="float32", layer_ids=[1, 2, 3]), CPU)
    with pytest.raises(ConfigError, match=r"is not the target it was trained with: model.safetensors differ"):
        look(settings, run, target)
    with pytest.raises(ConfigError, match=r"was trained for another target: its model.safetensors are not this one's"):
        look(settings, export(run, tmp_path / "export"), target)


def without(name: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        for file in directory.glob("*.safetensors"):
            save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)

    return spoil


def with_tensors(**tensors: torch.Tensor) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        file = next(directory.glob("model-00001-*"))
        save_file({**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}, file)

    return spoil


def said_as(**fields: Any) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_bytes())
        changed = {**config, **fields}
        configure(directory, **{name: value for name, value in changed.items() if value is not ...})

    return spoil


@pytest.mark.parametrize(("spoil", "said"), [
    (said_as(num_target_layers=9), "was trained for another target: layers is 6, not 9"),
    (said_as(vocab_size=512), "was trained for another target: vocabulary is 400, not 512"),
    (said_as(rope_theta=1e6), "the base of RoPE, which is the target's, is 1e+06 there and 10000 here"),
    (said_as(rope_scaling={"rope_type": "yarn", "factor": 2}), "its rotary embedding is scaled (yarn)"),
    (said_as(layer_types=["full_attention", "sliding_attention"], sliding_window=8), "layers [1] look back 8 tokens"),
    (said_as(is_causal=True), "another drafter than this trainer has: causal is true, not false"),
    (said_as(is_neox_style=False), 'rope.style is "interleaved", not "halves"'),
    (said_as(architectures=["LlamaForCausalLM"]), "config.json is of ['LlamaForCausalLM'], and has no contract.json"),
    (said_as(dflash_config={"target_layer_ids": [1, 2, 3]}), "config.json lacks 'mask_token_id'"),
    (said_as(num_key_value_heads=...), "config.json lacks 'num_key_value_heads'"),
    (said_as(dflash_config={"target_layer_ids": "all", "mask_token_id": 3}), "config.json has a value of another kind"),
    (said_as(dflash_config={"target_layer_ids": [], "mask_token_id": 3}), "target_layer_ids are [], which do not rise"),
    (said_as(dflash_config={"target_layer_ids": [2, 1], "mask_token_id": 3}), "are [2, 1], which do not rise"),
    (said_as(dflash_config={"target_layer_ids": [-1, 2], "mask_token_id": 3}), "layer is -1, not a number from 0 to"),
    (said_as(dflash_config={"target_layer_ids": [1, 2, 3], "mask_token_id": 4000}),
     "its mask token 4000 is none of the target's 400"),
    (said_as(block_size=0), "block_size is 0, not a number from 2 to"),
    (said_as(num_hidden_layers=10**30), f"num_hidden_layers is {10**30}, not a number from 1 to 1,024"),
    (said_as(num_hidden_layers="2"), 'num_hidden_layers is "2", not a number from 1 to 1,024'),
    (said_as(hidden_size=-64), "hidden_size is -64, not a number from 1 to"),
    (said_as(num_key_value_heads=3), "4 heads of 16 cannot share 3 key heads"),
    (said_as(rms_norm_eps=float("nan")), "rms_norm_eps is NaN, not a number above 0"),
    (said_as(rope_parameters={"partial_rotary_factor": float("inf")}), "config.json has a value of another kind: "),
    (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON: "),
    (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json is not JSON: maximum recursion depth"),
    (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": 1}}'),
     "model.safetensors.index.json is no index of weights"),
    (lambda d: (d / "model.safetensors").mkdir(), "model.safetensors: Is a directory"),
    (without("fc.weight"), "model.safetensors lacks fc.weight"),
    (with_tensors(lm_head__weight=torch.ones(1)), "holds what this trainer's drafter does not have: lm_head.weight"),
    (with_tensors(fc__weight=torch.ones(3, 3)), "has in another shape than its config.json says: fc.weight"),
    (with_tensors(fc__weight=torch.ones(64, 192, dtype=torch.int8)), "has neither in 16 nor in 32 bits: fc.weight"),
    (with_tensors(fc__weight=torch.full((64, 192), torch.nan)), "weights that are not finite: fc.weight"),
    (lambda d: os.truncate(next(d.glob("model-00002-*")), 99), "is cut off: 99 bytes"),
    (lambda d: next(d.glob("model-00002-*")).unlink(), "lacks 1 of its 2 files of weights: model-00002-of-00002"),
])  # fmt: skip
def test_what_others_publish_is_refused_by_what_it_has(run: Path, target: Target, settings: dict[str, Any],
                                                       tmp_path: Path, spoil: Callable[[Path], object], said: str
                                                       ) -> None:  # fmt: skip
    there = publish(run, tmp_path / "there")
    look(settings, there, target)
    spoil(there)
    with pytest.raises(ConfigError) as refused:
        look(settings, there, target)
    message = str(refused.value)
    assert message.startswith(f"drafter.start_from: {there}") and said in message and "\n" not in message


def test_layers_that_a_published_drafter_does_not_name_are_those_that_the_form_takes(
    run: Path, tmp_path: Path
) -> None:
    """As many as it has layers itself."""
    there = publish(run, tmp_path / "there", dflash_config={"mask_token_id": 3})
    assert loading.read(there).layout.layer_ids == [1, 3]


def test_a_published_drafter_can_be_decoded_with_as_the_export_that_it_was(
    run: Path, tiny_target: Path, tmp_path: Path
) -> None:
    there, was = publish(run, tmp_path / "there"), export(run, tmp_path / "export", dtype="bfloat16")
    with pytest.raises(ConfigError, match=f"{there}: an export does not say where its target is; name it"):
        loaded.load(there, target=None, device=CPU, say=pytest.fail)
    texts = []
    for path in (there, was):
        found = loaded.load(path, target=str(tiny_target), device=CPU, dtype="float32", say=lambda line: None)
        made = generate(found.target, found.block_drafter, [[5, 6, 7, 8]], max_tokens=16, batch_size=1)
        texts.append((made.continuations[0].tokens, made.acceptance))
    assert found.source == f"{was} (exported from step 20, last weights, bfloat16)"
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("make", "said"), [
    (lambda d: d.mkdir(), "no drafter in {d} (config.json is missing)"),
    (lambda d: d.write_text("x"), "{d} is a file, and the directory of a drafter is needed"),
    (lambda d: (d / "checkpoints" / "step-5").mkdir(parents=True), "{d}/checkpoints holds no whole checkpoint"),
    (lambda d: (d.mkdir(), configure(d)),
     "{d} holds no weights (model.safetensors, or their .index.json): was the download broken off?"),
])  # fmt: skip
def test_what_is_no_drafter_is_told_before_anything_is_loaded(
    settings: dict[str, Any], tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    there = tmp_path / "there"
    make(there)
    settings["drafter"]["start_from"] = str(there)
    with pytest.raises(ConfigError) as refused:
        check_inputs(Config.model_validate(settings))
    assert str(refused.value) == f"drafter.start_from: {said.format(d=there)}"


def test_the_doctor_looks_at_the_drafter_that_the_run_starts_from(
    run: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    from trainer.doctor import examine

    settings["drafter"]["start_from"] = str(run)
    results = examine.examine(Config.model_validate(settings), quick=True)
    by_name = {result.check.name: result.finding for result in results}
    assert f"those of {run}/checkpoints/step-20 (step 20, last weights)" in by_name["drafters"].evidence
    assert not [name for name, finding in by_name.items() if finding.status == "fail"]
