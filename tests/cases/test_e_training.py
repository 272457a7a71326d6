"""Group E of public bug reports, on the trainer's side: a worker that fails, a full disk, half a checkpoint, a stop.

Elsewhere, in tests/trainer: compiling in two threads (E1) in test_compile_race.py; a backward that fails after a good
forward (E4) in test_doctor.py, and at the real width (E5) in tests/gpu/test_doctor.py; a step that does not come (E8)
in test_pipeline.py; a loss that is not finite (E9) in test_nonfinite.py; tok/s (E10) in test_throughput.py; signals
(E13) in test_process.py. What specctl makes of it all is in test_c_e_f_verdicts.py.
"""

from __future__ import annotations

import random
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import settings, start_trainer, tiny_target, train
from tests.trainer.support import REPOSITORY, TrainerProcess, events, losses, write_config
from trainer import checkpoint, compile_plan, feed, optim, replica, replicas
from trainer.checkpoint import MARKER, Checkpoint, CheckpointDamaged, steps_on_disk
from trainer.model import target
from trainer.report import reporter

__all__ = ["settings", "start_trainer", "tiny_target", "train"]

Train = Callable[..., Any]

# --- E3: a thread on another device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["target-0", "drafter-1"])
def test_e3_a_worker_whose_thread_is_on_another_device_ends_the_run_by_name_before_it_works(
    train: Train, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    settle = compile_plan.settle_thread

    def settled(device: torch.device, **options: Any) -> None:
        settle(torch.device("cuda:1") if threading.current_thread().name == worker else device, **options)

    monkeypatch.setattr(compile_plan, "settle_thread", settled)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    training = train(settings, expect=1)
    (event,) = events(tmp_path / "out", "exception")
    assert event["worker"] == worker and training.steps_done == 0
    assert event["message"] == "this thread is to work on cuda:1 and is on cuda:0"


# --- E6: a worker fails, and the main thread goes on ------------------------------------------------------------------

PLACES = {
    "anchors": (feed, "step_blocks", "loader-0"),
    "target": (target.Target, "features", "target-0"),
    "hand-over": (replica.Replica, "accept", "target-0"),
    "forward": (replica.Replica, "loss_and_gradients", "drafter-1"),
    "loss": (replica, "block_loss", "drafter-1"),
    "exchange": (replicas.Replicas, "average", "drafter-1"),
    "optimizer": (optim.AdamW, "step", "drafter-1"),
    "log": (reporter.Reporter, "step", "drafter-0"),
    "save": (checkpoint, "save", "drafter-0"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit(0)], ids=["error", "exit"])
def test_e6_whoever_fails_wherever_ends_the_run_by_name(
    train: Train, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str,
    error: BaseException,
) -> None:  # fmt: skip
    owner, name, worker = PLACES[place]
    original, calls = getattr(owner, name), []

    def fails(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name == worker:
            calls.append(1)
            if len(calls) == 3:
                raise error
        return original(*args, **options)

    monkeypatch.setattr(owner, name, fails)
    train({**settings, "steps": 9, "checkpoint_every": 2}, expect=1)
    (event,) = events(tmp_path / "out", "exception")
    assert event["worker"] == worker and type(error).__name__ in event["traceback"]
    reasons = {event["worker"]: event["reason"] for event in events(tmp_path / "out", "worker_down")}
    assert [name for name, reason in reasons.items() if reason == "failed"] == [worker]
    assert reasons.keys() == {"loader-0", "target-0", "drafter-0", "drafter-1"}


# --- E11: a full disk, half a checkpoint ------------------------------------------------------------------------------


@pytest.fixture
def no_large_files() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_e11_a_write_that_fails_fails_the_save_and_leaves_the_last_good_checkpoint(
    train: Train, settings: dict[str, Any], tmp_path: Path, no_large_files: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings |= {"keep_checkpoints": 1, "checkpoint_every": 2}
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0}
    whole = train({**settings, "steps": 6, "output_dir": str(tmp_path / "whole")})
    root = train({**settings, "steps": 2}).saves.root
    size = (root / "step-2" / checkpoint.OPTIMIZER).stat().st_size

    def limit(_training: Any) -> None:
        no_large_files(size - 1)

    train({**settings, "steps": 6}, expect=1, before=limit)
    no_large_files(resource.RLIM_INFINITY)
    (event,) = events(tmp_path / "out", "exception")
    assert event["message"].startswith(f"checkpoint step-4 cannot be written to {root}: File too large (it takes ")
    assert event["message"].endswith(f" MiB); last good checkpoint: {root / 'step-2'}")
    assert capsys.readouterr().err.count("Traceback") == 1
    assert sorted(path.name for path in root.iterdir()) == ["run.json", "step-2"]
    assert torch.equal(train({**settings, "steps": 6}).members[0].flat.weights, whole.members[0].flat.weights)
    assert steps_on_disk(root) == [6]


ON_A_DISK_THAT_OTHERS_FILL = """
mount -t tmpfs -o size=5m disk "$1"
while sleep 0.02; do
    if [ -e "$1/checkpoints/step-2/COMPLETE.json" ] || [ -e "$1/fill" ]; then cat /dev/zero >>"$1/fill" 2>/dev/null; fi
done &
"$2" -m trainer train "$3"
code=$?
kill $!
cp -r "$1/checkpoints" "$4"
exit $code
"""


def test_e11_a_disk_that_fills_up_ends_the_run_at_the_save_it_has_no_room_for(settings: dict[str, Any], tmp_path: Path
                                                                              ) -> None:  # fmt: skip
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "none", disk], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    settings |= {"output_dir": str(disk), "checkpoint_every": 2, "keep_checkpoints": 2, "steps": 100_000}
    settings["data"]["cache"] = str(tmp_path / "token-cache")
    config = write_config(settings, tmp_path / "config.yaml")
    done = subprocess.run(
        [*apart, "sh", "-c", ON_A_DISK_THAT_OTHERS_FILL, "sh", disk, sys.executable, config, copy], text=True,
        capture_output=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.search(
        rf"SaveFailed: checkpoint step-(\d+) cannot be written to {disk}/checkpoints: No space left on device"
        rf" \(it takes [\d.]+ MiB\); last good checkpoint: {disk}/checkpoints/step-(\d+)\n", done.stderr,
    )  # fmt: skip
    found = checkpoint.latest(copy, say=pytest.fail)
    assert failed is not None and found is not None, done.stderr
    assert found.step == int(failed[2]) == int(failed[1]) - 2


def a_checkpoint(step: int, run: str = "this") -> Checkpoint:
    weights = {"fc.weight": torch.full((30, 20), float(step))}
    return Checkpoint(step=step, weights=weights, optimizer=weights, state={"run": run})


def test_e11_damage_anywhere_in_a_checkpoint_skips_it_by_name_and_never_ends_the_resume(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, a_checkpoint(900))
    whole = checkpoint.save(tmp_path, a_checkpoint(1000))
    kept = tmp_path.parent / "kept"
    shutil.copytree(whole, kept)
    draw = random.Random(0)
    for damage in range(120):
        shutil.rmtree(whole)
        shutil.copytree(kept, whole)
        file = draw.choice(sorted(whole.iterdir()))
        content, at = file.read_bytes(), draw.randrange(file.stat().st_size)
        kind = draw.choice(["cut", "flip", "gone", "junk", "directory"])
        file.unlink()
        if kind == "directory":
            file.mkdir()
        elif kind != "gone":
            flipped = content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
            junk = draw.choice([b"", b"[]", b'{"files": 3}', b'{"files": {"trainer.json": []}}', b"\xff", b"null"])
            file.write_bytes({"cut": content[:at], "flip": flipped, "junk": junk}[kind])
        said: list[str] = []
        found = checkpoint.latest(tmp_path, say=said.append)
        # A flip in the marker may say the same in other words.
        if file.name == MARKER and kind == "flip" and found is not None and found.step == 1000:
            continue
        assert found is not None and found.step == 900, (damage, kind, file.name)
        assert len(said) == 1 and said[0].startswith("checkpoint step-1000 skipped: "), said


def test_e11_a_checkpoint_that_was_renamed_is_not_taken_for_another_step(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, a_checkpoint(5)).rename(tmp_path / "step-99")
    with pytest.raises(CheckpointDamaged, match="it was written as step-5"):
        checkpoint.load(tmp_path / "step-99")


def test_e11_a_damaged_later_checkpoint_never_costs_the_one_just_written(train: Train, settings: dict[str, Any]
                                                                         ) -> None:  # fmt: skip
    settings |= {"keep_checkpoints": 1, "checkpoint_every": 2, "steps": 6}
    root = train({**settings, "keep_checkpoints": 3}).saves.root
    for step in (4, 6):
        (root / f"step-{step}" / MARKER).unlink()
    train({**settings, "steps": 3})
    assert steps_on_disk(root) == [3, 4, 6]
    found = checkpoint.latest(root, say=lambda _: None)
    assert found is not None and found.step == 3
    train(settings)
    assert steps_on_disk(root) == [6]


def test_e11_a_checkpoint_of_another_run_is_neither_gone_on_from_nor_lost(
    train: Train, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings |= {"checkpoint_every": 2, "keep_checkpoints": 1}
    other = train({**settings, "steps": 4, "output_dir": str(tmp_path / "other"), "optimizer": {"lr": 1e-4}})
    mine = train({**settings, "steps": 2})
    shutil.copytree(other.saves.root / "step-4", mine.saves.root / "step-4")
    capsys.readouterr()
    again = train({**settings, "steps": 6})
    said = capsys.readouterr().out
    assert f"checkpoint step-4 skipped: it is of another run ({other.saves.run}; this one is {mine.saves.run})" in said
    assert "resume from step-2 " in said and again.saves.run == mine.saves.run
    assert sorted(path.name for path in mine.saves.root.iterdir()) == [
        "run.json", "step-4.of-" + other.saves.run, "step-6",
    ]  # fmt: skip
    back = (mine.saves.root / f"step-4.of-{other.saves.run}").rename(tmp_path / "step-4")
    assert checkpoint.load(back).state["run"] == other.saves.run


# --- E13: a stop loses no work ----------------------------------------------------------------------------------------

HANG_IN_WARM_UP = """
import time, trainer.warmup
def hang(self):
    print("compiling", flush=True)
    while True:
        time.sleep(0.05)
trainer.warmup.Warmup.compile = hang
"""


def test_e13_a_stop_while_something_compiles_ends_at_once_as_stopped_with_nothing_lost(
    start_trainer: Callable[..., TrainerProcess], settings: dict[str, Any], tmp_path: Path
) -> None:
    run = start_trainer(write_config(settings, tmp_path / "config.yaml"), planted=HANG_IN_WARM_UP)
    assert run.process.stdout is not None
    while run.process.stdout.readline() != "compiling\n":
        assert run.process.poll() is None
    run.terminate()
    code, out, err = run.finish(timeout_s=30)
    assert (code, err) == (0, "") and out.endswith("phase=stopping\n")
    (ended,) = run.events("ended")
    assert ended["stopped"] is True and not (run.run_dir / "checkpoints").exists()


@pytest.mark.parametrize("asked_at", ["in a save", "in the step before the last", "in the last step"])
def test_e13_a_stop_that_comes_late_loses_and_repeats_nothing(
    train: Train, settings: dict[str, Any], tmp_path: Path, asked_at: str
) -> None:
    settings |= {"steps": 6, "checkpoint_every": 4}
    whole = train({**settings, "output_dir": str(tmp_path / "whole")})

    def stop(training: Any) -> None:
        if asked_at == "in a save":
            save = training.saves.save

            def saving(*args: Any, **facts: Any) -> None:
                training.stop.requested = True
                save(*args, **facts)

            training.saves.save = saving
            return
        judge, last = training._judge, {"in the last step": 5, "in the step before the last": 4}[asked_at]

        def judged(step: Any, *, log: bool) -> None:
            training.stop.requested |= step.number == last
            judge(step, log=log)

        training._judge = judged

    stopped = train(settings, before=stop)
    assert steps_on_disk(stopped.saves.root)[-1] == stopped.steps_done
    ended = train(settings) if stopped.steps_done < 6 else stopped
    assert torch.equal(ended.members[0].flat.weights, whole.members[0].flat.weights)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
