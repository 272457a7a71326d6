"""`stop` says "stopped" only when nothing is left, and the supervisor's death costs no truth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from tests.driver import Specctl, poll_until

PYTHON = sys.executable


def test_stop_ends_a_run_that_ignores_hup_and_term_with_its_children(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "bash", specctl.program("stubborn.sh")).json["run_id"]
    assert len(specctl.processes(run_id)) >= 3
    done = specctl("stop", run_id, "--grace", "0.5", "--json")
    assert done.code == 0 and done.json["remaining"] == [] and done.json["state"] == "STOPPED"
    assert specctl.processes(run_id) == []


def test_term_is_sent_once_and_a_checkpoint_is_waited_for(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("counts_terms.py")).json["run_id"]
    done = specctl("stop", run_id)
    assert done.code == 0 and "STOPPED" in done.out
    assert (specctl.run_dir(run_id) / "terms").read_text() == "1"
    assert json.loads((specctl.run_dir(run_id) / "exit.json").read_text())["code"] == 0


def test_an_ended_run_says_how_it_ended(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "sh", "-c", "exit 3").json["run_id"]
    done = specctl("stop", run_id)
    assert done.code == 0 and "FAILED" in done.out and "had ended before" in done.out


def test_a_part_that_fits_two_runs_stops_neither(specctl: Specctl) -> None:
    other = specctl.launch("--name", "train-a1", "--", PYTHON, specctl.program("steps.py")).json["run_id"]
    third = specctl.launch("--name", "train-a1", "--", PYTHON, specctl.program("steps.py")).json["run_id"]
    done = specctl("stop", "train-a1")
    assert done.code == 4 and other in done.err and third in done.err
    assert specctl.processes(other) and specctl.processes(third)
    assert specctl("stop", "nothing-like-it").code == 4


def test_somebody_elses_run_needs_its_full_id(specctl: Specctl) -> None:
    run_id = specctl.launch("--name", "theirs", "--", PYTHON, specctl.program("steps.py")).json["run_id"]
    record = specctl.run_dir(run_id) / "run.json"
    value = json.loads(record.read_text())
    value["spec"]["owner"] = "colleague@elsewhere"
    record.write_text(json.dumps(value))
    assert specctl("stop", "theirs").code == 4
    assert specctl("stop").code == 4
    assert specctl.processes(run_id)
    assert specctl("stop", run_id).code == 0


def test_the_only_live_run_need_not_be_named(specctl: Specctl) -> None:
    specctl.launch("--", "true")
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    done = specctl("stop", "--json")
    assert done.json["run_id"] == run_id and specctl.processes(run_id) == []
    assert specctl("stop").code == 4


def test_a_run_outlives_the_tmux_server_and_its_record_is_kept(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    [socket] = specctl.workdir.glob("tmux-*")
    subprocess.run(["tmux", "-S", str(socket), "kill-server"], check=True)
    step = specctl.status(run_id)["step"]
    poll_until(lambda: specctl.status(run_id)["step"] > step)
    assert specctl.status(run_id)["state"] == "RUNNING"
    assert specctl("stop", run_id).code == 0
    assert specctl.status(run_id)["state"] == "STOPPED"


def test_a_run_outlives_its_supervisor_and_its_steps_are_still_seen(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    supervisor = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())
    os.kill(supervisor["pid"], signal.SIGKILL)
    step = specctl.status(run_id)["step"]
    row = poll_until(lambda: (found := specctl.status(run_id))["step"] > step and found)
    assert row["state"] == "RUNNING" and "supervisor" in row["why"]
    done = specctl("stop", run_id, "--json")
    assert done.code == 0 and done.json["remaining"] == [] and done.json["state"] == "STOPPED"


def test_a_killed_program_is_killed_and_not_stopped(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    for pid in specctl.processes(run_id):
        os.kill(pid, signal.SIGKILL)
    row = poll_until(lambda: (found := specctl.status(run_id))["state"] == "KILLED" and found)
    assert "SIGKILL" in row["why"]


def test_supervisor_and_program_both_gone_without_a_record_is_lost(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    supervisor = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())
    os.kill(supervisor["pid"], signal.SIGKILL)
    for pid in specctl.processes(run_id):
        os.kill(pid, signal.SIGKILL)
    poll_until(lambda: not specctl.processes(run_id))
    done = specctl("status", run_id)
    assert done.code == 1 and "LOST" in done.out
