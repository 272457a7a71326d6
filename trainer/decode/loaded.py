"""A drafter from a directory, with the target that it was trained for: a checkpoint, a run with some, an export, or a
drafter in z-lab's form.

Which it is follows from the files in it. A checkpoint names its target; an export names only what has to be in it, and
others hardly that, so that their target has to be pointed out. None is decoded with another target than its own, as far
as it tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from trainer.config import ConfigError, expand_path
from trainer.decode.engine import BlockDrafter
from trainer.export import loading, source
from trainer.export.source import DTYPES, DtypeName
from trainer.model.drafter import Drafter
from trainer.model.target import Target, load_target
from trainer.sections import TargetConfig

Which = Literal["auto", "last", "ema"]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    target: Target
    block_drafter: BlockDrafter
    source: str
    """What was loaded, for a person."""


def load(path: Path, *, target: str | None, device: torch.device, dtype: DtypeName | None = None,
         weights: Which = "auto", say: Say) -> Loaded:  # fmt: skip
    """Raises `ConfigError`, in one line, for what is no drafter, or does not fit its target. `target` is where that is,
    if not where the drafter was trained; `dtype` that of the arithmetic, if not the one that the drafter was trained or
    exported in; of a checkpoint with a moving average `weights` says which, else that average."""
    target_path = expand_path(target, key="--target") if target else None
    if target_path is not None and not (target_path / "config.json").is_file():
        raise ConfigError(f"--target: there is no model in {target_path}")
    if loading.is_published(path):
        return _published(path, target_path, device, dtype, say)
    found = source.find(path, which=weights, target=target_path, say=say, others=", or an export")
    arithmetic = dtype or found.computed_in
    loaded = _target(found.target_path, device, arithmetic, found.layer_ids)
    drafter = Drafter(found.shape)
    drafter.load_state_dict(found.weights)
    return _loaded(
        loaded, drafter, arithmetic, block_size=found.block_size, mask_token_id=found.mask_token_id,
        source=f"{found.path} ({found.origin})",
    )  # fmt: skip


def _published(path: Path, target_path: Path | None, device: torch.device, dtype: DtypeName | None, say: Say
               ) -> Loaded:  # fmt: skip
    found = loading.read(path)
    if target_path is None:
        facts = found.contract and found.contract.target
        which = f", a {facts.architecture} of {facts.layers} layers" if facts else ""
        raise ConfigError(f"{path}: an export does not say where its target is{which}; name it with --target DIR")
    arithmetic = dtype or found.dtype
    target = _target(target_path, device, arithmetic, found.layout.layer_ids)
    drafter = loading.drafter_of(found, target, say=say)
    return _loaded(
        target, drafter, arithmetic, block_size=found.layout.block_size, mask_token_id=found.layout.mask_token_id,
        source=f"{path} ({found})",
    )  # fmt: skip


def _target(path: Path, device: torch.device, dtype: DtypeName, layer_ids: list[int]) -> Target:
    return load_target(TargetConfig(path=str(path), dtype=dtype, layer_ids=layer_ids), device)


def _loaded(target: Target, drafter: Drafter, dtype: DtypeName, *, block_size: int, mask_token_id: int, source: str
            ) -> Loaded:  # fmt: skip
    drafter.requires_grad_(False).eval().to(target.device, DTYPES[dtype])
    ends = target.ends.to(target.device, DTYPES[dtype])
    block_drafter = BlockDrafter(drafter=drafter, ends=ends, block_size=block_size, mask_token_id=mask_token_id)
    return Loaded(target=target, block_drafter=block_drafter, source=source)
