"""Did the fix work? Every way in which a second run can answer that, or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.comparison import Failure, Side, answer
from orchestrator.verbs import compare
from orchestrator.verbs.show import Asked

FX = Failure(fingerprint="fx", text="RuntimeError: FX", workers=["drafter-0"], step=None)
LATE = Failure(fingerprint="oom", text="OutOfMemoryError: 2 GiB", workers=["drafter-1"], step=40)
CODE = Failure(fingerprint="FAILED: exit code 3", text="exit code 3", step=7)


def side(state: str = "FAILED", *failures: Failure, **fields: Any) -> Side:
    live = state in ("RUNNING", "STARTING", "DEGRADED", "STALLED")
    given = {"why": "why", "live": live, "step": None, "phase": None, "workers": {}, "printed": [], **fields}
    return Side(run_id=state.lower(), state=state, failures=list(failures), **given)


def both(step: int | None, other: int | None) -> dict[str, Any]:
    steps = [one for one in (step, other) if one is not None]
    return {"workers": {"target-0": None, "drafter-0": step, "drafter-1": other}, "step": max(steps, default=None)}


@pytest.mark.parametrize(
    ("a", "b", "kind", "code", "words"),
    [
        (side("FAILED", FX), side("FAILED", FX), "same", 1, "failed as A did: RuntimeError: FX"),
        (side("DEGRADED", FX), side("DEGRADED", FX, **both(None, 50)), "same", 1, "drafter-0 before the first step"),
        # The story that this program began with: the second run never got that far.
        (side("FAILED", FX), side("NEVER_STARTED", why="no tmux"), "no_answer", 3,
         "never started (no tmux): it says nothing about the fix"),
        (side("FAILED", FX), side("FAILED", CODE), "no_answer", 3,
         "(exit code 3) before drafter-0 made its first step: it says nothing about the fix"),
        (side("FAILED", FX), side("STOPPED", **both(None, None)), "no_answer", 3, "says nothing about the fix"),
        (side("FAILED", FX), side("STARTING", phase="compile_warmup"), "not_yet", 3, "no step, phase compile_warmup"),
        # Others stepping says nothing of the worker that failed.
        (side("FAILED", FX), side("RUNNING", **both(None, 9)), "not_yet", 3, "drafter-0 has made no step"),
        (side("FAILED", FX), side("RUNNING", **both(1, 9)), "gone", 0, "drafter-0 is at step 1"),
        (side("FAILED", LATE), side("RUNNING", **both(900, 40)), "not_yet", 3, "drafter-1 is at step 40"),
        (side("FAILED", LATE), side("SUCCEEDED", **both(41, 41)), "gone", 0, "drafter-1 is at step 41"),
        (side("FAILED", LATE), side("FAILED", FX, **both(None, 3)), "no_answer", 3, "before drafter-1 was past"),
        (side("FAILED", LATE), side("FAILED", CODE, **both(60, 60)), "different", 1, "failed elsewhere: exit code 3"),
        # A drafter that the second run does not have: the run as a whole.
        (side("FAILED", LATE), side("RUNNING", step=41, workers={"drafter-0": 41}), "gone", 0, "B is at step 41"),
        (side("FAILED", LATE), side("RUNNING", step=40, workers={"drafter-0": 40}), "not_yet", 3, "B is at step 40"),
        (side("FAILED", CODE), side("FAILED", replace(CODE, step=90), step=90), "same", 1,
         "exit code 3 (A: the run after step 7; B: the run after step 90)"),
        (side("FAILED", FX), side("RUNNING", printed=["fx"], **both(9, 9)), "printed", 1, "has not ended with it"),
        (side("RUNNING"), side("FAILED", FX), "new", 1, "A did not fail, B did: RuntimeError: FX (drafter-0, before"),
        (side("SUCCEEDED"), side("RUNNING"), "fine", 0, "neither failed"),
    ],
)  # fmt: skip
def test_an_answer_is_only_what_was_seen_of_both(a: Side, b: Side, kind: str, code: int, words: str) -> None:
    found = answer(a, b, changed=True)
    assert (found.kind, found.exit_code) == (kind, code) and words in found.sentence
    assert "nothing is known to have changed" not in found.sentence


def test_a_failure_of_a_thread_that_takes_no_steps_is_past_when_the_run_is() -> None:
    failure = Failure(fingerprint="x", text="x", workers=["target-0"], step=12)
    assert answer(side("FAILED", failure), side("RUNNING", **both(12, 12)), changed=True).kind == "not_yet"
    assert answer(side("FAILED", failure), side("RUNNING", **both(13, 13)), changed=True).kind == "gone"


@pytest.mark.parametrize(
    ("b", "words"),
    [
        (side("FAILED", FX), "no fix was in it"), (side("RUNNING", **both(5, 5)), "this may be chance"),
        (side("FAILED", CODE), "it says nothing about what A failed with"),
    ],
)
def test_where_nothing_was_changed_no_fix_is_credited(b: Side, words: str) -> None:
    assert words in answer(side("FAILED", FX), b, changed=False).sentence


def test_every_failure_of_both_is_accounted_for() -> None:
    found = answer(side("FAILED", LATE, FX), side("FAILED", CODE, FX, **both(None, 60)), changed=True)
    assert [(one.failure.fingerprint, one.fate, one.of) for one in found.told] == [
        ("oom", "gone", "a"), ("fx", "same", "a"), ("FAILED: exit code 3", "new", "b"),
    ]  # fmt: skip
    assert found.kind == "different"


def history(**changes: Any) -> compare.History:
    asked = {"bundle": "b", "trainer": False, "env": [], "secrets": [], "config_path": None, "config_text": None,
             "config_sha256": None, "git_commit": None, "diff_bytes": 0, "diff": None, "env_hash": None, "gpus": [],
             "patterns": {}, "specctl_version": "1"}  # fmt: skip
    spec = Asked(**{**asked, **{key: changes.pop(key) for key in list(changes) if key in asked and key != "env"}})
    given = {"host": "gpu1", "env": {}, "versions": {"python": "3.11"}, "packages": None, "files": [], "series": [],
             "whole": True, **changes}  # fmt: skip
    return compare.History(spec=spec, **given)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({}, {"host": "gpu2"}, [("host", "gpu1", "gpu2")]),
        ({}, {"versions": {"python": "3.12", "specctl": "2"}},
         [("version of python", "3.11", "3.12"), ("version of specctl", "none", "2")]),
        ({"packages": {"torch": "2.8", "numpy": "2"}}, {"packages": {"torch": "2.9", "numpy": "2", "rich": "14"}},
         [("package rich", "none", "14"), ("package torch", "2.8", "2.9")]),
        ({"packages": {"torch": "2.8"}, "env_hash": "e1"}, {"env_hash": "e2"}, [("environment", "e1", "e2")]),
        ({"env": {"A": "1", "B": "1"}}, {"env": {"A": "2", "C": "1"}},
         [("variable A", "set", "another value"), ("variable B", "set", "not set"), ("variable C", "not set", "set")]),
        ({}, {"secrets": ["HF_TOKEN"]}, [("secrets", "none", "HF_TOKEN")]),
        ({}, {"patterns": {"step": "iter"}}, [("patterns", "none", "step: iter")]),
        ({"env_hash": "e1"}, {"env_hash": "e1"}, []),
    ],
)  # fmt: skip
def test_what_was_done_differently_is_told_thing_by_thing(
    a: dict[str, Any], b: dict[str, Any], said: list[tuple[str, str, str]]
) -> None:
    found = compare._changes(history(**a), history(**b))
    assert [(one.word, one.a, one.b) for one in found] == said
