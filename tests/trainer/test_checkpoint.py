"""A checkpoint is whole or it is skipped by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import (
    AVERAGES,
    MARKER,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    Checkpoint,
    latest,
    prune,
    save,
    steps_on_disk,
)


def a_checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step=step, weights={"fc.weight": torch.full((3, 2), float(step))},
        optimizer={"exp_avg.fc.weight": torch.ones(3, 2)}, averages={"fc.weight": torch.zeros(3, 2)},
        state={"cursor": {"epoch": 1, "position": step}},
    )  # fmt: skip


def found(root: Path) -> tuple[int | None, list[str]]:
    said: list[str] = []
    checkpoint = latest(root, say=said.append)
    return (checkpoint.step if checkpoint else None), said


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", a_checkpoint(7))
    checkpoint = latest(tmp_path / "checkpoints", say=pytest.fail)
    assert checkpoint is not None
    assert torch.equal(checkpoint.weights["fc.weight"], torch.full((3, 2), 7.0))
    assert torch.equal(checkpoint.optimizer["exp_avg.fc.weight"], torch.ones(3, 2))
    assert checkpoint.state["cursor"] == {"epoch": 1, "position": 7}


def test_a_save_hashes_what_it_writes_without_reading_it_again(tmp_path: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    large = Checkpoint(step=1, weights={"w": torch.rand(1 << 20)}, optimizer={"m": torch.rand(1 << 20)}, state={})
    save(tmp_path, large)
    assert bytes_read() - before < 1 << 20
    assert found(tmp_path) == (1, [])


def test_all_of_it_is_synced_before_it_is_renamed_and_then_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:  # fmt: skip
    root, done = tmp_path / "checkpoints", []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append((path.relative_to(tmp_path), os.fstat(descriptor).st_size if path.is_file() else None))
        fsync(descriptor)

    def renamed(old: Any, new: Any, **options: Any) -> None:
        done.append((Path(new).relative_to(tmp_path), "renamed"))
        rename(old, new, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    path = save(root, a_checkpoint(3))
    aside = Path("checkpoints/.step-3.partial")
    sizes = {(aside / file.name, file.stat().st_size) for file in path.iterdir()}
    at = done.index((Path("checkpoints/step-3"), "renamed"))
    assert sizes | {(Path(), None)} == set(done[: at - 1]) and len(sizes) >= 4
    assert done[at - 1] == (aside, None) and done[at + 1 :] == [(Path("checkpoints"), None)]


def test_latest_is_by_number_not_by_text_or_by_time(tmp_path: Path) -> None:
    for step in (1000, 90, 200):
        save(tmp_path, a_checkpoint(step))
    os.utime(tmp_path / "step-90")
    assert found(tmp_path) == (1000, [])


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, AVERAGES, STATE])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_file_skips_the_checkpoint_by_name_and_says_why(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, a_checkpoint(900))
    path = save(tmp_path, a_checkpoint(1000)) / name
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.unlink()
    step, said = found(tmp_path)
    assert step == 900
    assert len(said) == 1 and said[0].startswith("checkpoint step-1000 skipped: ") and name in said[0]


def test_a_marker_that_does_not_know_the_averages_that_are_there_loses_them_for_nobody(tmp_path: Path) -> None:
    marker = save(tmp_path, a_checkpoint(7)) / MARKER
    marker.write_text(marker.read_text().replace(AVERAGES, AVERAGES.replace("a", "b")))
    step, (said,) = found(tmp_path)
    assert step is None and said == f"checkpoint step-7 skipped: {MARKER} does not know {AVERAGES}, which is there"


def test_a_checkpoint_without_its_marker_or_left_aside_is_skipped_by_name(tmp_path: Path) -> None:
    save(tmp_path, a_checkpoint(5))
    (save(tmp_path, a_checkpoint(6)) / MARKER).unlink()
    (tmp_path / ".step-7.partial").mkdir()
    step, said = found(tmp_path)
    assert step == 5
    assert said == [
        "checkpoint .step-7.partial skipped: it was never completed",
        f"checkpoint step-6 skipped: incomplete, {MARKER} is missing",
    ]


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_reached_again(tmp_path: Path) -> None:
    (save(tmp_path, a_checkpoint(6)) / MARKER).unlink()
    save(tmp_path, a_checkpoint(6))
    assert found(tmp_path) == (6, [
        "checkpoint .step-6.replaced skipped: it was never completed",
    ])  # fmt: skip
    prune(tmp_path, keep=1, step=6)
    assert found(tmp_path) == (6, [])


def test_a_failing_save_leaves_the_one_before_and_no_half_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, a_checkpoint(1))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, a_checkpoint(2))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-1"]
    assert found(tmp_path) == (1, [])


def test_only_the_latest_few_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 100, 11):
        save(tmp_path, a_checkpoint(step))
    prune(tmp_path, keep=2, step=100)
    assert steps_on_disk(tmp_path) == [11, 100]


def test_an_empty_or_missing_directory_has_none(tmp_path: Path) -> None:
    assert found(tmp_path) == found(tmp_path / "none") == (None, [])
