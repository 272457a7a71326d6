"""What is shipped: the project as git sees it, or nearly all of a plain folder; the same content, the same name."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from orchestrator.agent import put
from orchestrator.bundle import REPORT, collect
from orchestrator.errors import BundleError
from orchestrator.manifest import bundle_hash


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


def project(names: dict[str, str], root: Path) -> Path:
    for name, content in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def shipped(root: Path) -> set[str]:
    return {name.removeprefix("project/") for name in collect(root).files if name.startswith("project/")}


def unpack(root: Path, to: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(b"".join(collect(root).tar())), mode="r|") as tar:
        tar.extractall(to, filter="fully_trusted")
    return to


def test_in_git_tracked_and_untracked_files_travel_and_ignored_ones_do_not(tmp_path: Path) -> None:
    names = {"a.py": "1", "gone.py": "2", ".gitignore": "*.bin\n", "big.bin": "x", "sub/new file.py": "3"}
    root = project(names, tmp_path)
    git(root, "init", "-q")
    git(root, "add", "a.py", "gone.py", ".gitignore")
    git(root, "commit", "-qm", "first")
    (root / "gone.py").unlink()
    (root / "a.py").write_text("changed")
    assert shipped(root) == {"a.py", ".gitignore", "sub/new file.py"}
    bundle = collect(root)
    assert bundle.commit and len(bundle.commit) == 40
    assert bundle.diff and "+changed" in bundle.diff and "gone.py" in bundle.diff


def test_a_submodules_files_travel(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for root in (inner, outer):
        project({f"{root.name}.py": "1"}, root)
        git(root, "init", "-q")
        git(root, "add", ".")
        git(root, "commit", "-qm", "first")
    git(outer, "submodule", "add", "-q", str(inner), "lib")
    assert {"outer.py", "lib/inner.py"} <= shipped(outer)


def test_outside_git_all_but_the_known_ballast_travels(tmp_path: Path) -> None:
    root = project({"a.py": "1", ".venv/lib/x.py": "2", "pkg/__pycache__/a.pyc": "3", "pkg/b.py": "4"}, tmp_path)
    assert shipped(root) == {"a.py", "pkg/b.py"}
    assert collect(root).commit is None


def test_what_the_trainer_wrote_in_the_project_is_not_shipped_with_it(tmp_path: Path) -> None:
    names = {"c.yaml": "1", "runs/a/trainer.lock": "", "runs/a/metrics.jsonl": "", "runs/a/checkpoints/step-1/x": "",
             "runs/token-cache/1/tokens.i32": "", "runs/compile-cache/y": "", "runs/notes.md": "2"}  # fmt: skip
    assert shipped(project(names, tmp_path)) == {"c.yaml", "runs/notes.md"}


@pytest.mark.parametrize("in_git", [True, False])
def test_a_report_that_was_written_into_the_project_is_not_shipped_with_it(tmp_path: Path, in_git: bool) -> None:
    root = project({"a.py": "1", "page.html": "<p>", "report.html": f"<!doctype html>\n{REPORT}\n"}, tmp_path)
    if in_git:
        git(root, "init", "-q")
    (root / "nowhere.html").symlink_to("missing")
    assert shipped(root) == {"a.py", "page.html", "nowhere.html"}


def test_a_workdir_inside_the_project_is_not_shipped_with_it(tmp_path: Path) -> None:
    root = project({"a.py": "1", "w/runs/x/a.py": "2", "w2/b.py": "3"}, tmp_path)
    found = collect(root, without=[root / "w", tmp_path.parent / "elsewhere"]).files
    assert {name for name in found if name.startswith("project/")} == {"project/a.py", "project/w2/b.py"}


def test_the_hash_is_of_paths_contents_and_modes_and_of_nothing_else(tmp_path: Path) -> None:
    one = project({"a.py": "1", "b.py": "2"}, tmp_path / "one")
    two = project({"b.py": "2", "a.py": "1"}, tmp_path / "two")
    os.utime(two / "a.py", (1, 1))
    first = collect(one).hash
    assert collect(two).hash == first
    (two / "a.py").chmod(0o755)
    assert collect(two).hash != first
    (two / "a.py").chmod(0o644)
    (two / "a.py").rename(two / "c.py")
    assert collect(two).hash != first


def test_what_arrives_has_the_hash_it_was_sent_under(tmp_path: Path) -> None:
    root = project({"run.sh": "#!/bin/sh\n", "ünï cödé/it's.py": "1", "empty": ""}, tmp_path / "project")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("run.sh")
    (root / "folder").symlink_to("ünï cödé")
    bundle = collect(root)
    arrived = unpack(root, tmp_path / "arrived")
    assert bundle_hash(put.scan(str(arrived))) == bundle.hash
    (arrived / "project" / "empty").write_text("no more")
    assert bundle_hash(put.scan(str(arrived))) != bundle.hash


@pytest.mark.parametrize("in_git", [True, False])
def test_files_too_big_to_be_code_are_refused_by_name_with_what_to_do(tmp_path: Path, in_git: bool) -> None:
    root = project({"a.py": "1"}, tmp_path)
    if in_git:
        git(root, "init", "-q")
    with (root / "model.safetensors").open("wb") as file:
        file.truncate(21 << 20)
    with pytest.raises(BundleError, match=r"model\.safetensors \(21 MiB\)") as caught:
        collect(root)
    hint = caught.value.hint or ""
    assert "--source DIR" in hint and (".gitignore" in hint) is in_git
