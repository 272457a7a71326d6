"""The trainer as specctl sees it: a process with exit codes, lines, records, signals and dying workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import REPOSITORY, TrainerProcess, losses, poll, records, write_config
from trainer.checkpoint import steps_on_disk

Start = Callable[..., TrainerProcess]
LONG = 100_000

BREAK = """
import threading, trainer.replica
original = trainer.replica.Replica.loss_and_gradients
def broken(self, batch):
    if batch.step == 3 and threading.current_thread().name == "drafter-1":
        raise ValueError("planted in drafter-1")
    return original(self, batch)
trainer.replica.Replica.loss_and_gradients = broken
"""
BREAK_TARGET = """
import trainer.model.target
original = trainer.model.target.Target.features
calls = []
def broken(self, ids):
    calls.append(1)
    if len(calls) == 5:
        raise KeyError("planted in the target")
    return original(self, ids)
trainer.model.target.Target.features = broken
"""
HANG = """
import threading, time, trainer.replica, trainer.stopping
trainer.stopping.REPEAT_IGNORED_S = 0.5
original = trainer.replica.Replica.loss_and_gradients
def hang(self, batch):
    if batch.step == 3:
        time.sleep(600)
    return original(self, batch)
trainer.replica.Replica.loss_and_gradients = hang
"""
BREAK_ONE_AND_HANG_ANOTHER = """
import threading, time, trainer.replica, trainer.train
trainer.train.FAILED_WORKERS_TIMEOUT_S = 1.0
original = trainer.replica.Replica.loss_and_gradients
stuck = threading.Event()
def broken(self, batch):
    if batch.step == 3 and threading.current_thread().name == "drafter-1":
        stuck.wait()
        raise ValueError("planted in drafter-1")
    if batch.step == 3:
        stuck.set()
        time.sleep(600)
    return original(self, batch)
trainer.replica.Replica.loss_and_gradients = broken
"""
HANG_IN_IMPORT = """
import sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            print("importing", flush=True)
            while True:  # one long sleep would miss a signal that comes right before it
                time.sleep(0.05)
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def config(settings: dict[str, Any], tmp_path: Path) -> Path:
    return write_config({**settings, "steps": LONG, "checkpoint_every": LONG}, tmp_path / "config.yaml")


def test_a_run_to_its_end_says_phases_steps_and_how_it_ended(start_trainer: Start, settings: dict[str, Any],
                                                             tmp_path: Path) -> None:  # fmt: skip
    run = start_trainer(write_config(settings, tmp_path / "config.yaml"))
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    phases = [line.removeprefix("phase=") for line in lines if re.fullmatch("phase=[a-z_]+", line)]
    assert phases == ["import", "data", "load_target", "compile_warmup", "train", "checkpoint", "train"]
    assert "phase=compile_warmup units=0 (nothing compiles on the CPU)" in lines
    for step in range(1, 7):
        first = next(index for index, line in enumerate(lines) if line.startswith(f"step={step} "))
        assert re.fullmatch(r"worker=target-0 tok/s=\d+\.\d", lines[first - 1])
        assert re.fullmatch(rf"step={step} worker=drafter-0 loss=\d+\.\d{{4}} tok/s=\d+\.\d", lines[first])
        assert re.fullmatch(rf"step={step} worker=drafter-1 loss=\d+\.\d{{4}} tok/s=\d+\.\d", lines[first + 1])
        assert re.fullmatch(
            rf"step={step} loss=\d+\.\d{{4}} tok/s=\d+\.\d lr=\d\.\d\de-\d\d grad_norm=\d+\.\d\d queue=\d/4"
            r" wait_target=\d+% wait_drafter=\d+% bottleneck=(loader|target|drafter)", lines[first + 2],
        )  # fmt: skip
    assert lines[-1] == f"all 6 steps are done: python -m trainer export {run.run_dir} --to DIR makes what servers load"
    assert "\x1b" not in out and "\r" not in out
    assert sorted(event["worker"] for event in run.events("worker_up")) == [
        "drafter-0", "drafter-1", "loader-0", "target-0",
    ]  # fmt: skip
    assert {event["reason"] for event in run.events("worker_down")} == {"done"}
    assert [event["step"] for event in run.events("checkpoint")] == [6]
    (last,) = run.events("ended")
    assert last == run.events()[-1]
    assert (last["code"], last["stopped"], last["attempt"], last["nonce"]) == (0, False, 2, "abc123")
    beat = run.heartbeat()
    assert (beat["run_id"], beat["step"], beat["pid"]) == ("a-run", 6, run.process.pid)
    assert not (tmp_path / "out").exists()


def test_sigterm_finishes_the_step_checkpoints_and_exits_zero_and_a_quick_repeat_changes_nothing(
    start_trainer: Start, config: Path
) -> None:
    run = start_trainer(config)
    run.wait_for_step(3)
    run.terminate()
    run.terminate()
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    (stopped_at,) = steps_on_disk(run.run_dir / "checkpoints")
    lines = out.splitlines()
    assert lines.index("phase=stopping") < next(
        index for index, line in enumerate(lines) if line.startswith(f"checkpoint step-{stopped_at} saved in ")
    )
    assert lines[-1] == f"stopped with {stopped_at} of {LONG} steps done: the same command goes on from there"
    assert records(run.run_dir, "metrics.jsonl")[-1]["step"] == stopped_at
    (ended,) = run.events("ended")
    assert ended["stopped"] is True and ended["code"] == 0
    assert run.heartbeat()["phase"] == "stopping"

    again = start_trainer(config, "--resume")
    again.wait_for_step(stopped_at + 1)
    again.terminate()
    code, out, _ = again.finish()
    assert code == 0 and f"resume from step-{stopped_at} " in out
    steps = [record["step"] for record in records(run.run_dir, "metrics.jsonl") if record["worker"] is None]
    assert steps == list(range(1, len(steps) + 1))
    assert len(losses(run.run_dir)) == len(steps)


def test_sigterm_before_the_first_step_ends_at_once_as_stopped(start_trainer: Start, config: Path) -> None:
    run = start_trainer(config, planted=HANG_IN_IMPORT)
    assert run.process.stdout is not None
    while run.process.stdout.readline() != "importing\n":
        assert run.process.poll() is None
    run.terminate()
    code, out, err = run.finish(timeout_s=10)
    assert (code, err) == (0, "") and out.endswith("phase=stopping\n")
    (ended,) = run.events("ended")
    assert ended["stopped"] is True
    assert run.heartbeat()["phase"] == "stopping"


def test_a_later_second_sigterm_ends_a_stuck_step_at_once(start_trainer: Start, config: Path) -> None:
    run = start_trainer(config, planted=HANG)
    run.wait_for_step(2)
    run.terminate()
    poll(lambda: run.heartbeat()["phase"] == "stopping")
    assert run.process.poll() is None

    def ended_by_another_signal() -> bool:
        run.terminate()
        return run.process.poll() is not None

    poll(ended_by_another_signal)
    code, _, err = run.finish()
    assert (code, err) == (143, "")
    (ended,) = run.events("ended")
    assert ended["stopped"] is False and ended["code"] == 143


@pytest.mark.parametrize(
    ("planted", "worker", "last"),
    [
        (BREAK, "drafter-1", "ValueError: planted in drafter-1"),
        (BREAK_TARGET, "target-0", "KeyError: 'planted in the target'"),
    ],
)
def test_the_first_worker_to_die_ends_the_process_with_its_name_and_its_own_traceback(
    start_trainer: Start, config: Path, planted: str, worker: str, last: str
) -> None:
    run = start_trainer(config, planted=planted)
    code, _, err = run.finish()
    assert code == 1
    assert err.startswith(f"Exception in thread {worker}:\nTraceback (most recent call last):\n")
    assert err.count("Traceback") == 1 and err.rstrip().endswith(last)
    (event,) = run.events("exception")
    assert event["worker"] == worker and err.endswith(event["traceback"])
    reasons = {event["worker"]: event["reason"] for event in run.events("worker_down")}
    assert reasons.keys() == {"loader-0", "target-0", "drafter-0", "drafter-1"}
    assert [name for name, reason in reasons.items() if reason == "failed"] == [worker]
    assert run.events()[-1]["event"] == "ended" and run.events()[-1]["code"] == 1


def test_records_that_cannot_be_written_hide_no_workers_failure(start_trainer: Start, config: Path, tmp_path: Path
                                                                ) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    (run_dir / "events.jsonl").mkdir(parents=True)
    for name in ("metrics.jsonl", "heartbeat.json.tmp"):
        (run_dir / name).symlink_to("/dev/full")
    code, out, err = start_trainer(config, planted=BREAK, run_dir=run_dir).finish()
    assert code == 1 and "step=2 worker=drafter-1 " in out
    said, traceback = err.split("Exception in thread drafter-1:\n")
    assert sorted(said.splitlines()) == [
        "trainer: events.jsonl is not written: Is a directory",
        "trainer: heartbeat.json is not written: No space left on device",
        "trainer: metrics.jsonl is not written: No space left on device",
    ]
    assert traceback.startswith("Traceback (most") and traceback.endswith("ValueError: planted in drafter-1\n")


def test_a_worker_stuck_in_its_step_does_not_keep_a_failed_run_alive(start_trainer: Start, config: Path) -> None:
    run = start_trainer(config, planted=BREAK_ONE_AND_HANG_ANOTHER)
    poll(lambda: run.events("exception"))
    code, _, err = run.finish(timeout_s=10)
    assert code == 1 and err.endswith("ValueError: planted in drafter-1\ntrainer: left behind: drafter-0\n")
    assert run.events()[-1]["event"] == "ended"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": "many"}, r"trainer: \S*config\.yaml:\d+: steps: needs a whole number"),
        ({"target": {"path": "/nowhere/model"}}, r"trainer: target\.path: no Hugging Face model in /nowhere/model"),
        ({"devices": {"target": ["cpu"], "drafter": ["cuda:77"]}}, r"trainer: devices: cuda:77 is not here"),
        ({"cuda_graphs": "on"}, r"trainer: cuda_graphs: on needs a GPU, and all devices are the CPU"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_exit_code_two(start_trainer: Start, settings: dict[str, Any],
                                                              tmp_path: Path, change: dict[str, Any], expected: str
                                                              ) -> None:  # fmt: skip
    run = start_trainer(write_config({**settings, **change}, tmp_path / "config.yaml"))
    code, _, err = run.finish()
    assert code == 2
    assert len(err.splitlines()) == 1 and re.match(expected, err)


def test_what_stands_where_checkpoints_go_is_told_as_what_it_is(start_trainer: Start, settings: dict[str, Any],
                                                                 tmp_path: Path) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("no directory")
    code, _, err = start_trainer(write_config(settings, tmp_path / "config.yaml"), run_dir=run_dir).finish()
    assert code == 2 and "checkpoints, where checkpoints go, cannot be looked into: Not a directory" in err
    assert "Traceback" not in err


def test_a_run_outlives_who_read_along(start_trainer: Start, settings: dict[str, Any], tmp_path: Path) -> None:
    run = start_trainer(write_config(settings, tmp_path / "short.yaml"))
    assert run.process.stdout and run.process.stderr
    run.process.stdout.close()
    said = run.process.stderr.read()
    assert run.process.wait(60) == 0 and run.events()[-1]["event"] == "ended"
    assert said == "trainer: nobody reads any more what the run says; it goes on, and its records have it all\n"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="root may write anywhere, and cannot be kept from it here")
def test_a_directory_that_cannot_be_written_is_told_before_the_training(settings: dict[str, Any], tmp_path: Path
                                                                        ) -> None:  # fmt: skip
    settings |= {"output_dir": str(tmp_path / "locked")}
    settings["data"]["cache"] = str(tmp_path / "token-cache")
    config = write_config(settings, tmp_path / "config.yaml")
    (tmp_path / "locked").mkdir(mode=0o555)
    rights = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] * (os.geteuid() == 0)
    done = subprocess.run([*rights, sys.executable, "-m", "trainer", "train", config], capture_output=True, text=True,
                          cwd=REPOSITORY)  # fmt: skip
    assert done.returncode == 2 and "step=1" not in done.stdout
    assert f"output_dir: nothing can be written to {tmp_path}/locked, where checkpoints go" in done.stderr


def test_without_specctl_the_records_go_to_the_output_directory(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.__main__ import main

    for name in ("SPECCTL_RUN_DIR", "SPECCTL_RUN_ID", "SPECCTL_ATTEMPT", "SPECCTL_NONCE"):
        monkeypatch.delenv(name, raising=False)
    config = write_config({**settings, "steps": 1}, tmp_path / "config.yaml")
    assert main(["train", str(config)]) == 0
    assert json.loads((tmp_path / "out" / "heartbeat.json").read_text())["run_id"] == "out"
    assert len(losses(tmp_path / "out")) == 1

    in_a_file = {**settings, "output_dir": str(config / "out")}
    assert main(["train", str(write_config(in_a_file, tmp_path / "other.yaml"))]) == 2
    assert capsys.readouterr().err == f"trainer: output_dir: cannot make {config / 'out'}: Not a directory\n"


def test_a_second_training_in_the_same_directory_is_refused_and_the_lock_dies_with_the_first(
    start_trainer: Start, config: Path
) -> None:
    first = start_trainer(config)
    first.wait_for_step(1)
    told = first.events()
    code, out, err = start_trainer(config).finish()
    assert (code, out) == (2, "")
    assert err == (
        f"trainer: another training (process {first.process.pid}) is writing to {first.run_dir}; stop that one, or"
        " choose another output_dir\n"
    )
    assert first.events() == told, "it has left no word there"
    first.process.kill()
    first.finish()
    again = start_trainer(config)
    poll(lambda: [event["phase"] for event in again.events("phase")].count("train") == 2)
    again.terminate()
    assert again.finish()[0] == 0
