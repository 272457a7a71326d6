"""The serve-parity gate: what is exported decodes as it was trained, and every known mistake is caught and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.exports import CPU, look, prompts_of
from trainer.export import formats, gate, package
from trainer.export.contract import Window
from trainer.export.gate import Replay
from trainer.export.package import Package
from trainer.model.target import load_target
from trainer.sections import TargetConfig


def test_what_is_exported_decodes_as_it_was_trained_to_the_last_block(made: Package, replay: Replay, tmp_path: Path
                                                                      ) -> None:  # fmt: skip
    outcome = look(made, tmp_path / "export", replay)
    assert (outcome.differences, outcome.diagnosis, outcome.ties) == ([], [], 0)
    assert outcome.gate.kept_by_trainer == outcome.gate.kept_by_reference
    assert outcome.gate.blocks == 24
    assert min(outcome.gate.kept_by_trainer) > 12, "a drafter that is kept, or the numbers would say nothing"


def test_in_bfloat16_rounding_is_no_fault_and_a_fault_is_none_of_rounding(made: Package, tmp_path: Path) -> None:
    made = package.package(made.source, format="zlab", dtype="bfloat16", target_name="")
    replay = gate.replay(made, prompts_of, device=CPU, arithmetic="bfloat16")
    assert look(made, tmp_path / "export", replay).differences == []
    [said] = look(swapped(made), tmp_path / "fault", replay).diagnosis
    assert said.startswith("swapped k/v")


def test_of_a_prompt_that_is_too_long_for_the_target_the_end_is_taken(made: Package) -> None:
    target = load_target(TargetConfig(path=str(made.source.target_path), dtype="float32", layer_ids=[1]), CPU)
    ids_P = torch.arange(100, 400)
    [(found_S, anchors)] = gate.continued(target, [ids_P], block_size=4)
    assert len(found_S) == 256 and anchors[-1] + 4 < 256
    assert torch.equal(found_S[: anchors[0]], ids_P[-anchors[0] :])


def laid_out(made: Package, **changes: Any) -> Package:
    """As if the exporter had taken the layout to be another one, in config.json and in the contract alike."""
    layout = made.layout.model_copy(update=changes)
    config = formats.written(made.source, layout, made.format, dtype=made.dtype, target_name="the/target")
    return replace(made, layout=layout, config=config)


def with_tensors(made: Package, change: Callable[[str, Tensor], Tensor]) -> Package:
    return replace(made, tensors={name: change(name, tensor) for name, tensor in made.tensors.items()})


def swapped(made: Package) -> Package:
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}

    def change(name: str, tensor: Tensor) -> Tensor:
        kind = name.split(".")[-2]
        return made.tensors[name.replace(kind, other[kind])] if kind in other else tensor

    return with_tensors(made, change)


def without_q_norm(made: Package) -> Package:
    """As a server that finds none goes on with what it has."""
    return with_tensors(made, lambda name, tensor: torch.ones_like(tensor) if "q_norm" in name else tensor)


def last_weights(made: Package) -> Package:
    return with_tensors(made, lambda name, tensor: tensor * 1.25)


def features_in_another_order(made: Package) -> Package:
    return with_tensors(made, lambda name, tensor: tensor.roll(64, dims=1) if name == "fc.weight" else tensor)


def windowed(made: Package, convention: Any) -> Package:
    return laid_out(made, window=Window(tokens=6, layers=[0, 1], convention=convention))


FAULTS: dict[str, tuple[Callable[[Package], Package], str]] = {
    "labels shifted by one": (
        lambda made: laid_out(made, slot_predicts=1),
        "shift by one: every slot is said to predict the token +1 from the one that it was trained for",
    ),
    "positions shifted by one": (
        lambda made: laid_out(made, slot_position=1),
        "shift by one: every slot is said to stand at the position +1 from the one where it was trained",
    ),
    "context with the anchor in it": (
        lambda made: laid_out(made, context_end=1),
        "shift by one: the context is said to end +1 token from where it ended in training",
    ),
    "layers off by one": (
        lambda made: laid_out(made, layer_ids=[2, 3, 4]),
        "layers off by one: outputs of layers [2, 3, 4] are said to be captured, and [1, 2, 3] were",
    ),
    "layers off by one, downwards": (
        lambda made: laid_out(made, layer_ids=[0, 1, 2]),
        "layers off by one: outputs of layers [0, 1, 2] are said to be captured, and [1, 2, 3] were",
    ),
    "wrong mask id": (
        lambda made: laid_out(made, mask_token_id=0), "wrong mask token: 0, and it was trained with 3"
    ),
    "partial RoPE": (
        lambda made: laid_out(made, rope=made.layout.rope.model_copy(update={"dims": 8})),
        "partial RoPE: 8 dimensions of a head are said to be rotated, and 16 are",
    ),
    "interleaved RoPE": (
        lambda made: laid_out(made, rope=made.layout.rope.model_copy(update={"style": "interleaved"})),
        "wrong RoPE style: pairs are said to be interleaved, and are halves",
    ),
    "wrong RoPE base": (
        lambda made: laid_out(made, rope=made.layout.rope.model_copy(update={"theta": 1e6})),
        "wrong RoPE base: 1e+06, and it was trained with 10000",
    ),
    "window from the slot": (
        lambda made: windowed(made, "from the slot"),
        "wrong window: layers [0, 1] are said to look back 6 tokens, and look back to the beginning",
    ),
    "window from the anchor": (
        lambda made: windowed(made, "from the anchor"),
        "wrong window: layers [0, 1] are said to look back 6 tokens, and look back to the beginning",
    ),
    "causal": (
        lambda made: laid_out(made, causal=True), "wrong causality: a slot is said to see the slots before it only"
    ),
    "swapped k/v": (swapped, "swapped k/v: each layer's k_proj is its v_proj"),
    "missing q-norm": (without_q_norm, "missing q-norm: q_norm is all ones, as if it had been left out"),
    "features in another order": (features_in_another_order, "other tensors: fc.weight are not the checkpoint's"),
    "last weights for their average": (last_weights, "other tensors: fc.weight, hidden_norm.weight, "),
}  # fmt: skip


SEEN_IN_WHAT_IS_KEPT = {
    "labels shifted by one", "positions shifted by one", "wrong mask id", "partial RoPE", "interleaved RoPE",
    "window from the slot", "window from the anchor", "swapped k/v",
}  # fmt: skip
"""The others change what this drafter computes, but not what it says of a text that it knows by heart."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_named(made: Package, replay: Replay, tmp_path: Path, fault: str) -> None:
    plant, name = FAULTS[fault]
    outcome = look(plant(made), tmp_path / "export", replay)
    assert outcome.differences
    [said] = outcome.diagnosis
    assert said.startswith(name)
    if fault in SEEN_IN_WHAT_IS_KEPT:
        assert outcome.gate.kept_by_reference[0] < 20 < outcome.gate.kept_by_trainer[0]
