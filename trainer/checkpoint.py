"""Checkpoints that are whole or not there: written aside, synced, marked complete, renamed; and the way back.

`checkpoints/step-N/` holds `drafter.safetensors` (the names that servers load), `optimizer.safetensors`, with
`optimizer.ema` the weights' moving average `ema.safetensors` (the same names; the one to serve),
`trainer.json` (step, data cursor, seed, shape) and `COMPLETE.json` with the size and hash of each. On resume the
numerically latest one that proves whole is taken; any other is named and skipped. The RNG needs no state: every draw
is a function of (seed, step, row).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer import inputs
from trainer.files import describe, sync_folder, write_synced, write_whole

MARKER = inputs.MARKER
WEIGHTS = "drafter.safetensors"
OPTIMIZER = "optimizer.safetensors"
AVERAGES = "ema.safetensors"
STATE = "trainer.json"
_NAME = re.compile(r"step-([0-9]+)")
_ASIDE = re.compile(r"\.step-[0-9]+\.(partial|replaced|removed)")
RUN = "run.json"


class CheckpointDamaged(Exception):
    """Its text says what is wrong with the directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a run needs to go on as if it had never ended. `optimizer` maps `exp_avg.NAME` and `exp_avg_sq.NAME`."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    averages: dict[str, Tensor] = field(default_factory=dict)
    """By the weights' names; empty where none are kept."""
    state: dict[str, Any]


def save(root: Path, checkpoint: Checkpoint) -> Path:
    """Write `root/step-N`. Raises `OSError`, and then leaves nothing that looks like a checkpoint."""
    run = checkpoint.state.get("run")
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        sync_folder(root.parent)
    if run is not None and run_of_root(root) != run:
        write_whole(root / RUN, _as_json({"run": run}), durable=True, locked=True)
    path = root / f"step-{checkpoint.step}"
    aside = root / f".{path.name}.partial"
    _remove(aside)
    aside.mkdir()
    try:
        files = {
            WEIGHTS: write_synced(aside / WEIGHTS, _as_safetensors(checkpoint.weights)),
            OPTIMIZER: write_synced(aside / OPTIMIZER, _as_safetensors(checkpoint.optimizer)),
            STATE: write_synced(aside / STATE, [_as_json({"step": checkpoint.step, **checkpoint.state})]),
        }
        if checkpoint.averages:
            files[AVERAGES] = write_synced(aside / AVERAGES, _as_safetensors(checkpoint.averages))
        write_synced(aside / MARKER, [_as_json({"step": checkpoint.step, "files": files})])
        sync_folder(aside)
        # Of this run only a damaged one can be there: after a whole checkpoint no step before it is trained again.
        if path.exists():
            other = _run_of(path)
            mine = other in (None, run)
            replaced = root / (f".{path.name}.replaced" if mine else f"{path.name}.of-{other}")
            _remove(replaced)
            path.rename(replaced)
        aside.rename(path)
    except BaseException:
        _remove(aside)
        raise
    sync_folder(root)
    return path


def steps_on_disk(root: Path) -> list[int]:
    """Numbers of all `step-N` directories, whole or not, rising."""
    try:
        return sorted(int(match.group(1)) for entry in root.iterdir() if (match := _NAME.fullmatch(entry.name)))
    except FileNotFoundError:
        return []


def run_of_root(root: Path) -> str | None:
    """Whose checkpoints are there: what the first save wrote down; None where nothing was, or cannot be read."""
    return _field(root / RUN, "run")


def latest(root: Path, *, run: str | None = None, say: Callable[[str], None]) -> Checkpoint | None:
    """The numerically latest complete checkpoint of `run`, or of any; each one that is skipped on the way is named
    through `say`."""
    if root.is_dir():
        for left in sorted(root.iterdir()):
            if (aside := _ASIDE.fullmatch(left.name)) and aside[1] != "removed":
                say(f"checkpoint {left.name} skipped: it was never completed")
    for step in reversed(steps_on_disk(root)):
        try:
            found = load(root / f"step-{step}")
        except CheckpointDamaged as error:
            say(f"checkpoint step-{step} skipped: {error}")
            continue
        if run is not None and (other := found.state.get("run", run)) != run:
            say(f"checkpoint step-{step} skipped: it is of another run ({other}; this one is {run})")
            continue
        return found
    return None


def load(path: Path) -> Checkpoint:
    """Raises `CheckpointDamaged` unless every file has the size and hash that the marker gives."""
    try:
        files = json.loads((path / MARKER).read_bytes())["files"]
        averaged = [AVERAGES] if AVERAGES in files else []
        expected = {name: dict(files[name]) for name in (WEIGHTS, OPTIMIZER, STATE, *averaged)}
        if not averaged and (path / AVERAGES).exists():
            raise CheckpointDamaged(f"{MARKER} does not know {AVERAGES}, which is there")
    except FileNotFoundError:
        raise CheckpointDamaged(f"incomplete, {MARKER} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{MARKER} cannot be read: {error}") from None
    for name, facts in expected.items():
        try:
            found = describe(path / name)
        except OSError as error:
            raise CheckpointDamaged(f"{name} is missing or unreadable: {error}") from None
        if found["bytes"] != facts.get("bytes"):
            raise CheckpointDamaged(f"{name} has {found['bytes']} bytes of {facts.get('bytes')}")
        if found != facts:
            raise CheckpointDamaged(f"{name} has changed since it was written (sha256 differs)")
    state = json.loads((path / STATE).read_bytes())
    if path.name != f"step-{state['step']}":
        raise CheckpointDamaged(f"it was written as step-{state['step']}")
    return Checkpoint(
        step=state["step"], weights=load_file(path / WEIGHTS), optimizer=load_file(path / OPTIMIZER),
        averages=load_file(path / AVERAGES) if averaged else {}, state=state,
    )  # fmt: skip


def prune(root: Path, *, keep: int, step: int, run: str | None = None) -> list[str]:
    """After a save at `step`: remove what an interrupted or replaced one left, and of this run's checkpoints up to it
    all but the latest `keep`. Returns what could not be removed, and why."""
    failed = []
    here = [number for number in steps_on_disk(root) if number <= step]
    mine = [number for number in here if _run_of(root / f"step-{number}") in (None, run)]
    for number in mine[:-keep]:
        path = root / f"step-{number}"
        try:
            # Half removed it would look like a damaged one.
            path.rename(root / f".{path.name}.removed")
        except OSError as error:
            failed.append(f"{path.name} is not removed: {error.strerror}")
    for entry in root.iterdir():
        if _ASIDE.fullmatch(entry.name):
            try:
                _remove(entry)
            except OSError as error:
                failed.append(f"{entry.name} is not removed: {error.strerror}")
    return failed


def _run_of(path: Path) -> str | None:
    """None for a damaged checkpoint."""
    return _field(path / STATE, "run")


def _field(path: Path, key: str) -> str | None:
    try:
        return str(json.loads(path.read_bytes())[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _as_json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, indent=1).encode() + b"\n"


def _as_safetensors(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file of float32 tensors; one tensor at a time is brought to the CPU."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        assert tensor.dtype == torch.float32
        yield memoryview(tensor.detach().cpu().contiguous().flatten().numpy()).cast("B")


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
