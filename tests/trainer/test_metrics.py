"""What a run says: the step lines and the records."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import poll, records
from trainer.config import ConfigError
from trainer.report.records import RunIdentity, identity_from_environment
from trainer.report.reporter import Reporter, RunStep, WorkerStep
from trainer.report.throughput import SpeedChange


@pytest.fixture
def reporter(tmp_path: Path) -> Any:
    reporter = Reporter(RunIdentity(directory=tmp_path, run_id="a-run", attempt=3, nonce="n0"))
    reporter.open()
    yield reporter
    reporter.ended(code=0, stopped=False)


A_STEP = RunStep(
    step=12, steps=20, loss=5.12, tok_s=310.44, positions_s=99.5, recent_tok_s=300.0, mfu=0.412, lr=6e-4, epoch=1,
    tokens=4096, grad_norm=1.234, slot_p=[0.5, None], queued=2, queue_size=4, step_s=0.5, compiles=7,
    memory_peak_bytes={"cuda:0": 1 << 30},
    workers=[
        WorkerStep(name="loader-0", busy=0.2, wait_room=0.8),
        WorkerStep(name="target-0", tok_s=400.04, busy=0.9, wait_input=0.1),
        WorkerStep(name="drafter-0", loss=5.12341, tok_s=155.2, mfu=0.3, busy=0.6, wait_input=0.15, wait_peers=0.25),
    ],
)  # fmt: skip


def test_a_step_is_a_plain_line_per_worker_and_one_for_the_run(reporter: Reporter, capsys: pytest.CaptureFixture[str]
                                                               ) -> None:  # fmt: skip
    reporter.step(A_STEP)
    assert capsys.readouterr().out == (
        "worker=target-0 tok/s=400.0\n"
        "step=12 worker=drafter-0 loss=5.1234 tok/s=155.2\n"
        "step=12 loss=5.1200 tok/s=310.4 mfu=41.2% lr=6.00e-04 grad_norm=1.23 queue=2/4 wait_target=15%"
        " wait_drafter=0% bottleneck=target\n"
    )


def test_a_run_without_some_of_its_workers_says_so_in_every_step(
    reporter: Reporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter.step(dataclasses.replace(A_STEP, lost=["drafter-1", "target-2"]))
    assert capsys.readouterr().out.endswith(" bottleneck=target lost=drafter-1,target-2\n")
    assert records(tmp_path, "metrics.jsonl")[0]["lost"] == ["drafter-1", "target-2"]


@pytest.mark.parametrize(
    ("waits", "bottleneck"),
    [
        ({"target": {"wait_room": 0.9}, "drafter": {"wait_peers": 0.9}, "loader": {"wait_room": 0.9}}, "drafter"),
        ({"target": {"wait_input": 0.9}, "drafter": {"wait_input": 0.9}, "loader": {}}, "loader"),
        ({"target": {"wait_input": 0.1}, "drafter": {"wait_input": 0.4}, "loader": {"wait_room": 0.9}}, "target"),
    ],
)
def test_the_bottleneck_is_the_stage_that_waits_for_no_other(waits: dict[str, Any], bottleneck: str) -> None:
    workers = [WorkerStep(name=f"{stage}-{one}", **waits[stage]) for stage in waits for one in range(2)]
    assert dataclasses.replace(A_STEP, workers=workers).bottleneck == bottleneck


def test_metrics_and_events_carry_source_attempt_and_nonce(reporter: Reporter, tmp_path: Path) -> None:
    reporter.step(A_STEP)
    reporter.phase("train")
    run, loader, target, worker = records(tmp_path, "metrics.jsonl")
    stamp = {"source": "trainer", "attempt": 3, "nonce": "n0"}
    assert {**run, "time": 0} == {
        "time": 0, **stamp, "step": 12, "loss": 5.12, "tok_s": 310.44, "positions_s": 99.5, "recent_tok_s": 300.0,
        "mfu": 0.412, "lr": 6e-4, "grad_norm": 1.234, "worker": None, "epoch": 1, "tokens": 4096, "queued": 2,
        "queue_size": 4, "compiles": 7, "memory_peak_bytes": {"cuda:0": 1 << 30}, "bottleneck": "target",
        "skipped": 0, "slot_p_1": 0.5, "slot_p_2": None,
    }  # fmt: skip
    assert worker["worker"] == "drafter-0" and worker["grad_norm"] is None
    assert worker["mfu"] == 0.3 and worker["wait_peers"] == 0.25
    assert loader["worker"] == "loader-0" and loader["tok_s"] is None and loader["wait_room"] == 0.8
    assert {**target, "time": 0} == {
        "time": 0, **stamp, "step": 12, "loss": None, "tok_s": 400.04, "lr": None, "grad_norm": None,
        "worker": "target-0", "busy": 0.9, "wait_input": 0.1, "wait_room": 0.0, "wait_peers": 0.0,
    }  # fmt: skip
    (event,) = records(tmp_path, "events.jsonl")
    assert {**event, "time": 0} == {"time": 0, **stamp, "event": "phase", "phase": "train"}


def test_a_phase_is_said_once_and_nothing_follows_on_stopping(reporter: Reporter, capsys: pytest.CaptureFixture[str]
                                                              ) -> None:  # fmt: skip
    for name in ("data", "data", "stopping", "checkpoint", "train"):
        reporter.phase(name)
    assert capsys.readouterr().out == "phase=data\nphase=stopping\n"


def test_the_heartbeat_goes_on_while_its_step_does_not(reporter: Reporter, tmp_path: Path) -> None:
    def beat() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "heartbeat.json").read_text()))

    reporter.phase("train")
    reporter.advanced(4)
    reporter.checkpointing(True)
    first = beat()
    assert (first["run_id"], first["attempt"], first["nonce"]) == ("a-run", 3, "n0")
    assert (first["phase"], first["step"]) == ("train", 4)
    assert first["checkpointing"] is True and first["gpu_memory_bytes"] == {}
    later = poll(lambda: beat() if beat()["monotonic_s"] > first["monotonic_s"] else None, timeout_s=10)
    assert later["step"] == 4 and later["time"] >= first["time"]


def test_a_run_that_has_become_slower_says_so_in_a_line_and_an_event(
    reporter: Reporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter.speed(40, SpeedChange(kind="decay", tok_s=2400.0, median_tok_s=5005.0))
    line = "decay: after step 40: tok/s has fallen: 2,400 is 48% of the run's median 5,005\n"
    assert capsys.readouterr().out == line
    (event,) = records(tmp_path, "events.jsonl")
    assert (event["event"], event["step"], event["tok_s"], event["median_tok_s"]) == ("decay", 40, 2400.0, 5005.0)


def test_an_exception_has_pythons_own_form_and_an_event(reporter: Reporter, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    try:
        raise ValueError("planted")
    except ValueError as error:
        reporter.exception("drafter-1", error)
    text = capsys.readouterr().err
    assert re.fullmatch(
        r"Exception in thread drafter-1:\nTraceback \(most recent call last\):\n  File .*\nValueError: planted\n",
        text, re.DOTALL,
    )  # fmt: skip
    (event,) = records(tmp_path, "events.jsonl")
    assert (event["event"], event["worker"], event["type"], event["message"]) == (
        "exception", "drafter-1", "ValueError", "planted",
    )  # fmt: skip
    assert text.endswith(event["traceback"])


def test_who_a_run_is_comes_from_the_environment_whole_or_not_at_all(tmp_path: Path) -> None:
    assert identity_from_environment({}) is None
    whole = {
        "SPECCTL_RUN_DIR": str(tmp_path), "SPECCTL_RUN_ID": "r", "SPECCTL_ATTEMPT": "2", "SPECCTL_NONCE": "n",
    }  # fmt: skip
    assert identity_from_environment(whole) == RunIdentity(directory=tmp_path, run_id="r", attempt=2, nonce="n")
    with pytest.raises(ConfigError, match="SPECCTL_NONCE is not"):
        identity_from_environment({key: value for key, value in whole.items() if key != "SPECCTL_NONCE"})
    with pytest.raises(ConfigError, match="SPECCTL_ATTEMPT must be a number"):
        identity_from_environment({**whole, "SPECCTL_ATTEMPT": "two"})


def test_half_a_line_that_a_crash_has_left_spoils_no_line_after_it(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "phase"}\n{"event": "pha')
    reporter = Reporter(RunIdentity(directory=tmp_path, run_id="test"))
    reporter.open()
    reporter.ended(code=0, stopped=False)
    lines = (tmp_path / "events.jsonl").read_text().split("\n")
    assert lines[1] == '{"event": "pha' and json.loads(lines[2])["event"] == "ended" and lines[3:] == [""]
