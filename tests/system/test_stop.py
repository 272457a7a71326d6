"""`stop` says "stopped" only when nothing is left, and the supervisor's death costs no truth."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.driver import Specctl, alive, poll_until
from tests.trainer.support import REPOSITORY

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


def accepted(specctl: Specctl) -> Path:
    """A run directory as its launch leaves it that is killed right after the run was accepted."""
    first = specctl.run_dir(specctl.launch("--", "true").json["run_id"])
    (root := specctl.run_dir("20990101-000000-accepted-0123")).mkdir()
    value = json.loads((first / "run.json").read_text())
    value["spec"] |= {"run_id": root.name, "nonce": "0123456789abcdef"}
    value["spec"]["created_at"] = value["created_at"] = time.time()
    value["argv"], value["cwd"] = ["sleep", "600"], str(root)
    (root / "run.json").write_text(json.dumps(value))
    return root


def supervisor_of(root: Path) -> subprocess.Popen[bytes]:
    program = f"import sys; from orchestrator.agent.supervise import main; sys.exit(main({str(root)!r}))"
    return subprocess.Popen([PYTHON, "-c", program], cwd=REPOSITORY)


def test_a_run_that_was_only_accepted_is_stopped_before_any_supervisor_can_begin(specctl: Specctl) -> None:
    root = accepted(specctl)
    assert specctl("status", root.name, "--json").json["runs"][0]["state"] == "QUEUED"
    done = specctl("stop", root.name, "--now", "--json")
    assert (done.code, done.json["state"], done.json["remaining"]) == (0, "NEVER_STARTED", []), done.out + done.err
    assert "no supervisor of it had begun when" in done.json["why"]
    assert supervisor_of(root).wait() == 1
    assert not (root / "supervisor.json").exists()


def test_a_run_whose_supervisor_is_just_beginning_is_stopped_when_it_has_begun(specctl: Specctl) -> None:
    root = accepted(specctl)
    os.mkfifo(root / "env")  # which the supervisor waits for, between its claim and its record
    supervisor = supervisor_of(root)
    poll_until((root / "claim").exists)
    stop = specctl.start("stop", root.name, "--now", "--json")
    looks = set()

    def waited_for() -> bool:
        with contextlib.suppress(OSError):
            looks.add(json.loads((root / "stopper.json").read_text())["alive_at"])
        return len(looks) > 3 or stop.poll() is not None

    poll_until(waited_for, what="a stop that waits")
    (root / "env").write_bytes(b"SPECCTL_NONCE=0123456789abcdef\0PATH=/usr/bin:/bin")
    out, err = stop.communicate(timeout=60)
    assert (stop.returncode, json.loads(out)["state"]) == (0, "STOPPED"), out + err
    assert supervisor.wait(timeout=30) == 0


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
    specctl.kill(run_id)
    row = poll_until(lambda: (found := specctl.status(run_id))["state"] == "KILLED" and found)
    assert "SIGKILL" in row["why"]


def test_supervisor_and_program_both_gone_without_a_record_is_lost(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("checkpoints.py")).json["run_id"]
    supervisor = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())
    os.kill(supervisor["pid"], signal.SIGKILL)
    specctl.kill(run_id)
    poll_until(lambda: not specctl.processes(run_id))
    assert '"phase": "train"' in (specctl.run_dir(run_id) / "heartbeat.json").read_text(), "F3: it says that it trains"
    done = specctl("status", run_id)
    assert done.code == 1 and "LOST" in done.out


def test_a_stop_goes_on_when_whoever_asked_for_it_has_gone(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "bash", specctl.program("stubborn.sh")).json["run_id"]
    asking = specctl.start("stop", run_id, "--grace", "2")
    assert asking.stderr is not None and "waiting" in asking.stderr.readline()
    asking.send_signal(signal.SIGINT)
    _, err = asking.communicate(timeout=30)
    assert asking.returncode == 130 and "goes on" in err
    row = poll_until(lambda: (found := specctl.status(run_id))["state"] == "STOPPED" and found)
    assert specctl.processes(run_id) == [] and "SIGKILL" in row["why"]


def test_an_impatient_second_stop_shortens_the_first(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "bash", specctl.program("stubborn.sh")).json["run_id"]
    patient = specctl.start("stop", run_id, "--grace", "600")
    assert patient.stderr is not None and "waiting" in patient.stderr.readline()
    assert specctl("stop", run_id, "--now").code == 0
    patient.communicate(timeout=30)
    assert patient.returncode == 0 and specctl.processes(run_id) == []


def broken_off(specctl: Specctl, run_id: str) -> dict[str, Any]:
    """A stop whose asker has left and whose stopper is then killed at its work; returns the stopper's record."""
    asking = specctl.start("stop", run_id, "--grace", "600")
    assert asking.stderr is not None and "waiting" in asking.stderr.readline()
    path = specctl.run_dir(run_id) / "stopper.json"
    poll_until(lambda: json.loads(path.read_text())["signalled_at"])
    asking.send_signal(signal.SIGINT)
    asking.communicate(timeout=30)
    stopper = dict(json.loads(path.read_text()))
    os.kill(stopper["pid"], signal.SIGKILL)
    poll_until(lambda: not Path(f"/proc/{stopper['pid']}").exists())
    return stopper


def test_a_run_whose_stop_was_broken_off_runs_and_can_be_stopped_again(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "bash", specctl.program("stubborn.sh")).json["run_id"]
    broken_off(specctl, run_id)
    poll_until(lambda: specctl.status(run_id)["state"] == "RUNNING")
    assert specctl("stop", run_id, "--grace", "0.2").code == 0
    assert specctl.processes(run_id) == [] and specctl.status(run_id)["state"] == "STOPPED"


def test_an_end_of_its_own_long_after_a_broken_off_stop_is_not_called_stopped(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "bash", specctl.program("stubborn.sh")).json["run_id"]
    stopper = broken_off(specctl, run_id)
    aged = {**stopper, "alive_at": stopper["alive_at"] - 3600, "signalled_at": stopper["signalled_at"] - 3600}
    (specctl.run_dir(run_id) / "stopper.json").write_text(json.dumps(aged))
    specctl.kill(run_id)
    poll_until(lambda: specctl.status(run_id)["state"] == "KILLED")


def test_a_checkpoint_under_way_outlasts_the_grace_period(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("checkpoints.py")).json["run_id"]
    done = specctl("stop", run_id, "--grace", "0.3", "--json")
    assert done.code == 0 and done.json["state"] == "STOPPED"
    assert (specctl.run_dir(run_id) / "saved").exists(), "it was killed while it was writing"
    assert "checkpoint" in done.err


def test_stopping_is_an_event_that_says_who_and_how(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    assert specctl("stop", run_id, "--grace", "7").code == 0
    lines = (specctl.run_dir(run_id) / "events.jsonl").read_text().splitlines()
    events = {event["event"]: event for event in map(json.loads, lines)}
    assert events["stopping"]["grace_s"] == 7 and "@" in events["stopping"]["by"]
    assert events["ended"]["stopped"] is True and events["ended"]["signal"] == 15


def test_a_supervisor_that_cannot_write_its_records_declares_nobody_dead(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    scan = specctl.run_dir(run_id) / "scan.json"
    scan.unlink()
    scan.mkdir()
    (scan / "in the way").touch()
    supervisor = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"]
    size = (specctl.run_dir(run_id) / f"{run_id}.a1.log").stat().st_size
    poll_until(lambda: (specctl.run_dir(run_id) / f"{run_id}.a1.log").stat().st_size > size + 500)
    assert Path(f"/proc/{supervisor}").exists()
    assert specctl.status(run_id)["state"] in ("RUNNING", "STARTING")
    assert specctl("stop", run_id).code == 0 and specctl.status(run_id)["state"] == "STOPPED"


def test_what_an_ended_run_has_left_behind_is_seen_and_swept(specctl: Specctl) -> None:
    run_id = specctl.launch("--until", "process", "--", "sleep", "100").json["run_id"]
    supervisor = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"]
    os.kill(supervisor, signal.SIGKILL)
    (specctl.run_dir(run_id) / "exit.json").write_text(json.dumps({"at": 1.0, "code": 3}))
    row = specctl.status(run_id)
    assert row["state"] == "FAILED" and "1 process" in row["why"]
    done = specctl("stop", run_id)
    assert done.code == 0 and "FAILED" in done.out and specctl.processes(run_id) == []


def test_a_supervisor_whose_run_was_removed_ends_with_the_program(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    supervisor = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"]
    while specctl.run_dir(run_id).exists():
        shutil.rmtree(specctl.run_dir(run_id), ignore_errors=True)  # its supervisor writes there meanwhile
    specctl.kill(run_id)
    poll_until(lambda: not alive(supervisor))
