"""A drafter's directory as servers load it, read back once everything that can be checked beforehand has been.

One with a contract is an export of this trainer (`load`), and is held to it. Others, of z-lab's form, say what they are
in config.json alone (`read`); what that leaves open is what every server takes for granted of this form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.config import ConfigError
from trainer.export import contract, formats
from trainer.export.contract import Contract, FileFacts, Layout
from trainer.export.package import CONFIG, WEIGHTS
from trainer.export.source import DTYPES, DtypeName
from trainer.files import describe
from trainer.inputs import weights_problem
from trainer.kept import changed
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.target import Target

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A drafter as servers load it, and how it is to be used."""

    path: Path
    config: dict[str, Any]
    layout: Layout
    shape: DrafterShape
    contract: Contract | None
    """None: not an export of this trainer."""

    @property
    def dtype(self) -> DtypeName:
        """What it is said to be kept in, and so to compute in."""
        name = self.contract.dtype if self.contract else self.config.get("dtype", self.config.get("torch_dtype"))
        return "float32" if name == "float32" else "bfloat16"

    def __str__(self) -> str:
        return f"exported from {self.contract.origin}, {self.dtype}" if self.contract else f"z-lab's form, {self.dtype}"

    def files(self) -> list[Path]:
        """Of weights: one, or the shards that an index lists."""
        index = self.path / f"{WEIGHTS}.index.json"
        if (self.path / WEIGHTS).exists():
            return [self.path / WEIGHTS]
        return [self.path / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]

    def tensors(self) -> dict[str, Tensor]:
        """On the CPU, in the type that they are kept in, by the names that servers load. Raises `ConfigError` unless
        they are exactly a drafter's of this shape."""
        try:
            found = {name: tensor for file in self.files() for name, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.path}: weights cannot be read: {' '.join(str(error).split())}") from None
        with torch.device("meta"):
            expected = Drafter(self.shape).state_dict()
        both = [(name, found[name], expected[name]) for name in found.keys() & expected.keys()]
        for what, names in (
            ("lacks", expected.keys() - found.keys()),
            ("holds what this trainer's drafter does not have:", found.keys() - expected.keys()),
            ("has in another shape than its config.json says:", {n for n, is_, to in both if is_.shape != to.shape}),
            ("has neither in 16 nor in 32 bits:", {n for n, is_, _ in both if is_.dtype not in FLOATS}),
        ):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise ConfigError(f"{self.path}: {WEIGHTS} {what} {', '.join(sorted(names)[:3])}{more}")
        return found


def load(directory: Path, target: Target, *, say: Callable[[str], None]) -> tuple[Drafter, Contract]:
    """See `trainer.export.load`."""
    found = contract.read(directory)
    return drafter_of(_of_export(directory, found), target, say=say), found


def drafter_of(found: Published, target: Target, *, say: Callable[[str], None]) -> Drafter:
    """Frozen, on the target's device, in the type that it is kept in. Raises `ConfigError` for another target than its
    own, or one of which other layers are captured."""
    see_that_it_is_the_target(found, target)
    if target.layer_ids != found.layout.layer_ids:
        raise ConfigError(
            f"{found.path}: reads target layers {found.layout.layer_ids}, and {target.layer_ids} are captured; load the"
            " target with target.layer_ids as the export has them"
        )
    drafter = Drafter(found.shape).to(DTYPES[found.dtype])
    drafter.load_state_dict(found.tensors())
    if found.contract is not None and found.contract.torch != torch.__version__:
        say(f"{found.path}: exported by torch {found.contract.torch}, and this is {torch.__version__}")
    if found.contract is not None and found.contract.gate is None:
        say(f"{found.path}: was exported with --no-gate: nobody has seen that it decodes as it was trained")
    return drafter.requires_grad_(False).eval().to(target.device)


def is_published(path: Path) -> bool:
    """Whether `path` is meant as a drafter's directory as servers load it, whole or not."""
    return any((path / name).is_file() for name in (contract.NAME, CONFIG))


def read(directory: Path) -> Published:
    """An export, held to its contract, or a drafter in z-lab's form. Raises `ConfigError`, in one line, for what cannot
    be read, or lays its blocks out in another way than this trainer's drafter does."""
    if (directory / contract.NAME).exists():
        return _of_export(directory, contract.read(directory))
    try:
        said = weights_problem(directory, (WEIGHTS,))
    except OSError as error:
        said = f"{error.filename or directory}: {error.strerror or error}"
    if said:
        raise ConfigError(said)
    config = _config(directory)
    if config.get("architectures") != ["DFlashDraftModel"] or "speculators_model_type" in config:
        raise ConfigError(
            f"{directory}: {CONFIG} is of {config.get('architectures')}, and has no {contract.NAME}; only a drafter in"
            " z-lab's form (DFlashDraftModel), or an export by python -m trainer export, can be read"
        )
    try:
        layout = formats.layout_in(config)
        shape = formats.shape_in(config, layout)
        other = formats.not_here(config)
    except KeyError as error:
        raise ConfigError(f"{directory}: {CONFIG} lacks {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{directory}: {CONFIG} has a value of another kind: {said}") from None
    if other := other or next(iter(contract.differences(layout, own_layout(layout, shape.head_dim))), None):
        raise ConfigError(f"{directory}: another drafter than this trainer has: {other}")
    return Published(path=directory, config=config, layout=layout, shape=shape, contract=None)


def see_that_it_is_the_target(found: Published, target: Target) -> None:
    """Raises `ConfigError` for another one than the drafter was trained for, as far as it tells."""
    text = target.model.config.get_text_config()
    here = {"layers": text.num_hidden_layers, "hidden": text.hidden_size, "vocabulary": text.vocab_size}
    if found.contract is not None:
        was = found.contract.target.model_dump(include=set(here))
    else:
        said = {"layers": found.config.get("num_target_layers"), "vocabulary": found.config.get("vocab_size")}
        was = {"hidden": found.shape.hidden, **{key: value for key, value in said.items() if value is not None}}
    if others := contract.differences({key: here[key] for key in was}, was):
        raise ConfigError(f"{found.path}: was trained for another target: {others[0]}")
    if (mask := found.layout.mask_token_id) >= text.vocab_size:
        raise ConfigError(f"{found.path}: its mask token {mask} is none of the target's {text.vocab_size:,}")
    if found.contract is not None and (files := sorted(changed(found.contract.target.files, target.files))):
        raise ConfigError(f"{found.path}: was trained for another target: its {', '.join(files)} are not this one's")


def own_layout(layout: Layout, head_dim: int) -> Layout:
    """What this trainer's drafter does, with those figures of `layout` that any drafter may have of its own."""
    return Layout(
        block_size=layout.block_size, mask_token_id=layout.mask_token_id, layer_ids=layout.layer_ids,
        layer_id_base=layout.layer_id_base,
        rope=contract.Rope(theta=layout.rope.theta, dims=head_dim, style="halves"),
    )  # fmt: skip


def _of_export(directory: Path, found: Contract) -> Published:
    _see_that_files_are_whole(directory, found)
    config = _config(directory)
    if contradictions := contract.differences(formats.said_in(config), formats.meant_by(found.layout)):
        raise ConfigError(f"{directory}: {CONFIG} and {contract.NAME} contradict each other: {contradictions[0]}")
    try:
        shape = formats.shape_in(config, found.layout)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{directory}: {CONFIG} lacks {error}") from None
    except ValueError as error:
        raise ConfigError(f"{directory}: {CONFIG}: {error}") from None
    if others := contract.differences(found.layout, own_layout(found.layout, shape.head_dim)):
        raise ConfigError(f"{directory}: another layout than this trainer's drafter has: {others[0]}")
    return Published(path=directory, config=config, layout=found.layout, shape=shape, contract=found)


def _config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / CONFIG).read_bytes())
    except OSError as error:
        raise ConfigError(f"{directory / CONFIG}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{directory / CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{directory / CONFIG} holds no object")
    return config


def _see_that_files_are_whole(directory: Path, found: Contract) -> None:
    for name in (CONFIG, WEIGHTS):
        if name not in found.files:
            raise ConfigError(f"{directory}: {contract.NAME} does not know {name}; export it anew")
        expected = found.files[name]
        try:
            here = FileFacts(**describe(directory / name))
        except OSError as error:
            raise ConfigError(f"{directory / name}: {error.strerror or error}; bring it again") from None
        if here.bytes != expected.bytes:
            raise ConfigError(f"{directory / name}: has {here.bytes:,} bytes of {expected.bytes:,}; bring it again")
        if here != expected:
            raise ConfigError(f"{directory / name}: has changed since it was exported (sha256 differs); bring it again")
