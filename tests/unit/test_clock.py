"""A run's own clock: ages that no setting of the wall clock changes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from orchestrator.agent import records
from orchestrator.agent.clock import Clock, booted_at, moved
from orchestrator.logscan import Scanner
from orchestrator.model import FollowedLog, RunPaths


def test_a_wall_clock_that_was_set_since_is_noticed_and_the_runs_own_goes_on() -> None:
    for set_by_s in (7200.0, -7200.0):
        clock = Clock.of({"boot": "b", "booted_at": booted_at() - set_by_s}, "b")
        assert clock.set_by_s == pytest.approx(set_by_s, abs=0.5)
        assert clock.now() == pytest.approx(time.time() - set_by_s, abs=0.5)


def test_without_a_note_of_it_or_in_another_boot_no_clock_was_set() -> None:
    for boot, at in (("b", None), ("a", 5.0), (None, None)):
        assert Clock.of({"boot": boot, "booted_at": at}, "b").set_by_s == 0.0


def test_every_time_of_a_summary_moves_along() -> None:
    def read(now: float) -> FollowedLog:
        scanner = Scanner()
        text = b"phase=train\nworker=drafter-0 step=1 loss=1\nstep=1\n" + (
            b"Exception in thread drafter-0:\nTraceback (most recent call last):\n"
            b'  File "a.py", line 1, in f\nRuntimeError: boom\n'
        )
        scanner.feed(text, now)
        return FollowedLog(summary=scanner.summary(), grew_at=now)

    assert "100.0" not in str(moved(read(100.0), 7200.0))
    assert moved(read(100.0), 7200.0) == read(7300.0)
    assert moved(read(100.0), 0.0) == read(100.0)


def test_a_heartbeat_is_as_old_as_the_clock_says_that_nobody_sets(tmp_path: Path) -> None:
    paths = RunPaths(root=str(tmp_path), run_id="20260101-000000-r-0000")
    beat = {"nonce": "n", "phase": "train", "step": 3, "time": 5.0, "monotonic_s": time.monotonic() - 40}
    Path(paths.heartbeat).write_text(json.dumps(beat))
    now = records.heartbeat(paths, "n", same_boot=True)
    assert now is not None and time.time() - now.at == pytest.approx(40, abs=5)
    ended = records.heartbeat(paths, "n")
    assert ended is not None and ended.at == 5.0
