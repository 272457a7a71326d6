"""A drafter from a directory, with the target that it was trained for: a checkpoint, a run with checkpoints, or an export.

What says which it is are the files in it. The target is the one that the directory names, or another copy of it; it has
to have the layers and the vocabulary that the drafter needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer import checkpoint
from trainer.checkpoint import AVERAGES, MARKER, CheckpointDamaged
from trainer.config import Config, ConfigError, TargetConfig, expand_path
from trainer.decode.engine import BlockDrafter
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.target import Target, drafter_dtype, load_target


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    target: Target
    block_drafter: BlockDrafter
    source: str
    """What was loaded, for a person."""


def load(path: Path, *, target: str | None, device: torch.device, dtype: str | None = None, say: Callable[[str], None]
         ) -> Loaded:  # fmt: skip
    """Raises `ConfigError`, in one line, for what is no drafter, or does not fit its target. `target` is where that is,
    if not where the drafter was trained; `dtype` that of the arithmetic, if not the one it was trained in."""
    step = _step(path, say)
    if step is not None:
        return _of_checkpoint(step, target, device, dtype)
    raise ConfigError(
        f"{path} is no drafter: it holds no checkpoint ({MARKER}), no run's checkpoints (step-N), and no export"
        " (config.json with model.safetensors)"
    )


def default_device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def check_device(name: str | None) -> torch.device:
    """Raises `ConfigError` for one that is not here."""
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device: {name} is no device; cpu or cuda:N is one") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: {name} is not supported; cpu or cuda:N is")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"--device: {name} is not here; torch sees {torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_device(device)
    return device


def _step(path: Path, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that is meant."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; a checkpoint, a run or an export is one")
    if (path / MARKER).is_file():
        return path
    for root in (path / "checkpoints", path):
        for step in reversed(checkpoint.steps_on_disk(root)):
            found = root / f"step-{step}"
            if (found / MARKER).is_file():
                return found
            say(f"checkpoint {found.name} skipped: incomplete, {MARKER} is missing")
    return None


def _of_checkpoint(path: Path, target_path: str | None, device: torch.device, dtype: str | None) -> Loaded:
    path = path.resolve()
    try:
        found = checkpoint.load(path)
    except CheckpointDamaged as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    must_keep = found.state["must_keep"]
    config = Config.model_validate(found.state["config"])
    shape = DrafterShape(**must_keep["shape"])
    target = target_for(
        config.target.model_copy(update={"layer_ids": must_keep["layer_ids"]}), target_path, device=device, dtype=dtype,
        hidden=shape.hidden, mask_token_id=config.drafter.mask_token_id,
    )  # fmt: skip
    weights = found.averages or found.weights
    source = f"{path} ({AVERAGES if found.averages else checkpoint.WEIGHTS}, step {found.step})"
    return Loaded(
        target=target, source=source,
        block_drafter=block_drafter(
            shape, weights, target, dtype=drafter_dtype(dtype or config.drafter.dtype, device),
            block_size=config.drafter.block_size, mask_token_id=config.drafter.mask_token_id, source=source,
        ),
    )  # fmt: skip


def target_for(config: TargetConfig, path: str | None, *, device: torch.device, dtype: str | None, hidden: int,
               mask_token_id: int) -> Target:  # fmt: skip
    """The target that `config` names, or the copy of it at `path`. Raises `ConfigError` where it does not fit."""
    update = {"path": path or config.path, "dtype": dtype or config.dtype}
    config = config.model_copy(update=update)
    folder = expand_path(config.path, key="--target" if path else "target.path")
    if not (folder / "config.json").is_file():
        said = "there is no model there" if path else "where the drafter was trained for it; --target PATH names a copy"
        raise ConfigError(f"the target is not at {folder}, {said}")
    target = load_target(config, device)
    vocabulary, size = target.ends.embedding_VH.shape
    if size != hidden or mask_token_id >= vocabulary:
        raise ConfigError(
            f"{folder} is not this drafter's target: its hidden size is {size} and its vocabulary {vocabulary}, the"
            f" drafter's hidden size is {hidden} and its mask token {mask_token_id}"
        )
    return target


def block_drafter(shape: DrafterShape, weights: dict[str, torch.Tensor], target: Target, *, dtype: torch.dtype,
                  block_size: int, mask_token_id: int, source: str) -> BlockDrafter:  # fmt: skip
    drafter = Drafter(shape)
    try:
        drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    except RuntimeError as error:
        raise ConfigError(f"{source}: its weights do not fit its shape: {' '.join(str(error).split())}") from None
    drafter.requires_grad_(False).eval().to(target.device, dtype)
    return BlockDrafter(
        drafter=drafter, ends=target.ends.to(target.device, dtype), block_size=block_size, mask_token_id=mask_token_id
    )  # fmt: skip
