"""Exports as directories: what they hold, how they are read back, and what may not become one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.exports import CPU, PROMPTS
from tests.trainer.support import REPOSITORY
from trainer import export
from trainer.__main__ import main
from trainer.checkpoint import MARKER, WEIGHTS
from trainer.config import ConfigError
from trainer.export import contract, formats, package, source
from trainer.export.contract import Window
from trainer.export.package import Package
from trainer.kept import changed
from trainer.model.target import Target, file_digests, load_target
from trainer.sections import TargetConfig


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(path=str(tiny_target), dtype="float32", layer_ids=[1, 2, 3]), CPU)


@pytest.fixture
def exported(made: Package, tmp_path: Path) -> Path:
    directory = tmp_path / "export"
    directory.mkdir()
    made.write(directory, gate=None)
    return directory


# --- the way back ---------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_the_moving_average_frozen_and_how_to_use_it(made: Package, exported: Path, target: Target
                                                                       ) -> None:  # fmt: skip
    said: list[str] = []
    drafter, found = export.load(exported, target, say=said.append)
    loaded = drafter.state_dict()
    assert loaded.keys() == made.source.weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in made.source.weights.items())
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    assert (found.layout, found.origin.weights, found.dtype) == (made.layout, "ema", "float32")
    assert said == [f"{exported}: was exported with --no-gate: nobody has seen that it decodes as it was trained"]


def test_another_torch_is_said_and_no_reason_to_refuse(exported: Path, target: Target) -> None:
    edited(exported, torch="2.0.0")
    said: list[str] = []
    export.load(exported, target, say=said.append)
    assert said[0] == f"{exported}: exported by torch 2.0.0, and this is {torch.__version__}"


def edited(directory: Path, **changes: Any) -> None:
    """Contract.json with other values; `layout_x` is x of its layout."""
    path = directory / contract.NAME
    facts = json.loads(path.read_bytes())
    for key, value in changes.items():
        (facts["layout"] if key.startswith("layout_") else facts)[key.removeprefix("layout_")] = value
    path.write_text(json.dumps(facts))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewritten(made: Package, directory: Path, **layout: Any) -> None:
    """As by an exporter with another layout, whose files and hashes are right."""
    other = made.layout.model_copy(update=layout)
    config = formats.written(made.source, other, "zlab", dtype="float32", target_name="")
    Package(
        source=made.source, format="zlab", dtype="float32", layout=other, config=config, tensors=made.tensors
    ).write(directory, gate=None)


@pytest.mark.parametrize(("damage", "said"), [
    (lambda d: (d / contract.NAME).unlink(), r"no export of this trainer \(has no contract.json\)"),
    (shutil.rmtree, r"no export of this trainer \(is not there\); python -m trainer export RUN makes one"),
    (lambda d: (d / contract.NAME).write_text("{"), "contract.json: all of it: Invalid JSON"),
    (lambda d: edited(d, layout_causal="no"), "contract.json: layout.causal: Input should be a valid boolean"),
    (lambda d: edited(d, layout_unheard_of=1), "layout.unheard_of: Extra inputs are not permitted"),
    (lambda d: (d / "model.safetensors").unlink(), "model.safetensors: No such file or directory; bring it again"),
    (lambda d: cut(d / "model.safetensors"), r"model.safetensors: has 299,087 bytes of 299,088; bring it again"),
    (lambda d: flip(d / "model.safetensors"), "has changed since it was exported"),
    (lambda d: flip(d / "config.json"), "has changed since it was exported"),
    (lambda d: edited(d, layout_mask_token_id=5), "contradict each other: mask_token_id is 3, not 5"),
    (lambda d: edited(d, layout_slot_predicts=1), "another layout than .* has: slot_predicts is 1, not 0"),
    (lambda d: edited(d, layout_context_end=1), "another layout than .* has: context_end is 1, not 0"),
])  # fmt: skip
def test_what_is_not_as_it_was_written_is_one_line(exported: Path, target: Target, damage: Callable[[Path], None],
                                                   said: str) -> None:  # fmt: skip
    damage(exported)
    with pytest.raises(ConfigError, match=said) as refused:
        export.load(exported, target)
    assert "\n" not in str(refused.value) and str(exported) in str(refused.value)


@pytest.mark.parametrize(("layout", "said"), [
    ({"window": Window(tokens=8, layers=[0], convention="from the slot")}, "window is .*, not null"),
    ({"causal": True}, "causal is true, not false"),
])  # fmt: skip
def test_a_layout_that_this_drafter_does_not_have_is_refused(made: Package, exported: Path, target: Target,
                                                             layout: Any, said: str) -> None:  # fmt: skip
    rewritten(made, exported, **layout)
    with pytest.raises(ConfigError, match=f"another layout than this trainer's drafter has: {said}"):
        export.load(exported, target)


def test_another_target_is_refused_by_what_differs(exported: Path, tiny_target: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_target, tmp_path / "other")
    flip(other / "model.safetensors")
    loaded = load_target(TargetConfig(path=str(other), dtype="float32", layer_ids=[1, 2, 3]), CPU)
    with pytest.raises(ConfigError, match=r"was trained for another target: its model.safetensors are not this one's"):
        export.load(exported, loaded)
    loaded = load_target(TargetConfig(path=str(tiny_target), dtype="float32", layer_ids=[0, 2, 3]), CPU)
    with pytest.raises(ConfigError, match=r"reads target layers \[1, 2, 3\], and \[0, 2, 3\] are captured"):
        export.load(exported, loaded)


# --- what is taken --------------------------------------------------------------------------------------------------



def test_a_target_is_the_same_whichever_version_of_transformers_has_saved_it(tmp_path: Path, tiny_target: Path) -> None:
    other = shutil.copytree(tiny_target, tmp_path / "target")
    told = json.loads((other / "config.json").read_bytes())
    (other / "config.json").write_text(json.dumps({**told, "transformers_version": "9.9"}, indent=4))
    assert file_digests(other) == file_digests(tiny_target)
    (other / "config.json").write_text(json.dumps({**told, "rms_norm_eps": 0.1}))
    assert changed(file_digests(tiny_target), file_digests(other)) == ["config.json"]


def test_the_moving_average_unless_the_last_weights_are_wanted(learnt_run: Path) -> None:
    average, last = (
        source.find(learnt_run, which=which, target=None, say=pytest.fail)  # type: ignore[arg-type]
        for which in ("auto", "last")
    )
    assert (average.origin.weights, last.origin.weights) == ("ema", "last")
    assert torch.equal(average.weights["fc.weight"] * 1.25, last.weights["fc.weight"])


def test_a_run_its_checkpoints_and_one_of_them_are_the_same_to_the_byte(learnt_run: Path, tmp_path: Path) -> None:
    contents = []
    for number, path in enumerate((".", "checkpoints", "checkpoints/step-6")):
        found = source.find(learnt_run / path, which="auto", target=None, say=pytest.fail)
        directory = tmp_path / str(number)
        directory.mkdir()
        package.package(found, format="zlab", dtype="bfloat16", target_name="").write(directory, gate=None)
        contents.append({file.name: file.read_bytes() for file in directory.iterdir()})
    assert contents[0] == contents[1] == contents[2]
    assert set(contents[0]) == {"config.json", "contract.json", "model.safetensors"}


@pytest.mark.parametrize(("damage", "said"), [
    (lambda c: (c / MARKER).unlink(), "no checkpoint that can be read: incomplete, COMPLETE.json is missing"),
    (lambda c: cut(c / WEIGHTS), r"no checkpoint that can be read: drafter.safetensors has \d+ bytes of \d+"),
    (lambda c: flip(c / "ema.safetensors"), r"ema.safetensors has changed since it was written \(sha256 differs\)"),
    (shutil.rmtree, "no checkpoint that can be read: no such directory"),
])  # fmt: skip
def test_a_damaged_checkpoint_is_named_in_one_line(learnt_run: Path, tmp_path: Path, damage: Callable[[Path], None],
                                                   said: str) -> None:  # fmt: skip
    run = shutil.copytree(learnt_run, tmp_path / "run")
    damage(run / "checkpoints" / "step-6")
    with pytest.raises(ConfigError, match=said) as refused:
        source.find(run / "checkpoints" / "step-6", which="auto", target=None, say=pytest.fail)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="no whole checkpoint in"):
        source.find(run, which="auto", target=None, say=pytest.fail)


def test_a_target_that_is_gone_or_another_is_said_with_what_to_do(learnt_run: Path, tiny_target: Path, tmp_path: Path
                                                                  ) -> None:  # fmt: skip
    gone = tmp_path / "gone"
    with pytest.raises(ConfigError, match=f"its target {gone}: is not there"):
        source.find(learnt_run, which="auto", target=gone, say=pytest.fail)
    other = shutil.copytree(tiny_target, tmp_path / "other")
    flip(other / "model.safetensors")
    with pytest.raises(ConfigError, match=r"is not the target it was trained with: model.safetensors differ"):
        source.find(learnt_run, which="auto", target=other, say=pytest.fail)


# --- where it goes --------------------------------------------------------------------------------------------------


def test_an_export_is_there_whole_or_not_at_all(made: Package, tmp_path: Path) -> None:
    to = tmp_path / "deep" / "export"
    with pytest.raises(KeyboardInterrupt), package.place(to) as aside:
        made.write(aside, gate=None)
        raise KeyboardInterrupt
    assert list(to.parent.iterdir()) == []
    with package.place(to) as aside:
        made.write(aside, gate=None)
        assert not to.exists()
    assert sorted(file.name for file in to.iterdir()) == ["config.json", "contract.json", "model.safetensors"]
    assert list(to.parent.iterdir()) == [to]


def test_an_export_that_fails_leaves_the_one_before_it_as_it_was(exported: Path, made: Package) -> None:
    before = {file: file.read_bytes() for file in exported.iterdir()}
    with pytest.raises(KeyboardInterrupt), package.place(exported) as aside:
        made.write(aside, gate=None)
        raise KeyboardInterrupt
    assert {file: file.read_bytes() for file in exported.iterdir()} == before
    assert list(exported.parent.iterdir()) == [exported]


@pytest.mark.parametrize("stranger", ["README.md", "model-00001-of-00002.safetensors"])
def test_what_holds_anything_else_is_not_replaced(exported: Path, stranger: str) -> None:
    (exported / stranger).touch()
    with pytest.raises(ConfigError, match=f"holds what is no export's .{stranger}.; nothing there is removed"):
        with package.place(exported):
            pytest.fail("it was let in")


def test_a_model_of_somebody_elses_is_not_replaced(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="is no export of this trainer, and is not replaced"):
        with package.place(tmp_path):
            pytest.fail("it was let in")


def test_two_exports_to_one_place_do_not_mix(made: Package, tmp_path: Path) -> None:
    to = tmp_path / "export"
    with package.place(to) as aside:
        with pytest.raises(ConfigError, match="another export is being made there right now"):
            with package.place(to):
                pytest.fail("it was let in")
        made.write(aside, gate=None)
    assert to.is_dir()


# --- the command ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run_it(*arguments: str) -> Done:
        capsys.readouterr()
        code = main(["export", *arguments])
        said = capsys.readouterr()
        return Done(code=code, out=said.out, err=said.err)

    return run_it


@pytest.fixture
def run(learnt_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(learnt_run, tmp_path / "run")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    (tmp_path / "prompts.txt").write_text("\n".join([*PROMPTS, ""]))
    return str(tmp_path / "prompts.txt")


def test_the_command_exports_into_the_run_and_shows_what_each_position_keeps(run: Path, prompts: str, command: Command
                                                                             ) -> None:  # fmt: skip
    done = command(str(run), "--prompts", prompts)
    assert done.code == 0, done.err
    seen = contract.read(run / "export").gate
    assert seen is not None and seen.kept_by_trainer == seen.kept_by_reference
    rows = [line.split()[:3] for line in done.out.splitlines()]
    for slot, count in enumerate(seen.kept_by_trainer, start=1):
        assert [str(slot), str(count), str(count)] in rows
    assert f"exported step 6, their moving average (optimizer.ema 0.9), as zlab in float32: {run}/export" in done.out
    again = command(str(run), "--prompts", prompts, "--json")
    facts = json.loads(again.out)
    assert facts["exported"] == f"{run}/export" and facts["gate"]["passed"] is True
    assert facts["contract"] == contract.read(run / "export").model_dump()


def test_the_command_refuses_what_decodes_otherwise_names_why_and_leaves_nothing(run: Path, prompts: str) -> None:
    """A mistake in the exporter itself, as one would be made; in a process of its own."""
    program = f"""
import sys
import trainer.__main__
import trainer.export.formats as formats

right = formats.layout_of
def layout_of(source, format):
    found = right(source, format)
    return found.model_copy(update=dict(layer_ids=[layer + 1 for layer in found.layer_ids]))
formats.layout_of = layout_of
sys.exit(trainer.__main__.main(["export", {str(run)!r}, "--prompts", {prompts!r}]))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=REPOSITORY
    )
    assert done.returncode == 1, done.stderr
    assert "what explains all of it: layers off by one: outputs of layers [2, 3, 4] are said to be" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]


@pytest.mark.parametrize(("options", "said"), [
    (["--prompts", "/no/such"], "--prompts /no/such: cannot be read"),
    (["--prompts", str(REPOSITORY / "docs" / "schemas" / "pull.v1.json")], "holds JSON, and plain text is needed"),
    (["--device", "cuda:99"], "--device cuda:99: "),
    (["--to", str(REPOSITORY)], "holds what is no export's"),
    (["--target", "/no/such"], "its target /no/such: is not there"),
])  # fmt: skip
def test_a_wrong_option_is_one_line_and_leaves_nothing(run: Path, command: Command, options: list[str], said: str
                                                       ) -> None:  # fmt: skip
    done = command(str(run), *options)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]


def test_without_the_gate_the_contract_says_so(run: Path, command: Command) -> None:
    done = command(str(run), "--no-gate", "--weights", "last")
    assert done.code == 0, done.err
    assert "not looked at by the gate (--no-gate), and the contract says so" in done.out
    assert contract.read(run / "export").gate is None


def test_what_is_in_the_files_is_what_servers_read(run: Path, command: Command) -> None:
    done = command(str(run), "--no-gate", "--dtype", "bfloat16")
    assert done.code == 0, done.err
    tensors = load_file(run / "export" / "model.safetensors")
    assert len(tensors) == 3 + 11 * 2
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not [name for name in tensors if "embed" in name or "lm_head" in name]
    config = json.loads((run / "export" / "config.json").read_bytes())
    assert config["architectures"] == ["DFlashDraftModel"] and "auto_map" not in config
    assert config["dflash_config"] == {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [1, 2, 3]}
    assert (config["num_target_layers"], config["vocab_size"], config["dtype"]) == (6, 400, "bfloat16")
