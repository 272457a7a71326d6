"""docs/run-directory.md: no file and no event is missing on it, and its example is one that specctl reads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from orchestrator.agent import events
from orchestrator.agent.boot import FOLDERS
from orchestrator.model import RunPaths

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")


def first_column(heading: str) -> set[str]:
    rows = re.findall(r"^\| (.*?) \|", PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_file_of_a_run_directory_is_there() -> None:
    paths = RunPaths(root="/r", run_id="<run_id>")
    names = {getattr(paths, name) for name, kind in vars(RunPaths).items() if isinstance(kind, property)}
    names |= {paths.log(1), paths.index(1)}
    told = {name.removesuffix("/") for name in first_column("Its files")}
    assert {name.removeprefix("/r/") for name in names} - told == set()


def test_every_event_that_is_written_is_there() -> None:
    written = set()
    for path in [*(ROOT / "orchestrator/agent").glob("*.py"), *(ROOT / "trainer").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        written |= set(re.findall(r"""\bevent\(\s*"(\w+)\"""", text)) | set(re.findall(r'"event": "(\w+)"', text))
    assert written > {"started", "ended", "checkpoint"}
    assert written - first_column("Events") == set()


def test_every_folder_of_the_workdir_is_there() -> None:
    assert {f"{name}/" for name in FOLDERS if name} - first_column("The workdir around it") == set()


def test_the_example_writes_an_event_that_is_read(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    environ = {"SPECCTL_RUN_DIR": str(tmp_path), "SPECCTL_ATTEMPT": "1", "SPECCTL_NONCE": "abc"}
    subprocess.run([sys.executable, "-c", example], env=environ, check=True)
    [line] = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    read = events.read(line, "abc", chars=100)
    assert read is not None and (read["event"], read["fields"]["step"]) == ("checkpoint", 100)
    assert events.read(line, "another", chars=100) is None
