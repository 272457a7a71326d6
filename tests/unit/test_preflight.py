"""What an agent says of a path that a program reads: a file, a folder, or a glob of files; and of what it may use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from orchestrator import ailments
from orchestrator.agent import cgroup
from orchestrator.agent.preflight import ASK, Input, look


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("chat.jsonl", None),
        (".", None),
        ("*.jsonl", None),
        ("**/*.jsonl", None),
        ("*.parquet", "is not there"),
        ("chat.json", "is not there; did you mean "),
    ],
)
def test_a_glob_is_there_if_anything_matches_it(tmp_path: Path, text: str, problem: str | None) -> None:
    (tmp_path / "chat.jsonl").write_text("{}\n")
    path = f"{tmp_path}/{text}"
    said = look(Input(key="data.paths[0]", kind="files", text=path, path=path, private=False))
    assert said is None if problem is None else said is not None and said.startswith(problem)


def test_the_trainer_is_asked_about_globs_and_folders_by_a_python_without_packages(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("{}\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half.parquet").write_bytes(b"PAR1 and no end")
    files = {name: f"{tmp_path}/{name}" for name in ("*.jsonl", "empty", "half.parquet", "chat.jsonl")}
    asked = {"model": {}, "files": files, "wanted": {"data_kind": "conversations"}}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", ASK, str(Path(trainer.__file__).parents[1])],
        input=json.dumps(asked), capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = dict(json.loads(done.stdout))
    assert set(found) == {"empty", "half.parquet"}
    assert "is a directory without any" in found["empty"] and "is cut off" in found["half.parquet"]


def test_a_limit_holds_in_whichever_cgroup_around_a_process_it_is_set(tmp_path: Path) -> None:
    container = tmp_path / "lxc"
    inner = container / "ns" / "init.scope"
    inner.mkdir(parents=True)
    for folder, most, now in ((container, "1000", "700"), (container / "ns", "max", "650"), (inner, "9000", "3")):
        (folder / "cgroup.procs").write_text("")
        (folder / "pids.max").write_text(f"{most}\n")
        (folder / "pids.current").write_text(f"{now}\n")
    assert cgroup.limits(str(inner), "pids.max", "pids.current") == [(9000, 3), (1000, 700)]
    assert cgroup.limits(str(inner), "memory.max", "memory.current") == []
    assert cgroup.limits(None, "pids.max", "pids.current") == []
    few = ailments.processes(1000, 700)
    assert few is not None and "only 300 more processes and threads are allowed" in few.what
    assert ailments.processes(9000, 3) is None
    little = ailments.memory(1 << 30)
    assert little is not None and "only 1.0 GiB of memory are allowed there" in little.what
