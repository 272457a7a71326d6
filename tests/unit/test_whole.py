"""A file that is replaced whole, and what of it survives a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator import whole
from orchestrator.agent import files


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths, in the order in which they were brought onto the disk."""
    found: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        found.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_what_is_durable_is_synced_before_it_has_its_name_and_its_name_afterwards(
    synced: list[str], tmp_path: Path
) -> None:
    whole.write_whole(tmp_path / "record", b"one", durable=True)
    content, folder = synced
    assert str(Path(content).parent) == folder == str(tmp_path) and content != str(tmp_path / "record")


def test_a_record_that_is_made_once_is_on_the_disk_under_its_name(synced: list[str], tmp_path: Path) -> None:
    assert files.create_json(str(tmp_path / "run.json"), {"a": 1})
    # Its content, the name that it was written under, and its own.
    assert synced[1:] == [str(tmp_path)] * 2 and names_in(tmp_path) == ["run.json"]
    assert not files.create_json(str(tmp_path / "run.json"), {"a": 2})
    assert files.read_json(str(tmp_path / "run.json")) == {"a": 1}


def test_nothing_is_synced_that_need_not_survive(synced: list[str], tmp_path: Path) -> None:
    whole.write_whole(tmp_path / "record", b"one")
    assert synced == []


def test_a_file_in_the_working_directory_can_be_durable_by_its_bare_name(
    synced: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole.write_whole("record", b"one", durable=True)
    assert synced[-1] == str(tmp_path)


def test_what_is_raised_while_writing_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    whole.write_whole(tmp_path / "record", b"old")
    with pytest.raises(ZeroDivisionError), whole.replacing(tmp_path / "record") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert (tmp_path / "record").read_bytes() == b"old" and names_in(tmp_path) == ["record"]
