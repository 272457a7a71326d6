"""The contract between specctl and the trainer, which never import each other: a real training run under a launch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.driver import Specctl, poll_until
from tests.trainer.conftest import settings, tiny_target  # noqa: F401
from tests.trainer.support import write_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(settings: dict[str, Any], specctl: Specctl) -> str:  # noqa: F811
    write_config({**settings, "steps": 100_000, "checkpoint_every": 10}, specctl.project / "tiny.yaml")
    return "tiny.yaml"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_a_training_run_is_seen_as_what_it_is_and_stopped_with_a_checkpoint(specctl: Specctl, config: str) -> None:
    done = specctl.launch("--config", config)
    assert done.code == 0, done.err
    run_id = done.json["run_id"]
    run = specctl.run_dir(run_id)
    row = poll_until(lambda: (found := specctl.status(run_id))["step"] >= 12 and found)
    assert row["state"] == "RUNNING" and row["tok_s"] > 0 and row["loss"] > 0
    assert [(worker["name"], worker["state"]) for worker in row["workers"]] == [
        ("target-0", "ALIVE"), ("drafter-0", "ALIVE"), ("drafter-1", "ALIVE"),
    ]  # fmt: skip

    nonce = json.loads((run / "run.json").read_text())["spec"]["nonce"]
    # Every tenth step is followed by a moment in which the phase is another: checkpoint.
    beat = poll_until(lambda: (found := json.loads((run / "heartbeat.json").read_text()))["phase"] == "train" and found)
    assert beat["nonce"] == nonce and beat["run_id"] == run_id
    phases = [event["phase"] for event in lines(run / "events.jsonl") if event["event"] == "phase"]
    assert {"import", "load_target", "data", "compile_warmup", "train"} <= set(phases)
    metrics = lines(run / "metrics.jsonl")
    assert {row["source"] for row in metrics} == {"trainer"}, "the trainer's own figures are written once, by itself"
    assert {row["worker"] for row in metrics} == {None, "loader-0", "target-0", "drafter-0", "drafter-1"}

    done = specctl("stop", run_id, "--json")
    assert done.code == 0 and done.json["state"] == "STOPPED" and done.json["remaining"] == []
    ended = json.loads((run / "exit.json").read_text())
    assert ended["code"] == 0 and ended["stopped"]
    assert (run / "checkpoints" / f"step-{ended['last_step']}").is_dir()
    for event in lines(run / "events.jsonl"):
        assert event["nonce"] == nonce and event["attempt"] == 1


def test_a_configuration_the_trainer_refuses_is_told_in_its_own_words_before_anything_is_sent(
    specctl: Specctl, config: str
) -> None:
    path = specctl.project / config
    path.write_text(path.read_text().replace('"steps"', '"stepps"'))
    done = specctl("launch", "local", "--config", config)
    line = path.read_text().partition("stepps")[0].count("\n") + 1
    assert done.code == 2 and f"{config}:{line}: stepps: unknown key; did you mean 'steps'?" in done.err
    assert not specctl.workdir.exists()


LOSES_A_DRAFTER = """
import threading
import trainer.__main__, trainer.replica
original = trainer.replica.Replica.loss_and_gradients
def broken(self, batch):
    if batch.step == 12 and threading.current_thread().name == "drafter-1":
        raise ValueError("planted")
    return original(self, batch)
trainer.replica.Replica.loss_and_gradients = broken
sys.exit(trainer.__main__.main(["train", "tiny.yaml"]))
"""


def test_a_run_that_goes_on_without_a_drafter_is_degraded_and_says_which(specctl: Specctl, config: str) -> None:
    path = specctl.project / config
    path.write_text(json.dumps({**json.loads(path.read_text()), "on_worker_death": "degrade"}))
    (specctl.project / "loses.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LOSES_A_DRAFTER}")
    done = specctl.launch("--until", "process", "--", sys.executable, "loses.py")
    run_id = done.json["run_id"]
    row = poll_until(lambda: ((found := specctl.status(run_id))["step"] or 0) >= 14 and found, timeout_s=120)
    assert row["state"] == "DEGRADED" and "drafter-1 died (ValueError: planted); step " in row["why"]
    states = {worker["name"]: worker["state"] for worker in row["workers"]}
    assert states == {"target-0": "ALIVE", "drafter-0": "ALIVE", "drafter-1": "GONE"}
    assert specctl("stop", run_id, "--json").json["state"] == "STOPPED"


def test_e6_a_run_whose_drafter_fails_is_failed_with_that_drafters_error(specctl: Specctl, config: str) -> None:
    (specctl.project / "loses.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LOSES_A_DRAFTER}")
    run_id = specctl.launch("--until", "process", "--", sys.executable, "loses.py").json["run_id"]
    row = poll_until(lambda: (found := specctl.status(run_id))["state"] == "FAILED" and found, timeout_s=120)
    assert "ValueError" in json.dumps(row) and "planted" in json.dumps(row)
    ended = json.loads((specctl.run_dir(run_id) / "exit.json").read_text())
    assert ended["code"] == 1 and not ended["stopped"]
    (failed,) = (event for event in lines(specctl.run_dir(run_id) / "events.jsonl") if event["event"] == "exception")
    assert failed["worker"] == "drafter-1" and failed["type"] == "ValueError"
