"""A run that is killed again and again, at any moment, ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import documents, events, records, write_config
from trainer.checkpoint import AVERAGES, OPTIMIZER, WEIGHTS, latest, steps_on_disk

Run = Callable[..., int]
STEPS, EVERY = 500, 20
RECORDS_A_STEP = 1 + 1 + 2 + 2
"""Lines of metrics.jsonl: the run's, the loader's, two targets' and two drafters'."""
TOUCHES_A_SAVE = 8
"""Of what is written aside: made, five files opened, synced, renamed."""


@pytest.fixture
def run(forks: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Train, or save, in a process of its own until it ends; returns its exit code, or the signal that killed it,
    negative."""

    def start(config: Path | None, run_dir: Path, death: dict[str, Any] | None = None, *, save: int = 0) -> int:
        run_dir.mkdir(exist_ok=True)
        request = {
            "argv": ["train", str(config)], "save": save, "run_dir": str(run_dir), "death": death,
            "out": str(tmp_path / f"{run_dir.name}.log"),
        }  # fmt: skip
        assert forks.stdin is not None and forks.stdout is not None
        forks.stdin.write(json.dumps(request) + "\n")
        forks.stdin.flush()
        forks.stdout.readline()
        return os.waitstatus_to_exitcode(int(forks.stdout.readline()))

    return start


def last_of_each_step(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Of a step that was trained twice, the later record counts."""
    rows = [row for row in records(run_dir, "metrics.jsonl") if row["worker"] is None]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}


def files_of(run_dir: Path, step: int) -> dict[str, bytes]:
    directory = run_dir / "checkpoints" / f"step-{step}"
    return {name: (directory / name).read_bytes() for name in (WEIGHTS, OPTIMIZER, AVERAGES)}


@pytest.mark.timeout(600)
def test_500_steps_killed_ten_times_at_random_end_with_the_weights_of_an_undisturbed_run(
    run: Run, settings: dict[str, Any], tmp_path: Path
) -> None:
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(1_000_000)))
    draw = random.Random(seed)
    print(f"SEED={seed}")
    settings |= {"steps": STEPS, "checkpoint_every": EVERY, "keep_checkpoints": 2, "batch_size": 2}
    settings["devices"]["target"] = ["cpu", "cpu"]
    settings["drafter"]["layers"] = 1
    settings["data"] |= {"paths": documents(tmp_path), "buckets": [16, 48]}
    settings["optimizer"]["ema"] = 0.98
    config = write_config(settings, tmp_path / "config.yaml")
    assert run(config, tmp_path / "whole") == 0

    killed = tmp_path / "killed"
    deaths = ["step"] * 5 + ["save"] * 3 + ["stop"] * 2
    draw.shuffle(deaths)
    for number, kind in enumerate(deaths):
        # What is left to do is shared out among the deaths that are left, so that none of them comes too late.
        done = max(steps_on_disk(killed / "checkpoints"), default=0)
        most = max(1, (STEPS - 1 - done) // (len(deaths) - number))
        death = {
            "place": "metrics.jsonl",
            "after": draw.randint(1, most * RECORDS_A_STEP),
            "delay_s": draw.random() / 200,
        }
        if kind == "save":
            saves = max(1, most // EVERY)
            death = {"place": ".partial", "after": draw.randint(1, saves * TOUCHES_A_SAVE), "delay_s": 0}
        code = run(config, killed, {**death, "signal": signal.SIGTERM if kind == "stop" else signal.SIGKILL})
        assert code == (0 if kind == "stop" else -signal.SIGKILL), (tmp_path / "killed.log").read_text()[-2000:]
        print(f"{kind}: {death}")
        assert not (killed / "checkpoints" / f"step-{STEPS}").exists()
    assert run(config, killed) == 0

    assert steps_on_disk(killed / "checkpoints") == [STEPS - EVERY, STEPS]
    assert files_of(killed, STEPS) == files_of(tmp_path / "whole", STEPS)
    told = last_of_each_step(killed)
    assert sorted(told) == list(range(1, STEPS + 1)) and told == last_of_each_step(tmp_path / "whole")
    print([event["step"] for event in events(killed, "resume")])
    assert len(events(killed, "resume")) >= 5


def test_a_save_that_is_killed_at_any_touch_of_the_disk_leaves_the_old_or_the_new_one_whole(
    run: Run, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    assert run(None, root, save=1) == 0
    found = []
    for after in itertools.count(1):
        shutil.rmtree(copy := tmp_path / "copy", ignore_errors=True)
        shutil.copytree(root, copy)
        code = run(None, copy, {"place": "copy", "after": after, "delay_s": 0, "signal": signal.SIGKILL}, save=2)
        whole = latest(copy, run="this", say=lambda _: None)
        assert whole is not None and bool((whole.weights["weight"] == whole.step).all())
        found.append(whole.step)
        # What was left lies in nobody's way, and the next save takes it away.
        assert run(None, copy, save=3) == 0 and sorted(path.name for path in copy.iterdir()) == ["run.json", "step-3"]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found == sorted(found) and len(found) > 12 and {*found} == {1, 2}
