"""`scripts/again`: a test that fails by itself fails the suite; one that does not is named as unstable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNSTABLE = """
from pathlib import Path
def test_one():
    times = Path("times")
    times.write_text(times.read_text() + "." if times.exists() else ".")
    assert len(times.read_text()) > {failures}
"""


def suite(folder: Path, text: str) -> tuple[int, str]:
    """The exit code of a suite of this one file, run as the Makefile does, and what was printed."""
    (folder / "test_it.py").write_text(text)
    script = f"{sys.executable} -m pytest -q test_it.py || {ROOT}/scripts/again $? {sys.executable}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(["sh", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def test_a_test_that_fails_in_the_suite_alone_is_named_and_fails_nothing(tmp_path: Path) -> None:
    code, said = suite(tmp_path, UNSTABLE.format(failures=1))
    assert code == 0 and said.endswith(
        "UNSTABLE: test_it.py::test_one failed in the suite, and passed 3 times by itself\n"
    )
    assert (tmp_path / "times").read_text() == "...." and "assert 1 > 1" in said


@pytest.mark.parametrize("failures", [2, 100])
def test_one_that_fails_once_more_by_itself_fails_the_suite(tmp_path: Path, failures: int) -> None:
    code, said = suite(tmp_path, UNSTABLE.format(failures=failures))
    assert code == 1 and "FAILED by itself too: test_it.py::test_one" in said and "UNSTABLE" not in said


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    code, said = suite(tmp_path, "\n".join(f"def test_{n}(): assert not {n}" for n in range(8)))
    assert code == 1 and "by itself" not in said


@pytest.mark.parametrize(("text", "code"), [("import nothing_of_that_name", 2), ("", 5)])
def test_what_is_no_failed_test_is_left_as_it_is(tmp_path: Path, text: str, code: int) -> None:
    assert suite(tmp_path, text)[0] == code
