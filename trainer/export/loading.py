"""An export back as this trainer's own drafter, once everything that can be checked beforehand has been."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer.checkpoint import describe
from trainer.config import ConfigError
from trainer.export import contract, formats
from trainer.export.contract import Contract, FileFacts, Layout
from trainer.export.package import CONFIG, WEIGHTS
from trainer.export.source import DTYPES
from trainer.kept import changed
from trainer.model.drafter import Drafter
from trainer.model.target import Target


def load(directory: Path, target: Target, *, say: Callable[[str], None]) -> tuple[Drafter, Contract]:
    """See `trainer.export.load`."""
    found = contract.read(directory)
    _see_that_files_are_whole(directory, found)
    config = json.loads((directory / CONFIG).read_bytes())
    if contradictions := contract.differences(formats.said_in(config), formats.meant_by(found.layout)):
        raise ConfigError(f"{directory}: {CONFIG} and {contract.NAME} contradict each other: {contradictions[0]}")
    try:
        shape = formats.shape_in(config, found.layout)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{directory}: {CONFIG} lacks {error}") from None
    if others := contract.differences(found.layout, own_layout(found.layout, shape.head_dim)):
        raise ConfigError(f"{directory}: another layout than this trainer's drafter has: {others[0]}")
    _see_that_it_is_the_target(directory, found, target)
    drafter = Drafter(shape).to(DTYPES[found.dtype])
    try:
        drafter.load_state_dict(load_file(directory / WEIGHTS))
    except RuntimeError as error:
        raise ConfigError(f"{directory}: {WEIGHTS} has other tensors: {' '.join(str(error).split())}") from None
    if found.torch != torch.__version__:
        say(f"{directory}: exported by torch {found.torch}, and this is {torch.__version__}")
    if found.gate is None:
        say(f"{directory}: was exported with --no-gate: nobody has seen that it decodes as it was trained")
    return drafter.requires_grad_(False).eval().to(target.device), found


def own_layout(layout: Layout, head_dim: int) -> Layout:
    """What this trainer's drafter does, with those figures of `layout` that any drafter may have of its own."""
    return Layout(
        block_size=layout.block_size, mask_token_id=layout.mask_token_id, layer_ids=layout.layer_ids,
        layer_id_base=layout.layer_id_base,
        rope=contract.Rope(theta=layout.rope.theta, dims=head_dim, style="halves"),
    )  # fmt: skip


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


def _see_that_it_is_the_target(directory: Path, found: Contract, target: Target) -> None:
    text = target.model.config.get_text_config()
    here = {"layers": text.num_hidden_layers, "hidden": text.hidden_size, "vocabulary": text.vocab_size}
    was = found.target.model_dump(include=set(here))
    if said := contract.differences(here, was):
        raise ConfigError(f"{directory}: was trained for another target: {said[0]}")
    if others := sorted(changed(found.target.files, target.files)):
        raise ConfigError(f"{directory}: was trained for another target: its {', '.join(others)} are not this one's")
    if target.layer_ids != found.layout.layer_ids:
        raise ConfigError(
            f"{directory}: reads target layers {found.layout.layer_ids}, and {target.layer_ids} are captured; load the"
            " target with target.layer_ids as the export has them"
        )
