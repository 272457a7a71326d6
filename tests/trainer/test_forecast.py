"""`python -m trainer plan`: the functions it lists are those that a run compiles, its bytes those that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from transformers import AutoConfig, Qwen3Config

from tests.trainer.support import write_config
from trainer import compile_plan, kernels
from trainer.__main__ import main
from trainer.config import Config
from trainer.model.drafter import Drafter
from trainer.optim import FlatWeights
from trainer.plan import compiled_layer, forecast


@pytest.mark.parametrize(
    ("layers", "kernel", "chunk_rows", "buckets"),
    [(1, "fused", 1000, None), (3, "fused", 24, None), (2, "chunked", 11, None), (2, "fused", 40, [8, 24, 48])],
)
def test_what_is_planned_is_what_gets_compiled(train: Any, settings: dict[str, Any], layers: int, kernel: str,
                                               chunk_rows: int, buckets: list[int] | None) -> None:  # fmt: skip
    torch._dynamo.reset()
    kernels.kernels_for.cache_clear()
    settings["drafter"]["layers"] = layers
    settings["loss"] = {"kernel": kernel, "chunk_rows": chunk_rows}
    settings["data"]["buckets"] = buckets
    settings |= {"compile_on_cpu": "aot_eager", "steps": 1, "batch_size": 2}
    training = train(settings)
    planned = list(forecast.forms(training.config, torch.device("cpu")))
    found = []
    for length in training.config.data.lengths:
        codes = training.members[0].kernels.of((1, length, min(8, length - 1))).compiled
        found += [name.split()[0] for name, code in codes.items() if _debug_get_cache_entry_list(code)]
    assert sorted(form.kind for form in planned) == sorted(found)
    assert len(set(planned)) == len(planned), "and each can be told from the others"
    torch._dynamo.reset()
    kernels.kernels_for.cache_clear()


def planned(settings: dict[str, Any], **options: Any) -> dict[str, forecast.Memory]:
    """Of the tiny target."""
    config = Config.model_validate(settings)
    model = AutoConfig.from_pretrained(config.target.path)
    shape = forecast.shape_for(model, config.drafter, captured=3)
    return forecast.memory(config, model, shape, layer_ids=[1, 2, 3], parameters=1000, **options)


def test_the_longest_bucket_takes_the_memory(settings: dict[str, Any]) -> None:
    found = []
    for buckets in (None, [8, 48], [48]):
        settings["data"]["buckets"] = buckets
        found.append(planned(settings))
    assert found[0] == found[1] == found[2]
    settings["data"] |= {"sequence_length": 64, "buckets": [48, 64]}
    assert planned(settings)["cpu"].work > found[0]["cpu"].work


def test_a_devices_memory_is_the_sum_of_what_lives_there(settings: dict[str, Any], tiny_target: Path) -> None:
    settings["devices"] = {"target": ["cpu", "cpu"], "drafter": ["cpu", "cpu", "cuda:0"]}
    settings["batch_size"] = 6
    found = planned(settings)
    model = AutoConfig.from_pretrained(tiny_target)
    shape = forecast.shape_for(model, Config.model_validate(settings).drafter, captured=3)
    with torch.device("meta"):
        drafter = Drafter(shape)
    flat = FlatWeights(drafter)
    assert found["cpu"].target == 4000 and found["cuda:0"].target == 0, "the threads of a device share one model"
    assert found["cpu"].frozen_ends == 0 and found["cuda:0"].frozen_ends == 400 * 64 * 2
    count = len(flat.weights)
    assert found["cuda:0"].drafters == flat.exchanged.nbytes + count * (12 + 2)
    assert found["cpu"].drafters == 2 * (flat.exchanged.nbytes + count * 12)
    assert found["cpu"].work > 2 * (found["cuda:0"].work - 2 * forecast.WORKSPACE_BYTES) > 0


def test_plan_prints_both_and_trains_nothing(settings: dict[str, Any], tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    settings["devices"] = {"target": ["cuda:0"], "drafter": ["cuda:0", "cuda:7"]}
    config = write_config(settings, tmp_path / "config.yaml")
    assert main(["plan", str(config)]) == 0
    out = capsys.readouterr().out
    assert "cuda:7" in out.splitlines()[1] and "not on this machine: " in out
    assert "(8 functions of one form each)" in out
    assert "  cuda:7  first_layer  2 x 32 slots, 48+32 keys  train  forward, backward\n" in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["cuda:0", "cuda:7"]
    assert not (tmp_path / "out").exists()
    write_config({**settings, "engine": "fsdp2"}, config)
    assert main(["plan", str(config)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "target threads: cuda:0, cuda:7; drafters: cuda:0, cuda:7"
    assert second == "engine: fsdp2, 2 processes, each with a target and a drafter on its device"
    write_config({**settings, "target": {"path": "/nowhere"}}, config)
    assert main(["plan", str(config)]) == 2
    assert capsys.readouterr().err.startswith("trainer: target.path: no Hugging Face model in /nowhere")


GB = 1e9


@pytest.mark.parametrize(("engine", "measured_gb"), [("threads", 43.29), ("ddp", 43.41), ("fsdp2", 34.01)])
def test_what_two_h200_were_seen_to_take_is_what_is_planned_for_them(engine: str, measured_gb: float) -> None:
    both = {"target": ["cuda:0", "cuda:1"], "drafter": ["cuda:0", "cuda:1"]}
    config = Config.model_validate({
        "engine": engine, "steps": 9, "batch_size": 2, "devices": both, "target": {"path": "-"},
        "data": {"kind": "python-docs", "sequence_length": 2048}, "optimizer": {"lr": 1e-5},
        "drafter": {"layers": 5, "block_size": 16, "anchors": 512, "mask_token_id": 3},
    })  # fmt: skip
    model = Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    shape = forecast.shape_for(model, config.drafter, captured=5)
    found = forecast.memory(config, model, shape, layer_ids=[1, 9, 17, 25, 33], parameters=8_190_735_360)
    assert found["cuda:0"] == found["cuda:1"]
    assert measured_gb < found["cuda:0"].peak / GB < 1.07 * measured_gb


def test_devices_that_exchange_have_room_for_what_they_fetch(settings: dict[str, Any]) -> None:
    work = {}
    for count in (1, 2, 3):
        drafters = ["cuda:0", "cuda:1", "cuda:2"][:count]
        settings |= {"batch_size": 6 * count, "devices": {"target": ["cpu"], "drafter": drafters}}
        work[count] = planned(settings)["cuda:0"].work
    shape = forecast.shape_for(AutoConfig.from_pretrained(settings["target"]["path"]),
                               Config.model_validate(settings).drafter, captured=3)  # fmt: skip
    with torch.device("meta"):
        size = len(FlatWeights(Drafter(shape)).exchanged)  # all in one part, as small as they are
    assert [work[count] - work[1] for count in (2, 3)] == [4 * size, 4 * 2 * -(-size // 3)]


def drafter_work(settings: dict[str, Any]) -> int:
    return planned(settings)["cuda:1"].work - 2 * forecast.WORKSPACE_BYTES


def test_what_is_compiled_keeps_less_than_what_is_written_and_more_than_its_products(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings["devices"] = {"target": ["cuda:0"], "drafter": ["cuda:1"]}
    settings["drafter"] |= {"layers": 3, "intermediate_size": 1024, "anchors": 40, "block_size": 8}
    compile_plan.watch.open()
    compile_plan.watch.seal()
    compiled = drafter_work(settings)  # as in a process in which nothing is to be compiled any more
    assert compile_plan.watch.sealed
    compile_plan.watch.open()

    def no_such_partitioner(*_: Any) -> Any:
        raise ImportError

    monkeypatch.setattr(compiled_layer, "kernels", no_such_partitioner)
    written = drafter_work(settings)
    slots, rows = 4 * 320, 3 * 2 * 1024  # gate and up of each layer, in bfloat16
    assert slots * rows * 2 < compiled < 0.8 * written
