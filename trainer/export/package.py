"""An export as a value, and how it gets onto a disk: aside, synced, and renamed only when it is to be believed.

`package` is all that a directory will hold; `place` is where it goes. What is there already is replaced only if it is
an export of this trainer, and only once the new one is whole: until then it stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from trainer.config import ConfigError
from trainer.export import contract, formats
from trainer.export.contract import Contract, FileFacts, Format, Gate, Layout
from trainer.export.source import DTYPES, DtypeName, Source
from trainer.files import sync_folder, write_synced

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
FILES = (CONFIG, WEIGHTS, contract.NAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What an export holds. The same source gives the same bytes."""

    source: Source
    format: Format
    dtype: DtypeName
    layout: Layout
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, directory: Path, *, gate: Gate | None) -> Contract:
        """Raises `ConfigError` where there is no room, or no right to write."""
        files = {
            CONFIG: json.dumps(self.config, indent=1).encode() + b"\n",
            WEIGHTS: save(self.tensors, metadata={"format": "pt"}),
        }
        made = Contract(
            format=self.format, layout=self.layout, dtype=self.dtype, origin=self.source.origin,
            target=self.source.target, torch=torch.__version__, gate=gate,
            files={name: _write(directory / name, data) for name, data in files.items()},
        )  # fmt: skip
        write_contract(directory, made)
        return made


def package(source: Source, *, format: Format, dtype: DtypeName, target_name: str) -> Package:
    """Raises `ConfigError` for what the format has no word for."""
    layout = formats.layout_of(source, format)
    return Package(
        source=source, format=format, dtype=dtype, layout=layout,
        config=formats.written(source, layout, format, dtype=dtype, target_name=target_name),
        tensors={name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in source.weights.items()},
    )  # fmt: skip


def write_contract(directory: Path, made: Contract) -> None:
    _write(directory / contract.NAME, made.as_bytes())


@contextlib.contextmanager
def place(to: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `to` when all has gone well, and is gone when it has not. Raises
    `ConfigError` where nothing can be made, where something else than an export is, and while another export is under
    way to the same place."""
    _see_that_it_may_be_replaced(to)
    aside, replaced = (to.parent / f".{to.name}.{what}" for what in ("partial", "replaced"))
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir(exist_ok=True)
        lock = os.open(aside, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--to {to}: {aside} cannot be made: {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"--to {to}: another export is being made there right now ({aside}); wait for it") from None
    try:
        for left in aside.iterdir():  # of an export that was killed
            left.unlink()
        yield aside
        with _told(to):
            sync_folder(aside)
            shutil.rmtree(replaced, ignore_errors=True)
            if to.exists():
                to.rename(replaced)
            aside.rename(to)
            shutil.rmtree(replaced, ignore_errors=True)
            sync_folder(to.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _see_that_it_may_be_replaced(to: Path) -> None:
    try:
        others = sorted(entry.name for entry in to.iterdir() if entry.name not in FILES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--to {to}: {error.strerror or error}") from None
    if not any(to.iterdir()):
        return
    if others:
        listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ConfigError(f"--to {to}: holds what is no export's ({listed}); nothing there is removed, name another")
    try:
        json.loads((to / contract.NAME).read_bytes())["made_by"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"--to {to}: is no export of this trainer, and is not replaced; name another") from None


def _write(path: Path, data: bytes) -> FileFacts:
    with _told(path):
        return FileFacts(**write_synced(path, [data]))


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}; no export is made") from None
