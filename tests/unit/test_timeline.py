"""Time lines: each part has a record behind it, and what nobody wrote down stays empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator.model import ExitRecord, LogFile, LogSummary, Probe, Verdict, Worker
from orchestrator.series import Row, Series, Sums
from orchestrator.timeline import SHARES, Event, Lane, Timeline, timeline


def event(at: float, name: str, **fields: Any) -> Event:
    return Event(at=at, event=name, fields=fields)


def series(metric: str, worker: str | None, times: Sequence[float], values: Sequence[float]) -> Series:
    rows = [
        Row(number=number, at=at, until=at, sums=Sums(count=1, total=value, squares=value**2, low=value, high=value))
        for number, (at, value) in enumerate(zip(times, values, strict=True), 1)
    ]
    return Series(metric=metric, worker=worker, width=1, last=len(rows), rows=rows)


def shares(worker: str, times: Sequence[float], busy: Sequence[float]) -> list[Series]:
    """Busy so much, and the rest of the time waiting for input."""
    waits = [1 - one for one in busy]
    values = dict(zip(SHARES, (busy, waits, [0.0] * len(busy), [0.0] * len(busy)), strict=True))
    return [series(name, worker, times, values[name]) for name in SHARES]


def seen(events: Sequence[Event], *found: Series, ended_at: float | None = None, observed_at: float = 100.0,
         state: Any = "RUNNING", workers: Sequence[str] = (), whole: bool = True,
         unread: tuple[float, float] | None = None) -> Timeline:  # fmt: skip
    probe = Probe(
        run_id="r", attempt=1, nonce="n", observed_at=observed_at, created_at=0.0, target="t", owner="o", note="",
        argv=[], exit=None if ended_at is None else ExitRecord(at=ended_at, code=1), stop=None, same_boot=True,
        supervisor_alive=True, program=None, program_seen=True, tree=[], summary=LogSummary(),
        log=LogFile(path="l", size=0, modified_at=0.0, verified=True),
    )  # fmt: skip
    verdict = Verdict(state=state, why="", observed_at=observed_at, workers=[Worker(name=name) for name in workers])
    return timeline(events, found, probe, verdict, whole=whole, unread=unread)


def parts(lane: Lane) -> list[tuple[str, float, float]]:
    return [(part.kind, part.since, part.until) for part in lane.parts]


def lane(lines: Timeline, name: str | None) -> Lane:
    return next(one for one in lines.lanes if one.name == name)


def test_a_trainers_run_is_its_phases_each_until_the_next_and_the_last_until_it_ended() -> None:
    events = [
        event(1, "started"), event(2, "phase", phase="import"), event(5, "phase", phase="compile_warmup"),
        event(20, "phase", phase="train"), event(40, "phase", phase="checkpoint"), event(41, "checkpoint", step=7),
        event(42, "phase", phase="train"), event(60, "ended", code=0), event(61, "ended", code=0),
    ]  # fmt: skip
    lines = seen(events, ended_at=62, state="SUCCEEDED")
    assert parts(lane(lines, None)) == [
        ("start", 1, 2), ("start", 2, 5), ("warm-up", 5, 20), ("train", 20, 40), ("save", 40, 42), ("train", 42, 60),
    ]  # fmt: skip
    assert [(mark.at, mark.text) for mark in lane(lines, None).marks] == [(41, "checkpoint of step 7")]
    assert (lines.since, lines.until) == (0, 62)


def test_a_run_in_line_for_gpus_waits_until_it_has_them() -> None:
    waits = event(2, "queued", gpus="2", behind="GPU 0 is r2's")
    assert parts(lane(seen([waits], state="QUEUED"), None)) == [("queued", 2, 100)]
    lines = seen([waits, event(50, "dequeued"), event(51, "started"), event(53, "phase", phase="train")])
    assert parts(lane(lines, None)) == [("queued", 2, 50), ("start", 51, 53), ("train", 53, 100)]
    assert lane(lines, None).parts[0].text == "in line: GPU 0 is r2's"


def test_a_live_run_is_known_until_it_was_looked_at_and_a_lost_one_until_its_last_word() -> None:
    events = [event(2, "phase", phase="train")]
    assert parts(lane(seen(events), None)) == [("train", 2, 100)]
    lost = seen(events, series("loss", None, [3, 4], [1, 1]), state="LOST")
    assert parts(lane(lost, None)) == [("train", 2, 4)] and lost.until == 4


def test_a_program_without_phases_steps_where_its_lines_are_and_nowhere_between() -> None:
    times = [*range(10, 20), *range(70, 80)]
    lines = seen([event(1, "started")], series("loss", "w", times, [1] * 20), ended_at=90, state="FAILED")
    assert parts(lane(lines, None)) == [("start", 1, 10), ("step", 10, 19), ("step", 70, 79)]
    assert parts(lane(lines, "w")) == [("step", 10, 19), ("step", 70, 79)], "silence is drawn as nothing"


def test_a_workers_shares_tell_of_the_time_since_the_row_before() -> None:
    lines = seen([event(5, "worker_up", worker="drafter-0")], *shares("drafter-0", [8, 10, 50], [0.5, 0.75, 0.01]))
    found = lane(lines, "drafter-0")
    assert parts(found) == [("shares", 5, 8), ("shares", 8, 10), ("shares", 10, 50)]
    assert [part.shares[:2] for part in found.parts] == [[0.5, 0.5], [0.75, 0.25], [0.01, 0.99]]
    assert [part.text for part in found.parts] == ["step 1", "step 2", "step 3"]


def test_between_parts_of_a_file_that_were_not_read_nothing_is_said() -> None:
    times = [1, 2, 3, 4, 500, 501, 502]
    lines = seen([], *shares("w", times, [1.0] * 7), observed_at=600, whole=False)
    assert [part[1:] for part in parts(lane(lines, "w"))] == [(1, 2), (2, 3), (3, 4), (500, 501), (501, 502)]


@pytest.mark.parametrize(("reason", "kind", "text"), [
    (None, "dead", "dead: ValueError: planted"), ("failed", "dead", "dead: ValueError: planted"),
    ("done", "done", "done"), ("aborted", "done", "was told to stop"),
])  # fmt: skip
def test_a_worker_is_dead_only_if_it_died(reason: str | None, kind: str, text: str) -> None:
    events = [
        event(5, "worker_up", worker="w"),
        event(9, "exception", worker="w", type="ValueError", message="planted\nmore"),
        event(10, "worker_down", worker="w", reason=reason), event(10.5, "worker_down", worker="w"),
    ]  # fmt: skip
    found = lane(seen(events, ended_at=30, state="FAILED"), "w")
    assert parts(found) == [("up", 5, 10), (kind, 10, 30)] and found.parts[-1].text == text
    assert [(mark.at, mark.kind, mark.text) for mark in found.marks] == [(9, "exception", "ValueError: planted")]


def test_a_worker_that_steps_again_has_not_stayed_dead() -> None:
    events = [event(5, "worker_down", worker="w"), event(8, "worker_up", worker="w")]
    steps = series("loss", "w", [1, 2, 3, 4, 8, 9, 10], [1] * 7)
    assert ("dead", 5, 8) in parts(lane(seen(events, steps), "w"))
    assert ("dead", 5, 8) in parts(lane(seen(events[:1], steps), "w")), "its own next step is word enough"


def test_a_stall_is_drawn_from_its_last_step_until_it_is_over() -> None:
    stall = event(30, "stalled", step=4, silent_s=20.0)
    assert ("stalled", 10, 100) in parts(lane(seen([stall]), None))
    over = lane(seen([stall, event(45, "stall_over", step=5)]), None)
    assert ("stalled", 10, 45) in parts(over) and "no step since step 4" in over.parts[-1].text


def test_a_worker_that_nothing_was_written_down_of_has_an_empty_lane() -> None:
    lines = seen([], workers=["drafter-10", "drafter-2"])
    assert [(one.name, one.parts, one.marks) for one in lines.lanes] == [
        (None, [], []), ("drafter-2", [], []), ("drafter-10", [], []),
    ]  # fmt: skip


def test_what_began_before_events_that_were_not_read_is_known_only_up_to_them() -> None:
    events = [
        event(2, "phase", phase="train"), event(3, "phase", phase="checkpoint"), event(3, "worker_down", worker="w"),
        event(80, "phase", phase="train"),
    ]  # fmt: skip
    lines = seen(events, workers=["w"], unread=(4, 80))
    assert parts(lane(lines, None)) == [("train", 2, 3), ("save", 3, 4), ("train", 80, 100)]
    assert parts(lane(lines, "w")) == [("dead", 3, 4)]


def test_a_run_that_said_nothing_is_known_to_have_run() -> None:
    lines = seen([event(1, "started"), event(4, "program_ended", code=3)], ended_at=5, state="FAILED")
    assert parts(lane(lines, None)) == [("phase", 1, 4)]
    assert "neither a phase nor a step" in lane(lines, None).parts[0].text


def test_an_exception_that_is_nobodys_is_the_runs() -> None:
    events = [event(3, "exception", type="KeyError", message=""), event(4, "exception", worker="ghost", type="E")]
    assert [mark.text for mark in lane(seen(events), None).marks] == ["KeyError", "E"]
