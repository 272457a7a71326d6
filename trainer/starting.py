"""The drafter that a run starts from, `drafter.start_from`: found, and held against what the run is to train.

A checkpoint is read as it is for an export (`export/source.py`), what servers load as it is for decoding
(`export/loading.py`). What would make the weights worthless here is refused; what only changes the training is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import checkpoint
from trainer.config import Config, ConfigError, expand_path
from trainer.export import loading, source
from trainer.files import describe
from trainer.model.drafter import DrafterShape
from trainer.model.target import Target

KEY = "drafter.start_from"
SIZES = {
    "layers": "drafter.layers", "heads": "drafter.heads", "kv_heads": "drafter.kv_heads",
    "head_dim": "drafter.head_dim", "intermediate": "drafter.intermediate_size", "hidden": "the target's hidden size",
    "rope_theta": "the base of RoPE, which is the target's,",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    path: Path
    """Of a run, its checkpoint."""
    what: str
    """For a person."""
    files: list[Path]
    """Those that the weights were read from."""
    weights: dict[str, Tensor]
    """By the names that servers load; float32, on the CPU."""
    shape: DrafterShape
    layer_ids: list[int]
    block_size: int
    mask_token_id: int

    def record(self) -> dict[str, Any]:
        """What is kept of it: where it was, and what it was to the byte. Reads all of it once more."""
        return {
            "path": str(self.path), "what": self.what,
            "files": {file.name: describe(file)["sha256"] for file in self.files},
        }  # fmt: skip


def find(config: Config, target: Target, shape: DrafterShape, *, say: Callable[[str], None]) -> Start | None:
    """What `config` says to start from; None if it says nothing. Raises `ConfigError`, in one line, for what is no
    drafter, was trained for another target, or is another drafter than one of `shape` on what `target` captures."""
    if config.drafter.start_from is None:
        return None
    path = expand_path(config.drafter.start_from, key=KEY).absolute()
    try:
        found = _published(path, target) if loading.is_published(path) else _checkpoint(path, config, say)
    except ConfigError as error:
        raise ConfigError(f"{KEY}: {error}") from None
    if others := list(_others(found, config, target, shape)):
        raise ConfigError(
            f"{KEY}: {found.path} does not fit the configuration: {'; '.join(others)}; configure what it has, or start"
            " from another"
        )
    if broken := [name for name, weight in found.weights.items() if not bool(torch.isfinite(weight).all())]:
        raise ConfigError(f"{KEY}: {found.path}: weights that are not finite: {', '.join(broken[:3])}")
    if found.block_size != config.drafter.block_size:
        said = f"drafter.block_size is {found.block_size} there and {config.drafter.block_size} here"
        say(f"{KEY}: {said}: it learns to fill other blocks")
    if found.shape.rms_norm_eps != shape.rms_norm_eps:
        say(f"{KEY}: eps of its norms is {found.shape.rms_norm_eps:g} there, and the target's {shape.rms_norm_eps:g}")
    return found


def _checkpoint(path: Path, config: Config, say: Callable[[str], None]) -> Start:
    target = expand_path(config.target.path, key="target.path")
    found = source.find(path, which="auto", target=target, say=say, others=", or an export")
    averaged = found.origin.weights == "ema"
    return Start(
        path=found.path, what=str(found.origin), weights=found.weights, shape=found.shape,
        files=[found.path / (checkpoint.AVERAGES if averaged else checkpoint.WEIGHTS)],
        layer_ids=found.layer_ids, block_size=found.block_size, mask_token_id=found.mask_token_id,
    )  # fmt: skip


def _published(path: Path, target: Target) -> Start:
    found = loading.read(path)
    loading.see_that_it_is_the_target(found, target)
    return Start(
        path=path, what=str(found), files=found.files(), shape=found.shape,
        weights={name: tensor.float() for name, tensor in found.tensors().items()},
        layer_ids=found.layout.layer_ids, block_size=found.layout.block_size, mask_token_id=found.layout.mask_token_id,
    )  # fmt: skip


def _others(found: Start, config: Config, target: Target, shape: DrafterShape) -> Iterator[str]:
    """What makes it another drafter than the one that is to be trained, by the words of the configuration."""
    for field, name in SIZES.items():
        there, here = getattr(found.shape, field), getattr(shape, field)
        if there != here:
            yield f"{name} is {there:g} there and {here:g} here"
    if found.layer_ids != target.layer_ids:
        yield f"target.layer_ids are {found.layer_ids} there and {target.layer_ids} here"
    if found.mask_token_id != config.drafter.mask_token_id:
        yield f"drafter.mask_token_id is {found.mask_token_id} there and {config.drafter.mask_token_id} here"
