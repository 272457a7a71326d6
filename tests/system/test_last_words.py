"""A run that failed without an exception: what it said last is told wherever its state is, and for nothing more."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver import Specctl, poll_until
from tests.trainer.support import small_run, write_config

SAYS = """
import os, signal, sys

CASES = {
    "option": b"usage: tool [-h]\\ntool: error: no such option: --foo\\n",
    "again": b"tool: error: no such option: --foo\\n",
    "silent": b"",
    "long": b"error: of " + b"x" * 10_000 + b" in the end\\n",
    "garbage": b"read the file\\n" + bytes(range(0x80, 0x100)) * 40,
    "bar": b"\\r 10%|#         | 1/10 [00:00<00:01,  9.9it/s]\\r 20%|##        | 2/10 [00:00<00:01,  9.9it/s]no room",
    "colours": b"\\x1b[1;31merror:\\x1b[0m a red one\\n",
    "assert": b"main.c:12: main: Assertion `layers > 0' failed.\\n",
    "term": b"still at work\\n",
    "well": b"all is well\\n",
    "steps": b"begins\\nstep=6 loss=2.5\\nstep=7 loss=2.3 tok/s=9\\n",
    "raises": b"",
}
case = sys.argv[1]
os.write(2, CASES[case])
if case == "raises":
    raise RuntimeError("boom")
if case in ("assert", "term"):
    os.kill(os.getpid(), signal.SIGABRT if case == "assert" else signal.SIGTERM)
sys.exit({"well": 0, "silent": 3}.get(case, 2))
"""
CASES = ["option", "again", "silent", "long", "garbage", "bar", "colours", "assert", "term", "well", "raises", "steps"]


@pytest.fixture(scope="module")
def runs() -> Iterator[tuple[Specctl, dict[str, str]]]:
    """One run of each case, by its name."""
    specctl = Specctl()
    (specctl.project / "says.py").write_text(SAYS)
    ids = {}
    for case in CASES:
        done = specctl.launch("--name", case, "--until", "process", "--", sys.executable, "-S", "says.py", case)
        ids[case] = done.json["run_id"]
    poll_until(lambda: not {run["state"] for run in specctl("status", "--json").json["runs"]} - ENDED)
    yield specctl, ids
    specctl.close()


ENDED = {"FAILED", "KILLED", "SUCCEEDED"}


@pytest.fixture(scope="module")
def rows(runs: tuple[Specctl, dict[str, str]]) -> dict[str, dict[str, Any]]:
    specctl, ids = runs
    found = {row["run_id"]: row for row in specctl("status", "--json").json["runs"]}
    return {case: found[run_id] for case, run_id in ids.items()}


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("option", "exit code 2; last line: tool: error: no such option: --foo"),
        ("silent", "exit code 3"),
        ("garbage", "exit code 2; last line: read the file"),
        ("bar", "exit code 2; last line: no room"),
        ("colours", "exit code 2; last line: error: a red one"),
        ("assert", "SIGABRT; last line: main.c:12: main: Assertion `layers > 0' failed."),
        ("term", "SIGTERM"),
        ("well", "exit code 0"),
        ("steps", "exit code 2 after step 7"),
        ("raises", "exit code 1: RuntimeError: boom"),
    ],
)
def test_an_end_says_its_code_and_the_last_line_and_an_exception_alone_where_there_is_one(
    rows: dict[str, dict[str, Any]], case: str, why: str
) -> None:
    assert rows[case]["why"] == why
    assert (rows[case]["last_words"] is not None) == ("last line" in why)


def test_a_line_of_ten_thousand_characters_is_told_by_both_its_ends(rows: dict[str, dict[str, Any]]) -> None:
    why = rows["long"]["why"]
    assert why.startswith("exit code 2; last line: error: of x") and why.endswith("in the end") and len(why) < 250


def test_every_verb_that_says_how_it_ended_says_it(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    line = "last line: tool: error: no such option: --foo"
    for verb in ("status", "ls"):
        assert f"exit code 2; {line}" in specctl(verb).out, verb
    for words in (["show", ids["option"]], ["compare", ids["well"], ids["option"]], ["errors", ids["option"]]):
        assert f"exit code 2; {line}" in specctl(*words).out, words
    assert specctl("show", ids["option"]).out.count("no such option") == 1
    told = specctl("watch", ids["option"], "--json").objects[-1]
    assert told["kind"] == "end" and told["text"] == f"FAILED: exit code 2; {line}"
    assert specctl("report", ids["option"], "-o", "page.html").code == 0
    assert line in (specctl.project / "page.html").read_text()


def test_runs_are_the_same_failure_if_they_end_alike_and_say_the_same(runs: tuple[Specctl, dict[str, str]]) -> None:
    specctl, ids = runs
    same = specctl("compare", ids["option"], ids["again"])
    assert same.code == 1 and "SAME FAILURE. B failed as A did: exit code 2; last line: tool: error:" in same.out
    other = specctl("compare", ids["option"], ids["colours"], "--json").json
    assert [one["fate"] for one in other["failures"]] == ["not reached", "new"]


def test_errors_lists_failures_without_an_exception_and_counts_them_apart(
    runs: tuple[Specctl, dict[str, str]],
) -> None:
    specctl, ids = runs
    done = specctl("errors", "--json")
    assert done.code == 0 and [one["type"] for one in done.json["errors"]] == ["RuntimeError"]
    found = {one["runs"][0]["run_id"]: one for one in done.json["without_exception"]}
    assert set(found) == {run_id for case, run_id in ids.items() if case not in ("well", "raises", "option")}
    again = found[ids["again"]]
    assert [one["run_id"] for one in again["runs"]] == [ids["again"], ids["option"]] and again["how"] == "exit code 2"
    said = {"text": "tool: error: no such option: --foo", "by": "log", "log": None, "before": None}
    assert again["last_words"] == said
    assert found[ids["silent"]]["last_words"] is None and found[ids["term"]]["how"] == "SIGTERM"
    assert "1 exception, 1 different, in 12 runs; 10 runs ended badly without one" in specctl("errors").err
    alone = specctl("errors", ids["silent"], ids["option"], ids["again"])
    assert alone.code == 1 and "no exception in 3 runs; 3 runs ended badly without one" in alone.err
    assert "-- 1 of 2: exit code 3\n" in alone.out and f"{ids['silent']} on local: FAILED" in alone.out
    assert "-- 2 of 2: exit code 2; last line: tool: error: no such option: --foo\n   2 runs without" in alone.out


def test_words_of_another_attempt_are_not_told_and_records_without_any_are_read(
    runs: tuple[Specctl, dict[str, str]],
) -> None:
    specctl, ids = runs
    path = specctl.run_dir(ids["colours"]) / "exit.json"
    record = json.loads(path.read_text())
    try:
        for changed in ({"nonce": "another"}, {"last_words": None}):
            path.write_text(json.dumps({**record, **changed}))
            assert specctl.status(ids["colours"])["why"] == "exit code 2"
        path.write_text(json.dumps({name: value for name, value in record.items() if name != "last_words"}))
        assert specctl.status(ids["colours"])["why"] == "exit code 2"
    finally:
        path.write_text(json.dumps(record))


REASON = """
import json, os, sys

def ended(nonce, error):
    line = {"event": "ended", "source": "trainer", "nonce": nonce, "attempt": 1, "code": 2, "error": error}
    with open(os.environ["SPECCTL_RUN_DIR"] + "/events.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")

if sys.argv[1] == "own":
    ended(os.environ["SPECCTL_NONCE"], "optimizer.lr: must be\\nless than 1e38")
ended("that of an attempt before", "of another attempt")
print("the last line", flush=True)
sys.exit(2)
"""


def test_a_programs_own_reason_is_better_than_its_last_line_if_it_is_of_this_attempt(specctl: Specctl) -> None:
    (specctl.project / "reason.py").write_text(REASON)
    for word, why in (
        ("own", "exit code 2; by its own word: optimizer.lr: must be less than 1e38"),
        ("other", "exit code 2; last line: the last line"),
    ):
        done = specctl.launch("--until", "process", "--", sys.executable, "reason.py", word)
        assert poll_until(lambda: failed(specctl, done.json["run_id"]))["why"] == why  # noqa: B023


def test_a_configuration_that_the_trainer_refuses_there_is_told_by_its_key(specctl: Specctl) -> None:
    config = {**small_run(Path("/nowhere"), Path("out")), "resume": "never"}
    write_config(config, specctl.project / "run.yaml")
    words = ["--until", "process", "--", sys.executable, "-m", "trainer", "train", "run.yaml"]
    run_id = specctl.launch(*words).json["run_id"]
    why = poll_until(lambda: failed(specctl, run_id))["why"]
    assert why.startswith("exit code 2; by its own word: target.path: no Hugging Face model in /nowhere")


def test_a_start_script_that_names_its_own_log_is_told_by_the_last_line_of_that(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    log.write_text("an older run's last line\n")
    script = f"echo starting\nexec >>{log} 2>&1\nsleep 0.1\n[ -z \"$1\" ] || echo no room\nexit 2\n"
    (specctl.project / "start.sh").write_text(script)
    done = specctl.launch("--until", "process", "--", "sh", "start.sh", "says")
    why = poll_until(lambda: failed(specctl, done.json["run_id"]))["why"]
    assert why == f"exit code 2; last line of {log}: no room"
    done = specctl.launch("--until", "process", "--", "sh", "start.sh", "")
    assert poll_until(lambda: failed(specctl, done.json["run_id"]))["why"] == "exit code 2; last line: starting"


def test_a_program_that_removes_its_records_is_told_by_its_log_all_the_same(specctl: Specctl) -> None:
    script = 'rm "$SPECCTL_RUN_DIR/events.jsonl"; echo "error: no room"; exit 2'
    run_id = specctl.launch("--until", "process", "--", "sh", "-c", script).json["run_id"]
    assert poll_until(lambda: failed(specctl, run_id))["why"] == "exit code 2; last line: error: no room"


def test_what_outlives_the_program_does_not_hide_what_that_said(specctl: Specctl) -> None:
    script = "sleep 1000 & echo 'error: no room'; exit 2"
    run_id = specctl.launch("--until", "process", "--", "sh", "-c", script).json["run_id"]
    why = poll_until(lambda: failed(specctl, run_id))["why"]
    assert why.startswith("exit code 2; 1 process (") and why.endswith("stop ends; last line: error: no room")


def failed(specctl: Specctl, run_id: str) -> dict[str, Any] | None:
    row = specctl.status(run_id)
    return row if row["state"] == "FAILED" else None
