"""`specctl show`: all that is known of one run, on one page, and never a secret."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.driver import Specctl, poll_until

SECRET = "hunter2-hunter2"
CONFIG = "patterns: {step: 'iter (\\d+)'}\n"
PROGRAM = """
import os, pathlib, sys, time
root = pathlib.Path(os.environ["SPECCTL_RUN_DIR"]) / "checkpoints"
for step, files in ((5, {"a.bin": 3}), (10, {"a.bin": 3}), (15, {})):
    (root / f"step-{step}").mkdir(parents=True)
    (root / f"step-{step}/a.bin").write_bytes(b"xyz"[: 3 if step != 10 else 2])
    if files:
        (root / f"step-{step}/COMPLETE.json").write_text('{"step": %d, "files": {"a.bin": {"bytes": 3}}}' % step)
for step in range(1, 4):
    print(f"iter {step} loss=0.5", flush=True)
try:
    raise ValueError("caught, and nothing ended with it")
except ValueError:
    import traceback
    traceback.print_exc()
print("iter 4 loss=0.4", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def specctl() -> Iterator[Specctl]:
    """A git project with a change that is not committed, launched with a configuration, a secret and a note."""
    driver = Specctl()
    driver.inventory.write_text(
        f"targets:\n  local: {{workdir: {driver.workdir}, env: {{PLAIN: value-of-plain}}, secrets: [TOKEN]}}\n"
    )
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    (driver.project / "train.py").write_text("print('first')\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=driver.project, check=True)
    (driver.project / "train.py").write_text(PROGRAM)
    (driver.project / "run.yaml").write_text(CONFIG)
    done = driver.launch(
        "--name", "alive", "--config", "run.yaml", "--note", "first light", "--until", "process", "--",
        sys.executable, "train.py", "a word", TOKEN=SECRET,
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    driver.launch("--name", "failed", "--until", "process", "--", "sh", "-c", "echo step=1; exit 3", TOKEN=SECRET)
    poll_until(lambda: driver("show", "alive", "--json").json["run"]["step"] == 4)
    yield driver
    driver.close()


def test_a_live_run_on_one_page_evidence_first(specctl: Specctl) -> None:
    done = specctl("show", "alive")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    run_id = lines[0].split()[1]
    assert lines[0] == f"RUNNING  {run_id} on local"
    shown = {line.split()[0]: line for line in reversed(lines) if line.strip()}
    assert [line.split()[0] for line in lines[2:7]] == ["accepted", "session", "process", "log", "step"]
    assert "by the clock of" in lines[7]
    assert "train.py 'a word'" in shown["program"] and "first light" in shown["note"]
    digest = hashlib.sha256(CONFIG.encode()).hexdigest()[:12]
    assert f"run.yaml, sha256 {digest}" in shown["config"]
    assert shown["env"].split() == ["env", "PLAIN"] and "TOKEN" in shown["secrets"]
    assert "git " in shown["code"] and "of uncommitted changes (--diff prints them)" in shown["code"]
    assert "python" in shown["processes"] and "state" in shown["processes"]
    assert "ValueError: caught, and nothing ended with it" in shown["exceptions"]
    assert "step 5 whole" in shown["checkpoints"]
    assert "step 10 NOT whole: a.bin has 2 bytes" in done.out
    assert "step 15 NOT whole: no COMPLETE.json" in done.out
    assert "started" in done.out and f"specctl attach {run_id}" in done.out
    assert len(lines) < 50, "one screen"


def test_an_ended_run_says_how_and_offers_what_still_makes_sense(specctl: Specctl) -> None:
    out = specctl("show", "failed").out
    assert out.startswith("FAILED  ") and "exit code 3, last step 1" in out
    assert "none is left" in out and "attach" not in out and " -n 50" in out


def test_programs_get_everything_there_is(specctl: Specctl) -> None:
    answer = specctl("show", "alive", "--json", "--events", "1").json
    assert answer["schema_version"] == 1 and answer["rung"] == "step"
    assert [item["what"] for item in answer["evidence"]] == ["accepted", "session", "process", "log", "step"]
    assert all(item["observed_at"] == answer["observed_at"] for item in answer["evidence"])
    assert answer["spec"]["env"] == ["PLAIN"] and answer["spec"]["secrets"] == ["TOKEN"]
    assert len(answer["events"]) == 1 and answer["events_before"]
    assert [one["step"] for one in answer["checkpoints"]] == [5, 10, 15]
    [pid] = [str(process["pid"]) for process in answer["probe"]["tree"]][:1]
    assert abs(answer["since"][pid] - answer["record"]["created_at"]) < 30


def test_a_secret_and_a_value_of_the_environment_are_nowhere(specctl: Specctl) -> None:
    for words in (("show", "alive"), ("show", "alive", "--json", "--events", "100"), ("show", "alive", "--diff")):
        done = specctl(*words)
        assert SECRET not in done.out + done.err and "value-of-plain" not in done.out + done.err


def test_config_and_diff_are_printed_alone_as_they_were(specctl: Specctl) -> None:
    assert specctl("show", "alive", "--config").out == CONFIG
    patch = specctl("show", "alive", "--diff").out
    clean = specctl.home / "clean"
    subprocess.run(["git", "clone", "-q", str(specctl.project), str(clean)], check=True)
    subprocess.run(["git", "apply"], cwd=clean, input=patch, text=True, check=True)
    assert (clean / "train.py").read_text() == PROGRAM
    failed = specctl("show", "failed", "--config")
    assert failed.code == 1 and "launched without a configuration" in failed.err
    assert specctl("show", "failed", "--config", "--diff").code == 2


def test_a_run_whose_records_are_damaged_is_still_shown(specctl: Specctl) -> None:
    words = ("--name", "damaged", "--until", "process", "--", "sleep", "600")
    run_id = specctl.launch(*words, TOKEN=SECRET).json["run_id"]
    root = specctl.run_dir(run_id)
    with (root / "events.jsonl").open("a") as file:
        file.write('{"time": NaN, "event": "odd", "x": Infinity}\n[1]\n{"time": 1, "event": "odd", "x": NaN}\n{"half')
    answer = specctl("show", run_id, "--json")
    assert answer.code == 0 and answer.json["events"][-1]["fields"] == {"x": "NaN"}
    (root / "run.json").write_text("{")
    done = specctl("show", run_id)
    assert done.code == 0 and "run.json cannot be read" in done.out and "sleep" in done.out
    assert json.loads(specctl("show", run_id, "--json").out)["spec"] is None


def test_times_and_numbers_that_none_can_be_spoil_no_page(specctl: Specctl) -> None:
    done = specctl.launch("--name", "odd", "--until", "process", "--", "sh", "-c", "echo step=1; exit 3", TOKEN=SECRET)
    run = done.json["run_id"]
    poll_until(lambda: specctl.status(run)["state"] == "FAILED")
    nonce = json.loads((specctl.run_dir(run) / "run.json").read_text())["spec"]["nonce"]
    with (specctl.run_dir(run) / "events.jsonl").open("a") as file:
        for time, value in (("1e300", "1"), ("1e999", "1"), ("1" + "0" * 400, "1"), ("1764000000", "1e999")):
            file.write(f'{{"time": {time}, "event": "odd", "nonce": "{nonce}", "value": {value}}}\n')
    shown = specctl("show", run, "--json")
    assert shown.code == 0
    assert [event["fields"] for event in shown.json["events"] if event["event"] == "odd"] == [{"value": "Infinity"}]
    assert specctl("show", run).code == 0


def test_a_run_that_nobody_knows(specctl: Specctl) -> None:
    assert specctl("show", "no-such-run").code == 4
