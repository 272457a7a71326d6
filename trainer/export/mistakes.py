"""The mistakes that exports are known to be made with, each as another reading of the same directory.

When the reference decoder does not find what the trainer found, `gate.py` lets it read the directory in each of these
ways. One that makes it agree is what is wrong with the export, or with what it says of itself. They are what people
have met: see docs/export.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.export.reference import Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the drafter was trained with, straight from the checkpoint."""

    layer_ids: list[int]
    target_layers: int
    mask_token_id: int
    rope_theta: float
    rms_norm_eps: float
    tensors: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    name: str
    """What would be wrong, if this reading agrees."""
    reading: Reading
    general: bool = False
    """Says less than any other that explains as much."""


def mistakes(reading: Reading, trained: Trained) -> Iterator[Mistake]:
    """Those that this reading could be made with: all but what would change nothing in it."""

    def other(name: str, **changes: Any) -> Iterator[Mistake]:
        if any(getattr(reading, key) != value for key, value in changes.items()):
            yield Mistake(name=name, reading=replace(reading, **changes))

    for by in (-1, 1):
        yield from _shifted(reading, trained, by)
    yield from other(
        f"wrong mask token: {reading.mask_token_id}, and it was trained with {trained.mask_token_id}",
        mask_token_id=trained.mask_token_id,
    )  # fmt: skip
    yield from other(
        f"partial RoPE: {reading.rope_dims} dimensions of a head are said to be rotated, and {reading.head_dim} are",
        rope_dims=reading.head_dim,
    )
    styles = ("halves", "interleaved") if reading.rope_halves else ("interleaved", "halves")
    yield from other(
        f"wrong RoPE style: pairs are said to be {styles[0]}, and are {styles[1]}", rope_halves=not reading.rope_halves
    )
    yield from other(
        f"wrong RoPE base: {reading.rope_theta:g}, and it was trained with {trained.rope_theta:g}",
        rope_theta=trained.rope_theta,
    )
    yield from other(
        f"wrong window: layers {list(reading.window_layers)} are said to look back {reading.window} tokens, and look"
        " back to the beginning", window=None,
    )  # fmt: skip
    if reading.window is not None:
        says = ("the anchor", "the slot") if reading.window_from_anchor else ("the slot", "the anchor")
        yield from other(
            f"wrong window: it is said to count from {says[0]}, and counts from {says[1]}",
            window_from_anchor=not reading.window_from_anchor,
        )
    yield from other(
        "wrong causality: a slot is said to see the slots " + ("before it only" if reading.causal else "after it too"),
        causal=not reading.causal,
    )
    yield from other(
        f"wrong eps of the norms: {reading.eps:g}, and it was trained with {trained.rms_norm_eps:g}",
        eps=trained.rms_norm_eps,
    )
    yield from _tensors(reading, trained)


def _shifted(reading: Reading, trained: Trained, by: int) -> Iterator[Mistake]:
    said = f"{-by:+d}"
    yield Mistake(
        name=f"shift by one: every slot is said to predict the token {said} from the one that it was trained for",
        reading=replace(reading, slot_predicts=reading.slot_predicts + by),
    )
    yield Mistake(
        name=f"shift by one: every slot is said to stand at the position {said} from the one where it was trained",
        reading=replace(reading, slot_position=reading.slot_position + by),
    )
    yield Mistake(
        name=f"shift by one: the context is said to end {said} token from where it ended in training",
        reading=replace(reading, context_end=reading.context_end + by),
    )
    ids = tuple(number + by for number in reading.hidden_state_ids)
    if min(ids) >= 0 and max(ids) <= trained.target_layers:
        layers = [number - 1 for number in reading.hidden_state_ids]
        yield Mistake(
            name=f"layers off by one: outputs of layers {layers} are said to be captured, and {trained.layer_ids} were",
            reading=replace(reading, hidden_state_ids=ids),
        )


def _tensors(reading: Reading, trained: Trained) -> Iterator[Mistake]:
    swapped = {
        name: reading.tensors[name.replace("k_proj", "\0").replace("v_proj", "k_proj").replace("\0", "v_proj")]
        for name in reading.tensors if "k_proj" in name or "v_proj" in name
    }  # fmt: skip
    yield Mistake(name="swapped k/v: each layer's k_proj is its v_proj", reading=reading.with_tensors(swapped))
    changed = [name for name, tensor in trained.tensors.items() if not torch.equal(tensor, reading.tensors[name])]
    for norm in ("q_norm", "k_norm"):
        of_norm = [name for name in changed if norm in name]
        if of_norm:
            ones = all(bool((reading.tensors[name] == 1).all()) for name in of_norm)
            how = "all ones, as if it had been left out" if ones else "not the checkpoint's"
            yield Mistake(
                name=f"missing {norm.replace('_', '-')}: {norm} is {how}",
                reading=reading.with_tensors({name: trained.tensors[name] for name in of_norm}),
            )
    if changed:
        listed = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        yield Mistake(
            name=f"other tensors: {listed} are not the checkpoint's",
            reading=reading.with_tensors({name: trained.tensors[name] for name in changed}), general=True,
        )
