"""Configuration errors are one line with file, line and key; scalars mean what the schema says."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.support import REPOSITORY, TrainerProcess, records, train_here, write_config
from trainer import inputs
from trainer.config import Config, ConfigError, check_inputs, expand_path, load_config
from trainer.sections import LossConfig
from trainer.synthesis.config import load_synthesis
from typedyaml import Model
from typedyaml.jsonschema import json_schema

DEMO = REPOSITORY / "configs" / "smollm2-cpu.yaml"


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = DEMO.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path = tmp_path / "run.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def line_of(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1) if text in line)


def test_an_exponent_is_a_number(tmp_path: Path) -> None:
    assert load_config(str(edited(tmp_path, "lr: 1e-3", "lr: 1e-4"))).optimizer.lr == 0.0001


@pytest.mark.parametrize(
    ("old", "new", "key", "problem"),
    [
        ("steps: 2000", "steps: 0123", "steps", "whole number"),
        ("steps: 2000", "steps: 0", "steps", "greater than or equal to 1"),
        ("steps: 2000", "steps: 2_000", "steps", "whole number"),
        ("lr: 1e-3", "lr: fast", "optimizer.lr", "needs a number"),
        ("lr: 1e-3", "lr: -1", "optimizer.lr", "greater than 0"),
        ("layers: 1", "layer: 1", "drafter.layer", "did you mean 'layers'?"),
        ("batch_size: 2", "batch_size: 3", "batch_size", "multiple of the 2 drafters"),
        ("resume: auto", "resume: no", "resume", "'auto' or 'never'"),
        ("kind: python-docs", "kind: text", "data", "needs at least one file"),
        ("sequence_length: 128", "sequence_length: 128\n  paths: [a.txt]", "data.paths", "leave paths out"),
        ("block_size: 8", "block_size: 1", "drafter.block_size", "greater than or equal to 2"),
        ("lr: 1e-3", "lr: 1e-3\n  beta1: 1", "optimizer.beta1", "less than 1"),
        ("target: [cpu]", "target: [auto, cpu]", "devices.target", "auto stands alone"),
        ("resume: auto", "sync_every: 2", "sync_every", "belongs to sync: params"),
        ("drafter: [cpu, cpu]", "drafter: [gpu]", "devices.drafter[0]", "pattern"),
        ("anchors: 16", "anchors: 128", "drafter.anchors", "less than data.sequence_length"),
        ("length: 128", "length: 128\n  buckets: [64, 32, 128]", "data.buckets", "must rise, is [64, 32, 128]"),
        ("length: 128", "length: 128\n  buckets: [64, 64, 128]", "data.buckets", "must rise, is [64, 64, 128]"),
        ("length: 128", "length: 128\n  buckets: [64]", "data.buckets", "must end with sequence_length, which is 128"),
        ("length: 128", "length: 128\n  buckets: [4, 128]", "data.buckets[0]", "greater than or equal to 8"),
        ("block_size: 8", "block_size: 129", "drafter.block_size", "must not exceed data.sequence_length"),
        ("resume: auto", "loss:\n  alpha: 0.5", "loss.alpha", "belongs to weights: d-pace"),
        ("resume: auto", "loss:\n  weights: d-pace\n  decay: 4", "loss.decay", "belongs to weights: exponential"),
        ("layers: 1", "layers: 1\n  loss_decay: 4", "drafter.loss_decay", "is loss.decay now"),
        ("layers: 1", "layers: 1\n  head_chunk_rows: 4", "drafter.head_chunk_rows", "is loss.chunk_rows now"),
        ("lr: 1e-3", "lr: 1e-3\n  decay_shape: linear", "optimizer.decay_shape", "belongs to schedule: wsd"),
        ("lr: 1e-3", "schedule: wsd\n  lr: 1e-3\n  decay_fraction: 1", "optimizer.decay_fraction", "at most 1"),
        ("lr: 1e-3", "lr: 1e-3\n  ema: 1", "optimizer.ema", "less than 1"),
        # Numbers that are some, of which a float32, a tensor's size or the C library is too small.
        ("lr: 1e-3", "lr: 1e39", "optimizer.lr", "less than or equal to 10, is '1e39'"),
        ("lr: 1e-3", "lr: 1e-3\n  weight_decay: 1001", "optimizer.weight_decay", "times lr must be at most 1"),
        ("lr: 1e-3", "lr: 1e-3\n  clip_norm: 1e-39", "optimizer.clip_norm", "greater than or equal to 0.000001"),
        ("resume: auto", "loss:\n  decay: 1e-320", "loss.decay", "greater than or equal to 0.01"),
        ("resume: auto", "peak_tflops: 1e-320", "peak_tflops", "greater than or equal to 0.000001"),
        ("resume: auto", "cpu_threads: {target: 100000}", "cpu_threads.target", "less than or equal to 1000"),
        ("layers: 1", "layers: 1000000000", "drafter.layers", "less than or equal to 1000"),
        ("length: 128", "length: 10000000000", "data.sequence_length", "less than or equal to 10000000"),
    ],
)
def test_a_wrong_value_is_refused_with_file_line_and_key(tmp_path: Path, old: str, new: str, key: str, problem: str
                                                         ) -> None:  # fmt: skip
    path = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert problem in message
    # A key that is missing altogether is blamed on the mapping it is missing from.
    line = line_of(path, "data:" if key == "data" else new.splitlines()[-1])
    assert message.startswith(f"{path}:{line}: {key}")


def test_the_extremes_that_are_taken_are_computed_with(settings: dict[str, Any], tmp_path: Path) -> None:
    directory = tmp_path / "out"
    extremes = {"lr": 1e-3, "weight_decay": 1000, "clip_norm": 1e-6, "beta1": "0.9999999999999999",
                "beta2": "0.9999999999999999", "ema": "1e-320"}  # fmt: skip
    settings |= {"steps": 3, "output_dir": str(directory), "optimizer": extremes, "peak_tflops": 1e-6}
    settings |= {"loss": {"decay": 0.01}, "watchdog": {"least_s": "1e308", "factor": "1e308"}}
    train_here(settings)
    own = [row for row in records(directory, "metrics.jsonl") if row["worker"] is None]
    assert [row["step"] for row in own] == [1, 2, 3]
    assert all(row[name] is not None for row in own for name in ("loss", "grad_norm", "mfu"))


def test_every_key_is_explained() -> None:
    schema = json_schema(Config, title="")
    sections = {"the whole": schema, **schema["$defs"]}
    unexplained = [
        f"{name}: {key}" for name, section in sections.items() for key, value in section["properties"].items()
        if "description" not in value and "$ref" not in json.dumps(value)
    ]  # fmt: skip
    assert len(sections) > 6 and unexplained == []


def test_a_block_has_to_fit_into_the_shortest_bucket(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["data"]["buckets"], settings["drafter"]["block_size"] = [8, 16, 48], 10
    with pytest.raises(ConfigError, match=r"drafter\.block_size: must not exceed the shortest of data\.buckets, 8"):
        load_config(str(write_config(settings, tmp_path / "run.yaml")))


def test_a_bucket_too_short_for_the_anchors_has_fewer(settings: dict[str, Any]) -> None:
    settings["data"]["buckets"], settings["drafter"]["anchors"] = [8, 16, 48], 12
    config = Config.model_validate(settings)
    assert [config.anchors_at(length) for length in config.data.lengths] == [7, 12, 12]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        load_config(str(tmp_path / "nowhere.yaml"))


def test_keys_that_specctl_reads_are_allowed(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings |= {"requirements": ["torch>=2.11"], "patterns": {"step": "it ([0-9]+)"}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert load_config(str(path)).requirements == ["torch>=2.11"]


def test_paths_know_home_and_variables_and_refuse_unset_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.delenv("UNSET", raising=False)
    assert expand_path("~/x", key="k") == Path("/home/someone/x")
    assert expand_path("$MODELS/a b", key="k") == Path("/models/a b")
    with pytest.raises(ConfigError, match=r"target\.path: \$UNSET is not set"):
        expand_path("$UNSET/x", key="target.path")


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0)])
def test_the_decay_of_a_block_size_is_the_published_one(size: int, gamma: float) -> None:
    assert LossConfig().gamma(size) == gamma
    assert LossConfig(decay=3.0).gamma(size) == 3.0


# --- what is read ---------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def sharded(model: Path, *, shards: int, there: int) -> None:
    """Weights in files that an index lists, of which only so many are there."""
    names = [f"model-{index}.safetensors" for index in range(shards)]
    index = {"weight_map": {f"layer.{at}": name for at, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()
    for name in names[:there]:
        header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (model / name).write_bytes(struct.pack("<Q", len(header)) + header + b"1234")


def renamed(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.fp16.safetensors"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: shutil.rmtree(m), "target.path: no Hugging Face model in {m} (there is no such directory)"),
        (lambda m: (m / "config.json").unlink(), "target.path: no Hugging Face model in {m} (config.json is missing)"),
        (lambda m: (m / "config.json").write_text("{"), "target.path: {m}/config.json is not JSON: "),
        (lambda m: (m / "config.json").write_text("[]"), "target.path: {m}/config.json is not a model's configuration"),
        (lambda m: pointer(m / "config.json"), "target.path: {m}/config.json is a Git LFS pointer"),
        (lambda m: (m / "model.safetensors").unlink(), "target.path: {m} holds no weights (model.safetensors or"),
        (lambda m: renamed(m / "model.safetensors"), "pytorch_model.fp16.safetensors is not a name that is looked for"),
        (lambda m: pointer(m / "model.safetensors"), "target.path: {m}/model.safetensors is a Git LFS pointer, not"),
        (lambda m: cut(m / "model.safetensors"), "target.path: {m}/model.safetensors is cut off: "),
        (lambda m: (m / "model.safetensors").write_bytes(b""), "target.path: {m}/model.safetensors is empty"),
        (lambda m: (m / "model.safetensors").write_bytes(b"x" * 99), "{m}/model.safetensors is not a safetensors file"),
        (lambda m: sharded(m, shards=3, there=1), "target.path: {m} lacks 2 of its 3 files of weights: model-1."),
        (lambda m: (m / "tokenizer.json").unlink(), "target.path: {m} has no tokenizer (tokenizer.json)"),
        (lambda m: pointer(m / "tokenizer.json"), "target.path: {m}/tokenizer.json is a Git LFS pointer"),
    ],
)
def test_a_model_that_is_not_whole_is_named_by_its_files(
    tiny_target: Path, settings: dict[str, Any], tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_target, model)
    settings["target"]["path"] = str(model)
    check_inputs(Config.model_validate(settings))
    spoil(model)
    with pytest.raises(ConfigError) as caught:
        check_inputs(Config.model_validate(settings))
    assert said.format(m=model) in str(caught.value) and "\n" not in str(caught.value)


def test_shards_and_a_downloads_cache_are_known(tiny_target: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    shutil.copytree(tiny_target, snapshot)
    sharded(snapshot, shards=2, there=2)
    settings["target"]["path"] = str(snapshot)
    check_inputs(Config.model_validate(settings))
    settings["target"]["path"] = str(tmp_path / "models--a--b")
    with pytest.raises(ConfigError, match=rf"config.json is missing; {snapshot} has one"):
        check_inputs(Config.model_validate(settings))


def test_everything_that_a_run_reads_is_checked_at_once(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["drafter"]["mask_token_id"] = 400
    settings["target"]["layer_ids"] = [1, 6]
    settings["data"]["paths"] = [str(tmp_path), "/no/such.txt"]
    with pytest.raises(ConfigError) as caught:
        check_inputs(Config.model_validate(settings))
    message = str(caught.value)
    assert "drafter.mask_token_id: 400 is no token of" in message
    assert "which has 400: 0 to 399; spare is 3 (<|mask|>);" in message
    assert "target.layer_ids: must rise, from 0 to 5 at most; is [1, 6]" in message
    assert f"data.paths[0]: {tmp_path} is a directory" in message
    assert "data.paths[1]: /no/such.txt: No such file or directory" in message


def test_no_path_of_the_configuration_is_forgotten(settings: dict[str, Any]) -> None:
    def paths(model: type[Model], prefix: str = "") -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Model):
                found |= paths(field.annotation, f"{prefix}{name}.")
            elif {"path", "paths", "dir", "file", "files", "from"} & set(name.split("_")):
                found.add(prefix + name)
        return found

    settings["evaluation"] = {"paths": settings["data"]["paths"]}
    settings["drafter"]["start_from"] = "run"
    there = Config.model_validate(settings).what_must_be_there()
    checked = {key.partition("[")[0] for kind in inputs.KINDS for key in there[kind]}
    assert paths(Config) == checked | {"output_dir"}, "output_dir is made, all others are read"


@pytest.mark.parametrize(
    ("change", "extras"),
    [
        ({}, []),
        ({"data": {"kind": "conversations", "paths": ["a.jsonl.gz", "b.json", "c.txt"], "sequence_length": 48}}, []),
        ({"data": {"kind": "conversations", "paths": ["part-*.parquet"], "sequence_length": 48}}, ["data"]),
        ({"data": {"kind": "text", "paths": ["a.txt.zst"], "sequence_length": 48}}, ["data"]),
        ({"data": {"kind": "text", "paths": ["~/corpus"], "sequence_length": 48}}, ["data"]),
        ({"tracking": {"wandb": {"project": "a"}, "trackio": {"project": "a"}}, "loss": {"kernel": "liger"}},
         ["wandb", "trackio", "liger"]),
    ],
)  # fmt: skip
def test_what_is_asked_for_decides_which_extras_an_environment_needs(
    settings: dict[str, Any], change: dict[str, Any], extras: list[str]
) -> None:
    settings["data"]["paths"] = ["a.txt"]
    assert Config.model_validate({**settings, **change}).what_must_be_there()["extras"] == extras


def test_what_is_missing_is_told_before_torch_is_imported(
    start_trainer: Callable[..., TrainerProcess], settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["target"]["path"] = str(tmp_path)
    planted = "import sys; sys.modules['torch'] = None"
    run = start_trainer(write_config(settings, tmp_path / "config.yaml"), planted=planted)
    code, _, err = run.finish()
    assert (code, err) == (2, f"trainer: target.path: no Hugging Face model in {tmp_path} (config.json is missing)\n")
    assert run.events()[-1]["event"] == "ended" and "config.json is missing" in run.events()[-1]["error"]


@pytest.mark.parametrize(
    ("gpus", "batch_size", "target", "drafter"),
    [
        (0, 4, ["cpu"], ["cpu"]),
        (1, 4, ["cuda:0"], ["cuda:0"]),
        (3, 4, ["cuda:0", "cuda:1", "cuda:2"], ["cuda:0", "cuda:1"]),
    ],
)
def test_auto_is_every_gpu_of_the_machine_as_far_as_a_batch_can_be_shared_out(
    settings: dict[str, Any], tmp_path: Path, gpus: int, batch_size: int, target: list[str], drafter: list[str]
) -> None:
    settings |= {"devices": "auto", "batch_size": batch_size}
    config = load_config(str(write_config(settings, tmp_path / "run.yaml")))
    assert config.what_must_be_there()["devices"] == []
    devices = config.devices.on(gpus, batch_size=batch_size)
    assert (devices.target, devices.drafter) == (target, drafter)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").iterdir()), ids=lambda path: path.stem)
def test_configurations_that_come_along_can_be_read(path: Path) -> None:
    if "synthesis" in path.stem:
        assert load_synthesis(str(path), verb="synthesize").conversations
    else:
        assert load_config(str(path)).steps
