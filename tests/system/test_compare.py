"""`compare`, `diff` and `errors`: the story that this project began with, told truly on one screen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import Specctl, poll_until

TRAIN = """
import sys, threading, time
import model

def drafter(name):
    for step in range(1, 9):
        print(f"step={step} worker={name} loss={4 / step:.3f} tok/s={100 + step}", flush=True)
        if step == 4 and name == "drafter-0":
            model.forward()
        time.sleep(0.02)

threads = [threading.Thread(target=drafter, args=(name,), name=name) for name in ("drafter-0", "drafter-1")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(model.CODE)
"""
FX = "Detected that you are using FX to symbolically trace a dynamo-optimized function"
BROKEN = f"CODE = 1\n\ndef forward():\n    raise RuntimeError({FX!r})\n"
MOVED = f"CODE = 1\nLOCK = None\n\n\ndef forward():\n    raise RuntimeError({FX!r})\n"
UNBORN = "import a_module_that_is_nowhere\n"
FIXED = "CODE = 0\n\ndef forward():\n    print('fixed', flush=True)\n"
ELSEWHERE = FIXED.replace("0", "7")


@pytest.fixture(scope="module")
def runs() -> Iterator[tuple[Specctl, dict[str, str]]]:
    """Run 6 fails; 6b was to mend it; 7 never gets that far; 8 fails elsewhere; 9 is right; `again` is run 6 again."""
    specctl, ids = Specctl(), {}
    (specctl.project / "train.py").write_text(TRAIN)
    for name, text in {"run6": BROKEN, "run6b": MOVED, "run7": UNBORN, "run8": ELSEWHERE, "run9": FIXED,
                       "again": BROKEN}.items():  # fmt: skip
        (specctl.project / "model.py").write_text(text)
        (specctl.project / "run.yaml").write_text(f"patterns: {{step: 'nothing of {name[:4]} (.)'}}\n")
        words = ["--config", "run.yaml"] if name in ("run6", "run9", "again") else []
        done = specctl.launch("--name", name, "--until", "process", *words, "--", sys.executable, "train.py")
        ids[name] = done.json["run_id"]
        poll_until(lambda: specctl.status(ids[name])["state"] in ("FAILED", "SUCCEEDED"))  # noqa: B023
    yield specctl, ids
    specctl.close()


def test_the_same_exception_from_other_lines_is_the_same_failure(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    done = specctl("compare", ids["run6"], ids["run6b"])
    assert done.code == 1 and f"SAME FAILURE. B failed as A did: RuntimeError: {FX}" in done.out
    assert "drafter-0 after step 4" in done.out and "model.py  +2 -0" in done.out and "+LOCK = None" in done.out
    assert ids["run6"] in done.out and ids["run6b"] in done.out


def test_a_run_that_never_got_there_says_nothing_about_the_fix(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    done = specctl("compare", ids["run6"], ids["run7"], "--json")
    assert done.code == 3 and done.json["answer"] == "no_answer" and done.json["training"] == {}
    assert "before drafter-0 was past step 4: it says nothing about the fix" in done.json["sentence"]
    fates = {one["failure"]["text"].partition(":")[0]: one["fate"] for one in done.json["failures"]}
    assert fates == {"RuntimeError": "not reached", "ModuleNotFoundError": "new"}


def test_a_run_that_got_past_it_and_failed_elsewhere_is_neither_the_same_nor_well(
    runs: tuple[Specctl, dict[str, str]],
) -> None:
    specctl, ids = runs
    done = specctl("compare", ids["run6"], ids["run8"])
    assert done.code == 1 and "ANOTHER FAILURE. B got past where A failed (drafter-0 is at step 8)" in done.out
    assert "exit code 7" in done.out


def test_a_fix_that_worked_is_said_with_what_it_was_and_how_both_train(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    done = specctl("compare", ids["run6"], ids["run9"], "--json")
    assert done.code == 0 and done.json["answer"] == "gone"
    assert [(one["path"], one["how"]) for one in done.json["files"]] == [
        ("model.py", "changed"), ("run.yaml", "changed"),
    ]  # fmt: skip
    assert "+patterns: {step: 'nothing of run9 (.)'}" in done.json["config_diff"]
    assert [change["word"] for change in done.json["changes"]] == ["patterns"]
    # Of a program that prints many steps in a moment not every one is kept.
    first = done.json["training"]["loss"][0]
    assert first["a"]["mean"] >= 0.5 and first["b"]["mean"] >= 0.5 and done.json["training"]["tok_s"]
    text = specctl("compare", ids["run6"], ids["run9"]).out
    assert "GONE. " in text and "how they train" in text
    backwards = specctl("compare", ids["run9"], ids["run6"])
    assert backwards.code == 1 and "NEW FAILURE. A did not fail, B did: RuntimeError" in backwards.out
    assert f"B is older than A: specctl compare {ids['run6']} {ids['run9']}" in backwards.err


def test_what_changed_is_a_patch_that_makes_one_into_the_other(
    runs: tuple[Specctl, dict[str, str]], tmp_path: Path
) -> None:
    specctl, ids = runs
    done = specctl("compare", ids["run6"], ids["run8"], "--diff")
    assert done.code == 0
    (tmp_path / "model.py").write_text(BROKEN)
    code = done.out[: done.out.index("--- run.yaml")] if "--- run.yaml" in done.out else done.out
    subprocess.run(["git", "apply", "--include=model.py", "-"], input=code, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "model.py").read_text() == ELSEWHERE


def test_another_target_is_a_change_by_its_name_and_place(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    both = specctl.project / "both.yaml"
    both.write_text(specctl.inventory.read_text() + f"  other: {{workdir: {specctl.home}/other, env: {{SEED: '7'}}}}\n")
    words = ("--inventory", str(both))
    there = specctl(*words, "launch", "other", "--json", "--until", "process", "--", "sh", "-c", "exit 3").json
    done = specctl(*words, "compare", ids["run6"], there["run_id"])
    assert "target        local (this machine) -> other (this machine)" in done.out, done
    assert "variable SEED not set -> set" in done.out and f"A {ids['run6']} on local" in done.out
    assert "command       " in done.out and "train.py -> sh -c 'exit 3'" in " ".join(done.out.split())
    both.unlink()


def test_a_run_whose_logs_cannot_be_searched_is_none_that_was(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    record = specctl.run_dir(ids["run6"]) / "run.json"
    before = record.read_bytes()
    record.write_bytes(before[:200])
    try:
        done = specctl("errors", ids["run6"])
    finally:
        record.write_bytes(before)
    assert done.code == 3 and "its logs were not searched" in done.err and "no exception in 0 runs" in done.err, done


def test_a_repetition_without_any_change_is_called_that(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    done = specctl("compare", ids["run6"], "@last")
    assert done.code == 1 and "code          1 file" in done.out and "run.yaml" in done.out
    same = specctl("compare", ids["run6"], ids["run6"])
    assert same.code == 1 and "no fix was in it" in same.out and "one and the same run" in same.err
    assert specctl("compare", ids["run6"], ids["run6"], "--diff").code == 1


def test_an_exception_of_several_runs_is_told_once_with_all_of_them(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    done = specctl("errors", "--json")
    assert done.code == 0 and done.json["runs"] == 6 and done.json["unreachable"] == done.json["not_searched"] == []
    found = {error["type"]: error for error in done.json["errors"]}
    assert set(found) == {"RuntimeError", "ModuleNotFoundError"}
    assert [one["run_id"] for one in found["RuntimeError"]["runs"]] == [ids["again"], ids["run6b"], ids["run6"]]
    assert {one["ended"] for one in found["RuntimeError"]["runs"]} == {"run"} and found["RuntimeError"]["count"] == 3
    kind = found["RuntimeError"]
    newest, *_, oldest = kind["runs"]
    assert (kind["first_at"], kind["last_at"]) == (oldest["first_at"], newest["last_at"])
    assert kind["first_at"] < kind["last_at"] and "3 times in 3 runs, first " in specctl("errors").out
    text = specctl("errors", "-t", ids["run6"], ids["run7"])
    assert text.out.count("Traceback (most recent call last)") == 2 and "2 exceptions, 2 different" in text.err
    assert "in drafter-0: FAILED, the run ended with it" in text.out
    none = specctl("errors", ids["run9"])
    assert none.code == 1 and none.out == "" and "no exception in 1 run" in none.err


def test_the_code_here_is_compared_with_what_ran(runs: tuple[Specctl, dict[str, str]], tmp_path: Path) -> None:
    specctl, ids = runs
    here = tmp_path / "here"
    shutil.copytree(specctl.project, here)
    same = specctl("diff", ids["again"], "--source", str(here))
    assert same.code == 0 and same.out == "" and "was launched with exactly this code" in same.err
    (here / "model.py").unlink()
    (here / "new.bin").write_bytes(b"\0\1")
    (here / "train.py").chmod(0o755)
    (here / "notes.txt").write_text("one line, without its end")
    done = specctl("diff", ids["again"], "--source", str(here), "--json")
    assert done.code == 1 and not done.json["same"]
    assert {(one["path"], one["how"], one["why"]) for one in done.json["files"]} == {
        ("model.py", "removed", None), ("new.bin", "added", "it is no text (2 bytes)"), ("notes.txt", "added", None),
        ("train.py", "changed", "a file has become a program"),
    }  # fmt: skip
    patch = specctl("diff", ids["again"], "--source", str(here)).out
    again = tmp_path / "again"
    shutil.copytree(specctl.project, again)
    lines = [line for line in patch.splitlines(keepends=True) if not line.startswith(("new.bin", "train.py"))]
    subprocess.run(["git", "apply", "-"], input="".join(lines), text=True, cwd=again, check=True)
    assert not (again / "model.py").exists() and (again / "notes.txt").read_text() == "one line, without its end"


def test_a_bundle_that_was_removed_leaves_the_code_unknown_and_the_rest_told(
    runs: tuple[Specctl, dict[str, str]],
) -> None:
    specctl, ids = runs
    bundle = json.loads((specctl.run_dir(ids["run8"]) / "run.json").read_text())["spec"]["bundle"]
    shutil.rmtree(specctl.workdir / "bundles" / bundle)
    done = specctl("compare", ids["run6"], ids["run8"])
    assert done.code == 1 and f"cannot be compared: the bundle of {ids['run8']} was removed" in done.out
    assert specctl("diff", ids["run8"]).code == 4


def test_a_target_that_cannot_be_searched_is_no_target_without_exceptions(specctl: Specctl) -> None:
    specctl.inventory.write_text(specctl.inventory.read_text() + "  away: {ssh: 'root@127.0.0.1:1'}\n")
    done = specctl("errors", "--json")
    assert done.code == 3 and done.json["errors"] == [] and done.json["unreachable"] == ["away"]


def test_a_run_that_is_not_there_is_said_by_its_name(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    done = specctl("compare", ids["run6"], "nothing-like-it")
    assert done.code == 4 and "no run 'nothing-like-it'" in done.err and done.out == ""


def test_versions_that_no_agent_writes_are_no_versions(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    path = specctl.run_dir(ids["again"]) / "run.json"
    for versions in ([1], "3.11", 5, None):
        path.write_text(json.dumps({**json.loads(path.read_text()), "versions": versions}))
        done = specctl("compare", ids["run6"], ids["again"])
        assert done.code == 1 and "version of python" in done.out
