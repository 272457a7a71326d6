"""Rounds whose work is compiled say what the same rounds say as they are written, and little is compiled for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer.config import DrafterConfig, TargetConfig
from trainer.decode import loaded
from trainer.decode.compiling import AsWritten, Compiled
from trainer.decode.engine import BlockDrafter, Engine
from trainer.decode.generate import end_ids, run
from trainer.decode.loaded import Loaded
from trainer.decode.sampling import Sampling
from trainer.model.drafter import Drafter
from trainer.model.target import decoder_layers, load_target, shape_for

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
TRACED = Compiled(backend="aot_eager")
PROMPTS = [[7, 9, 30, 41], [1] + [50, 60, 70] * 35, [99, 17]]
"""The second has rounds look at more than the shortest context."""
SIZES: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(taught_run: Path) -> Loaded:
    return loaded.load(taught_run, target=None, device=CPU, say=lambda line: None)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def texts(target: Any, drafter: BlockDrafter | None, way: AsWritten, *, max_tokens: int = 32,
          sampling: Sampling = Sampling()) -> list[list[int]]:  # fmt: skip
    engine = Engine(target, drafter, rows=3, capacity=180, stop_ids=end_ids(target), sampling=sampling)
    engine.rounds.way = way
    made = run(engine, PROMPTS, max_tokens=max_tokens)
    assert engine.lengths == [128, 184]
    return [one.tokens for one in made.continuations]


@pytest.mark.parametrize(("drafted", "functions"), [(False, 2), (True, 5)])
def test_each_function_of_a_round_is_compiled_once_for_all_layers_and_lengths_of_context(
    trained: Loaded, drafted: bool, functions: int
) -> None:
    drafter = trained.block_drafter if drafted else None
    expected, before = texts(trained.target, drafter, AsWritten()), graphs()
    assert texts(trained.target, drafter, TRACED) == expected
    assert graphs() == before + functions
    # Again, in other memory.
    assert texts(trained.target, drafter, TRACED) == expected
    assert graphs() == before + functions
    assert not any("forward" in vars(layer) for layer in decoder_layers(trained.target.model))


@pytest.mark.parametrize("drafted", [False, True])
def test_drawn_texts_are_the_same_too(trained: Loaded, drafted: bool) -> None:
    drafter, drawn = trained.block_drafter if drafted else None, Sampling(temperature=0.9, top_k=20)
    expected = texts(trained.target, drafter, AsWritten(), sampling=drawn)
    assert texts(trained.target, drafter, TRACED, sampling=drawn) == expected
    assert texts(trained.target, drafter, AsWritten()) != expected


def test_the_code_that_torch_generates_writes_the_same_texts(trained: Loaded) -> None:
    expected = texts(trained.target, trained.block_drafter, AsWritten())
    assert texts(trained.target, trained.block_drafter, Compiled()) == expected


FAMILIES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, num_key_value_heads=4, sliding_window=None)),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SIZES, num_key_value_heads=2, sliding_window=None)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_other_families_are_compiled_to_the_same_texts(
    family: str, tiny_target: Path, tmp_path: Path
) -> None:
    model, config = FAMILIES[family]
    torch.manual_seed(0)
    model(config).save_pretrained(tmp_path)
    for file in tiny_target.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    target = load_target(TargetConfig(path=str(tmp_path), dtype="float32", layer_ids=[0, 2]), CPU)
    assert target.masks_itself
    drafting = DrafterConfig(layers=1, block_size=4, anchors=1, mask_token_id=3)
    shape = shape_for(target.model.config, drafting, captured=2)
    drafter = Drafter(shape).requires_grad_(False)
    drafter.initialise(torch.Generator().manual_seed(2))
    block_drafter = BlockDrafter(drafter=drafter, ends=target.ends, block_size=4, mask_token_id=3)
    before = graphs()
    for one in (block_drafter, None):
        assert texts(target, one, TRACED, max_tokens=16) == texts(target, one, AsWritten(), max_tokens=16)
    assert graphs() == before + 7


def test_a_target_that_numbers_its_layers_otherwise_is_not_compiled(tiny_target: Path) -> None:
    target = load_target(TargetConfig(path=str(tiny_target), dtype="float32", captured_layers=1), CPU)
    for layer in decoder_layers(target.model):
        layer.self_attn.layer_idx = 5 - layer.self_attn.layer_idx
    expected = texts(target, None, AsWritten())
    with pytest.raises(RuntimeError, match="LlamaForCausalLM numbers its layers in a way of its own"):
        texts(target, None, TRACED)
    assert texts(target, None, AsWritten()) == expected


def test_what_torch_cannot_compile_whole_is_an_error_and_the_target_stays_as_it_was(tiny_target: Path) -> None:
    target = load_target(TargetConfig(path=str(tiny_target), dtype="float32", captured_layers=1), CPU)
    expected = texts(target, None, AsWritten())
    for layer in decoder_layers(target.model):
        layer.mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        texts(target, None, TRACED)
    assert texts(target, None, AsWritten()) == expected
