"""What is exported: a checkpoint, found by the path of a run or its own, and the facts about it that a server needs.

A checkpoint says by itself what it was trained with (`trainer.json`); the target is only looked at to see that it is
still the same, and for what it alone knows: its vocabulary, its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainer import checkpoint
from trainer.checkpoint import CheckpointDamaged
from trainer.config import ConfigError, expand_path
from trainer.export.contract import Origin, TargetFacts
from trainer.inputs import is_checkpoint
from trainer.kept import changed
from trainer.model.drafter import DrafterShape
from trainer.model.target import drafter_dtype, file_digests

DtypeName = Literal["float32", "bfloat16"]
DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A trained drafter, and what it was trained with."""

    path: Path
    origin: Origin
    weights: dict[str, Tensor]
    """By the names that servers load; float32, on the CPU."""
    shape: DrafterShape
    layer_ids: list[int]
    block_size: int
    mask_token_id: int
    computed_in: DtypeName
    """In the training."""
    ema_decay: float | None
    target_path: Path
    target: TargetFacts
    target_config: dict[str, Any]
    """The text model's part of its config.json, with transformers' defaults."""


def find(path: Path, *, which: Literal["auto", "last", "ema"], target: Path | None, say: Callable[[str], None],
         others: str = "") -> Source:  # fmt: skip
    """What `path`, a run's directory or a checkpoint, holds; of a run, its latest whole checkpoint. `target` is where
    the target lies now. Raises `ConfigError`, in one line, for what is not there, not whole, or another target.
    `others` words what else may be named where this is called."""
    where, found = _checkpoint(path, say, others)
    if which == "ema" and not found.averages:
        raise ConfigError(f"{where}: keeps no moving average (optimizer.ema was not set); leave --weights out")
    use_ema = bool(found.averages) and which != "last"
    state = _Facts(where, found.state)
    must_keep = state.at("must_keep")
    target_path = target or expand_path(str(state.at("config", "target", "path")), key="target.path")
    facts, config = _target(target_path, where, must_keep, given=target is not None)
    device = torch.device(str(state.at("config", "devices", "drafter")[0]))
    computed_in = drafter_dtype(str(state.at("config", "drafter", "dtype")), device)
    return Source(
        path=where,
        origin=Origin(run=found.state.get("run"), step=found.step, weights="ema" if use_ema else "last"),
        weights=found.averages if use_ema else found.weights,
        shape=DrafterShape(**state.at("must_keep", "shape")),
        layer_ids=list(state.at("must_keep", "layer_ids")),
        block_size=state.at("config", "drafter", "block_size"),
        mask_token_id=state.at("config", "drafter", "mask_token_id"),
        computed_in="bfloat16" if computed_in == torch.bfloat16 else "float32",
        ema_decay=state.at("config", "optimizer").get("ema") if use_ema else None,
        target_path=target_path, target=facts, target_config=config,
    )  # fmt: skip


def _checkpoint(path: Path, say: Callable[[str], None], others: str) -> tuple[Path, checkpoint.Checkpoint]:
    if is_checkpoint(path):
        try:
            return path, checkpoint.load(path.resolve())
        except CheckpointDamaged as error:
            why = f"no such directory, and {error}" if not path.exists() else str(error)
            raise ConfigError(f"{path}: no checkpoint that can be read: {why}") from None
    root = path if path.name == "checkpoints" else path / "checkpoints"
    if not root.is_dir():
        why = "is not there" if not path.exists() else "holds no checkpoints"
        raise ConfigError(f"{path}: {why}; name a run's directory, or one of its checkpoints/step-N{others}")
    skipped: list[str] = []
    found = checkpoint.latest(root, say=skipped.append)
    if found is None:
        said = f" ({'; '.join(skipped)})" if skipped else ""
        raise ConfigError(f"{path}: no whole checkpoint in {root}{said}")
    for line in skipped:
        say(line)
    return root / f"step-{found.step}", found


@dataclass(frozen=True, slots=True)
class _Facts:
    """Of a checkpoint's trainer.json."""

    path: Path
    state: dict[str, Any]

    def at(self, *keys: str) -> Any:
        value: Any = self.state
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise ConfigError(
                    f"{self.path}: its {checkpoint.STATE} lacks {'.'.join(keys)}: was it written by an older trainer?"
                )
            value = value[key]
        return value


def _target(path: Path, source: Path, must_keep: dict[str, Any], *, given: bool) -> tuple[TargetFacts, dict[str, Any]]:
    from transformers import AutoConfig

    hint = "" if given else "; say where it is now with --target DIR"
    try:
        digests = file_digests(path)
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        architecture = (json.loads((path / "config.json").read_bytes()).get("architectures") or [""])[0]
    except Exception as error:  # whatever it makes of files that are not what it expects
        said = "is not there" if not path.exists() else " ".join(str(error).split())
        raise ConfigError(f"{source}: its target {path}: {said}{hint}") from None
    was = {key.removesuffix(" of the target"): value for key, value in must_keep.items() if " of the target" in key}
    if was and (others := sorted(changed(was, digests))):
        raise ConfigError(f"{source}: {path} is not the target it was trained with: {', '.join(others)} differ{hint}")
    text = config.get_text_config()
    facts = TargetFacts(
        architecture=architecture, layers=text.num_hidden_layers, hidden=text.hidden_size, vocabulary=text.vocab_size,
        files=digests,
    )  # fmt: skip
    return facts, text.to_dict()
