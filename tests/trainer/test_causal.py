"""Targets that attend without a mask: to the same features, and only where that is what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.integrations import sdpa_attention

from trainer.model.causal import without_masks
from trainer.model.target import decoder_layers, layers_compiled, load_target
from trainer.sections import TargetConfig

SIZES: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "sdpa",
}  # fmt: skip


def features(model: Any) -> torch.Tensor:
    ids = torch.randint(4, 400, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: torch.Tensor = model.base_model(input_ids=ids, use_cache=False)[0]
    return result


def test_a_target_that_looks_back_all_the_way_gets_no_mask_and_computes_the_same(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, attn_implementation="sdpa").eval()
    before = features(model)
    assert without_masks(model)
    masks, original = [], torch.nn.functional.scaled_dot_product_attention

    def noted(*positional: Any, attn_mask: Any = None, is_causal: bool = False, **named: Any) -> Any:
        masks.append((attn_mask, is_causal))
        return original(*positional, attn_mask=attn_mask, is_causal=is_causal, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    assert torch.equal(features(model), before)
    assert len(masks) == 6 and set(masks) == {(None, True)}


def test_a_target_with_a_window_keeps_its_mask() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval()
    before = features(model)
    assert not without_masks(model) and model.config._attn_implementation == "sdpa"
    assert torch.equal(features(model), before)


def test_a_target_that_would_compute_something_else_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    original = sdpa_attention.sdpa_attention_forward

    def forgets(*positional: Any, **named: Any) -> Any:
        return original(*positional, **{**named, "is_causal": False})

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", forgets)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    before = features(model)
    assert not without_masks(model) and model.config._attn_implementation == "sdpa"
    assert torch.equal(features(model), before)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_layers_are_one_form_for_all_of_them_and_leave_the_model_as_it_was(
    tiny_target: Path, packed: bool
) -> None:
    target = load_target(TargetConfig(path=str(tiny_target), dtype="float32", captured_layers=3), torch.device("cpu"))
    ids = torch.randint(4, 400, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat((torch.arange(10), torch.arange(14))).expand(2, 24) if packed else None
    expected = target.features(ids, positions)
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    with layers_compiled(target.model, backend="aot_eager"):
        assert torch.equal(target.features(ids, positions), expected)
        assert counts["unique_graphs"] == before + 1
    assert not any("forward" in vars(layer) for layer in decoder_layers(target.model))
    assert torch.equal(target.features(ids, positions), expected) and counts["unique_graphs"] == before + 1
