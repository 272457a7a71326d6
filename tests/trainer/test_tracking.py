"""What trackers are told, read back with readers of their own; and that none of them can hold up or end a run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import IMPORTS, TrainerProcess, losses, poll, records, write_config
from trainer.config import ConfigError
from trainer.report.records import RunIdentity
from trainer.report.tracking import Feeder, Tracking, check, last_step
from trainer.sections import TrackingConfig

Start = Callable[..., TrainerProcess]


class Told:
    """What a run has said and noted."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def event(self, name: str, **facts: Any) -> None:
        self.events.append((name, facts))


@pytest.fixture
def told() -> Told:
    return Told()


def track(directory: Path, config: dict[str, Any], steps: Mapping[int, float], told: Told, *, done: int = 0,
          nonce: str = "n0") -> None:  # fmt: skip
    """As a process does that trains these steps, with these losses, after `done` of them."""
    tracking = Tracking(
        TrackingConfig.model_validate(config), RunIdentity(directory=directory, run_id="a-run", nonce=nonce),
        {"seed": 7, "target": {"path": "somewhere"}}, steps_done=done, say=told.say, event=told.event,
    )  # fmt: skip
    for step, loss in steps.items():
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        tracking.log(step, {"train/loss": loss, "speed/tok_s": 10.0 * step})
    assert tracking.close(code=0, timeout_s=60) == [], told.lines


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars(directory: Path, tag: str) -> dict[int, float]:
    """As TensorBoard shows them; a step that is there twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / "tensorboard")).Reload().Scalars(tag)
    assert len({one.step for one in found}) == len(found)
    return {one.step: one.value for one in found}


def test_a_run_writes_event_files_by_default_with_the_figures_of_its_records(
    start_trainer: Start, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = write_config({**settings, "steps": 5, "peak_tflops": 0.01}, tmp_path / "config.yaml")
    code, out, err = start_trainer(config).finish()
    assert code == 0 and err == "" and " mfu=" in out
    run = [record for record in records(tmp_path / "run", "metrics.jsonl") if record["worker"] is None]
    of_tags = {
        "train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm", "train/tokens": "tokens",
        "speed/tok_s": "tok_s", "speed/positions_s": "positions_s", "speed/mfu": "mfu",
        "slot_p/1": "slot_p_1", "slot_p/3": "slot_p_3",
    }  # fmt: skip
    for tag, key in of_tags.items():
        assert scalars(tmp_path / "run", tag) == {one["step"]: pytest.approx(one[key]) for one in run}
        assert all(one[key] > 0 for one in run)
    # 4 rows of 48 tokens a step, each with 8 blocks of 3 supervised slots; a block at a row's end may have fewer.
    assert [one["tokens"] for one in run] == [192, 384, 576, 768, 960]
    assert 0.8 * 96 < 192 * run[-1]["positions_s"] / run[-1]["tok_s"] < 96.01
    assert list(run[-1]["memory_peak_bytes"]) == ["cpu"] and run[-1]["epoch"] == 0
    for tag in ("busy/drafter-1", "wait_room/loader-0", "loss/drafter-0", "memory_gib/cpu"):
        assert len(scalars(tmp_path / "run", tag)) == 5


def test_steps_that_are_trained_again_after_a_kill_are_shown_as_they_were_the_second_time(tmp_path: Path, told: Told
                                                                                          ) -> None:  # fmt: skip
    track(tmp_path, {}, {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}, told)
    track(tmp_path, {}, {3: 30.0, 4: 20.0, 5: 10.0}, told, done=2)
    assert scalars(tmp_path, "train/loss") == {1: 5.0, 2: 4.0, 3: 30.0, 4: 20.0, 5: 10.0}
    assert told.lines == []


def test_without_its_package_there_are_no_event_files_and_a_word(tmp_path: Path, told: Told,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    track(tmp_path, {}, {1: 5.0}, told)
    assert [line.partition(",")[0] for line in told.lines] == ["tracking.tensorboard: no event files"]


# --- whoever is slow, or raises ---------------------------------------------------------------------------------------


class Slow:
    """Lets a test decide when it goes on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.steps: list[int] = []

    def log(self, step: int, scalars: Mapping[str, float], time_s: float) -> None:
        self.go.wait()
        self.steps.append(step)

    def flush(self) -> None: ...

    def close(self, code: int) -> None: ...


def test_a_tracker_that_is_too_slow_loses_the_oldest_steps_and_holds_up_nobody(told: Told) -> None:
    slow = Slow()
    feeder = Feeder("slow", lambda: slow, told.say, told.event, waiting=3)
    for step in range(1, 101):
        feeder.put(step, {})
    slow.go.set()
    feeder.end(0)
    assert feeder.join(30.0)
    # It may have held one in its hand; the end takes a place in the queue, too.
    assert slow.steps[-2:] == [99, 100] and len(slow.steps) <= 3
    (line,) = told.lines
    assert line.startswith(f"tracking.slow: was too slow for {100 - len(slow.steps)} steps")


def test_a_tracker_that_hangs_is_left_and_named(told: Told) -> None:
    slow = Slow()
    feeder = Feeder("hung", lambda: slow, told.say, told.event)
    feeder.put(1, {})
    feeder.end(0)
    assert not feeder.join(0.0)
    assert told.lines == ["tracking.hung: not done after 0 s, and left; metrics.jsonl has it all"]
    slow.go.set()
    assert feeder.join(30.0)


@pytest.mark.parametrize("where", ["made", "told", "closed"])
def test_a_tracker_that_raises_is_told_of_once_and_no_more(where: str, told: Told) -> None:
    class Broken(Slow):
        def log(self, step: int, scalars: Mapping[str, float], time_s: float) -> None:
            if where == "told":
                raise ValueError("no\nroom")

        def close(self, code: int) -> None:
            raise ValueError("no\nroom")

    def make() -> Broken:
        if where == "made":
            raise ValueError("no\nroom")
        return Broken()

    feeder = Feeder("broken", make, told.say, told.event)
    for step in range(5):
        feeder.put(step, {})
    feeder.end(1)
    assert not feeder.join(30.0)
    assert told.lines == ["tracking.broken: told no more of this run: ValueError: no room"]
    assert told.events == [("tracker_failed", {"tracker": "broken", "type": "ValueError", "message": "no room"})]


def test_event_files_that_cannot_be_written_end_no_run(start_trainer: Start, settings: dict[str, Any], tmp_path: Path
                                                       ) -> None:  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("in the way")
    run = start_trainer(write_config({**settings, "steps": 2}, tmp_path / "config.yaml"))
    code, out, err = run.finish()
    assert code == 0 and err == "trainer: left behind: tracker-tensorboard\n"
    assert out.count("tracking.tensorboard: told no more of this run: FileExistsError") == 1
    assert run.events()[-1]["event"] == "ended"


# --- who is asked for and cannot be -----------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("wandb", "trackio"):
        with pytest.raises(ConfigError, match=rf"tracking\.{name}: {name} is not installed; pip install {name}"):
            check(TrackingConfig.model_validate({name: {"project": "p"}}), {})


def test_wandb_online_needs_its_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    online = TrackingConfig.model_validate({"wandb": {"project": "p"}})
    with pytest.raises(ConfigError, match=r"tracking\.wandb: WANDB_API_KEY is not set .* or mode: offline"):
        check(online, {})
    check(online, {"WANDB_API_KEY": "a key"})
    check(TrackingConfig.model_validate({"wandb": {"project": "p", "mode": "offline"}}), {})


@pytest.mark.parametrize(
    ("text", "step"),
    [("", 0), ('{"step": 7, "loss": 1}\n', 7), ('{"step": 7}\n{"step": 8, "lo', 7), ("no json\n", 0)],
)
def test_the_last_step_on_record_is_read_from_the_end(tmp_path: Path, text: str, step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0
    path.write_text('{"step": 1}\n' * 9999 + text)
    assert last_step(path, tail_bytes=len(text)) == step


# --- Weights & Biases -------------------------------------------------------------------------------------------------

BLOCK, FILE_HEADER, CHUNK_HEADER = 32768, 7, 7


def wandb_records(path: Path) -> Iterator[Any]:
    """Of a .wandb file, which is a log in LevelDB's format: blocks of chunks, of which several may make a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), FILE_HEADER, b""
    while at + CHUNK_HEADER <= len(data):
        if BLOCK - at % BLOCK < CHUNK_HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + CHUNK_HEADER : at + CHUNK_HEADER + length]
        at += CHUNK_HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def wandb_runs(directory: Path) -> list[tuple[Any, dict[int, float]]]:
    """The run's description and its losses by step, of each process; none before all is in the files."""
    found = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        records = list(wandb_records(path))
        if not records or records[-1].WhichOneof("record_type") not in ("exit", "footer"):
            return []
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        history = {}
        for record in records:
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "train/loss" in items:
                history[json.loads(items["_step"])] = json.loads(items["train/loss"])
        found.append((run, history))
    return found


WANDB = {"tensorboard": "false", "wandb": {"project": "drafters", "mode": "offline"}}


def test_wandb_offline_has_every_step_once_under_the_runs_own_name(tmp_path: Path, told: Told) -> None:
    pytest.importorskip("wandb")
    track(tmp_path, WANDB, {1: 5.0, 2: 4.0, 3: 3.0}, told)
    track(tmp_path, WANDB, {2: 4.0, 3: 3.0, 4: 2.0}, told, done=1)
    (first, losses_1), (second, losses_2) = poll(lambda: wandb_runs(tmp_path))
    for run in (first, second):
        assert (run.run_id, run.display_name, run.project) == ("a-run", "a-run", "drafters")
    assert (losses_1, losses_2) == ({1: 5.0, 2: 4.0, 3: 3.0}, {4: 2.0})
    settings = {update.key: json.loads(update.value_json) for update in first.config.update}
    assert settings["seed"] == 7 and settings["target"] == {"path": "somewhere"}
    assert told.lines == []


def test_wandb_whose_own_process_is_stopped_with_the_run_keeps_what_it_has_written_and_fails_nothing(
    start_trainer: Start, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    psutil = pytest.importorskip("psutil")
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # of this process, if it has had one
    tracking = {"tensorboard": False, "wandb": {"project": "drafters", "mode": "offline"}}
    run = start_trainer(write_config({**settings, "steps": 100_000, "tracking": tracking}, tmp_path / "config.yaml"))
    poll(lambda: max((path.stat().st_size for path in run.run_dir.glob("wandb/*/*.wandb")), default=0) > 9999)
    service = psutil.Process(run.process.pid).children()
    assert service
    for process in service:
        process.terminate()
    run.terminate()
    code, out, err = run.finish()
    assert code == 0 and "Traceback" not in err
    assert out.count("tracking.wandb: told no more of this run") <= 1
    assert run.events()[-1] | {"time": 0} == run.events("ended")[0] | {"time": 0, "code": 0, "stopped": True}
    (path,) = run.run_dir.glob("wandb/offline-run-*/*.wandb")
    assert any(record.WhichOneof("record_type") == "history" for record in wandb_records(path))


# --- trackio ----------------------------------------------------------------------------------------------------------


def test_trackio_has_every_step_once_under_the_runs_own_name(
    start_trainer: Start, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for steps in (2, 4):
        tracking = {"tensorboard": False, "trackio": {"project": "drafters"}}
        config = write_config({**settings, "steps": steps, "tracking": tracking}, tmp_path / "config.yaml")
        code, out, err = start_trainer(config).finish()
        assert code == 0 and err == "" and "Trackio" not in out
    asked = ["trackio", "get", "metric", "--project", "drafters", "--run", "a-run", "--metric", "train/loss", "--json"]
    shown = json.loads(subprocess.run([str(Path(sys.executable).with_name(asked[0])), *asked[1:]],
                                      capture_output=True, text=True, check=True).stdout)  # fmt: skip
    assert [value["step"] for value in shown["values"]] == [1, 2, 3, 4]
    assert [value["value"] for value in shown["values"]] == pytest.approx(losses(tmp_path / "run"))


# --- in a terminal ----------------------------------------------------------------------------------------------------


def in_terminal(argv: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code, and what a terminal of 100 columns has been sent."""
    import fcntl
    import pty
    import struct
    import termios

    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(argv[0], argv, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    sent = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while chunk := os.read(terminal, 1 << 16):
            sent += chunk
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), sent.decode()


def test_a_terminal_shows_how_far_the_run_is_and_gets_its_cursor_back_and_specctl_gets_lines(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    import re

    config = write_config({**settings, "steps": 3}, tmp_path / "config.yaml")
    argv = [sys.executable, "-m", "trainer", "train", str(config)]
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": IMPORTS}
    code, sent = in_terminal(argv, environment)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sent)
    assert code == 0
    assert re.search(r"3/3 .*left", shown) and re.search(r"loss \d+\.\d+  .*tok/s .*bottleneck \w+", shown)
    assert "phase=load_target" in shown and "checkpoint step-3 saved" in shown
    # A ^C that the terminal writes behind the last line would else begin another line, and leave this one behind.
    assert max(len(line) for line in re.split(r"[\r\n]+", shown) if line.startswith("loss ")) <= 95
    assert "worker=" not in shown and "step=" not in shown
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")
    assert len(losses(tmp_path / "out")) == 3

    (tmp_path / "run").mkdir()
    specctl = {"DIR": str(tmp_path / "run"), "ID": "r"}
    specctl = {f"SPECCTL_RUN_{key}": value for key, value in specctl.items()}
    specctl |= {"SPECCTL_ATTEMPT": "1", "SPECCTL_NONCE": "n"}
    code, sent = in_terminal(argv, {**environment, **specctl})
    assert code == 0 and "\x1b" not in sent
    assert re.search(r"^step=3 worker=drafter-1 loss=", sent, re.MULTILINE)


# --- bench ------------------------------------------------------------------------------------------------------------


def test_a_bench_measures_every_stage_and_leaves_nothing_behind(settings: dict[str, Any], tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch,
                                                                capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    from trainer.__main__ import main

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    config = write_config({**settings, "peak_tflops": 0.001}, tmp_path / "config.yaml")
    assert main(["bench", str(config), "--steps", "4", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["steps"] == 4 and found["warm_up_steps"] == 5
    assert list(found["stages"]) == [
        "data", "target forward", "hand-over", "drafter forward + backward", "exchange", "optimizer", "step",
    ]  # fmt: skip
    for spread in found["stages"].values():
        assert 0 <= spread["low_ms"] <= spread["median_ms"] <= spread["high_ms"]
    assert set(found["workers"]) == {"loader-0", "target-0", "drafter-0", "drafter-1"}
    assert found["tok_s"] > 0 and found["positions_s"] > 0
    assert found["mfu"] == pytest.approx(found["tflop_s"] / 0.001, rel=0.1)
    assert found["compiles"] == {"warm_up": 0, "after": 0} and found["bottleneck"] in ("loader", "target", "drafter")
    assert found["memory"]["cpu"]["planned_bytes"] > 0
    assert list(scratch.iterdir()) == [] and not (tmp_path / "out").exists()

    from rich.console import Console

    from trainer import bench

    console = Console(width=120, record=True)
    console.print(bench.table(found))
    shown = console.export_text()
    for said in ("drafter forward + backward", "tok/s", "MFU", "memory of cpu", "after the warm-up", "bottleneck"):
        assert said in shown
