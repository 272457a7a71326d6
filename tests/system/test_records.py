"""A run directory that a program, a disk or a person has damaged costs what it hides, and no other run its row."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.agent import probe, proc, records
from orchestrator.health import judge
from orchestrator.model import RunPaths
from tests.driver import KERNEL_TELLS_ENDS, Specctl, poll_until

PYTHON = sys.executable
OTHER_RECORDS = ["supervisor.json", "scan.json", "exit.json", "stop.json", "stopper.json", "heartbeat.json"]
STRANGE = {
    "text": b'{"at": "x", "code": "three", "pid": "4", "nonce": 7}',
    "list": b"[1]",
    "infinite": b'{"at": Infinity, "step": NaN}',
    "deep": b"[" * 200_000,
    "cut off": b'{"at": 1',
    "binary": bytes(range(256)),
}


def launch(specctl: Specctl) -> str:
    done = specctl.launch("--", PYTHON, specctl.program("steps.py"))
    assert done.code == 0, done.err
    return str(done.json["run_id"])


def rows(specctl: Specctl) -> dict[str, dict[str, Any]]:
    done = specctl("status", "--json")
    assert done.code in (0, 1), done.err
    assert [target["reachable"] for target in done.json["targets"]] == [True]
    return {row["run_id"]: row for row in done.json["runs"]}


def test_a_run_that_began_between_the_walk_over_proc_and_its_record_is_alive(specctl: Specctl) -> None:
    run_id = launch(specctl)
    paths = RunPaths(root=str(specctl.run_dir(run_id)), run_id=run_id)
    spec = records.spec(paths)
    assert spec is not None
    seen = probe._one(
        paths, *spec, tree=[], boot=proc.boot_identity(), oom_kills=0, now=time.time(), elsewhere=None, disk=None
    )
    assert judge(seen).state == "RUNNING" and seen.program is not None and [seen.program] == seen.tree


def replace(path: Path, data: bytes) -> None:
    """At once, as a writer in the same directory would: the supervisor never finds a half of it."""
    aside = path.with_name("aside")
    aside.write_bytes(data)
    aside.replace(path)


def beat(specctl: Specctl, run_id: str, **changes: Any) -> bytes:
    nonce = json.loads((specctl.run_dir(run_id) / "run.json").read_text())["spec"]["nonce"]
    return json.dumps({"nonce": nonce, "phase": "train", "step": 12, "time": time.time(), **changes}).encode()


def test_strange_records_of_one_run_cost_no_other_run_its_row(specctl: Specctl) -> None:
    whole, strange = launch(specctl), launch(specctl)
    (pid,) = specctl.processes(strange)
    record = (specctl.run_dir(strange) / "run.json").read_bytes()
    for kind, data in STRANGE.items():
        for name in OTHER_RECORDS:
            replace(specctl.run_dir(strange) / name, data)
        found = rows(specctl)
        assert found[whole]["state"] == "RUNNING", kind
        assert found[strange]["state"] == "RUNNING", kind
        assert "supervisor.json cannot be read; exit.json cannot be read" in found[strange]["why"], kind
        replace(specctl.run_dir(strange) / "run.json", data)
        found = rows(specctl)
        assert (found[whole]["state"], found[strange]["state"]) == ("RUNNING", "LOST"), kind
        assert f"run.json cannot be read, but 1 process ({pid}) alive with its mark" in found[strange]["why"], kind
        replace(specctl.run_dir(strange) / "run.json", record)


def test_a_fifo_or_a_folder_under_a_records_name_is_waited_for_by_nobody(specctl: Specctl) -> None:
    whole, strange = launch(specctl), launch(specctl)
    for make in (os.mkfifo, os.mkdir):
        for name in ["heartbeat.json", "stop.json", "exit.json"]:
            path = specctl.run_dir(strange) / name
            if path.is_fifo():
                path.unlink()
            make(path)
        assert rows(specctl)[whole]["state"] == "RUNNING"
    log = next(specctl.run_dir(strange).glob("*.log"))
    log.unlink()
    os.mkfifo(log)
    found = rows(specctl)
    assert "its log was deleted" in found[strange]["why"] and found[strange]["step"], "its own is open still"


def test_a_programs_own_heartbeat_that_is_none_says_nothing(specctl: Specctl) -> None:
    done = specctl.launch("--until", "process", "--", "sleep", "100")
    path = specctl.run_dir(done.json["run_id"]) / "heartbeat.json"
    replace(path, beat(specctl, done.json["run_id"]))
    assert specctl.status()["step"] == 12
    wrong: list[dict[str, Any]] = [{"step": "12"}, {"step": 1.5}, {"step": True}, {"step": -3}, {"time": "now"}]
    for changes in wrong:
        replace(path, beat(specctl, done.json["run_id"], **changes))
        assert specctl.status()["step"] is None, changes


def test_processes_whose_run_directory_is_gone_are_not_overlooked(specctl: Specctl) -> None:
    run_id = launch(specctl)
    (specctl.run_dir(run_id) / "run.json").unlink()
    row = rows(specctl)[run_id]
    assert row["state"] == "LOST"
    assert "run.json is gone, but 1 process" in row["why"]
    pids = specctl.processes(run_id)
    shutil.rmtree(specctl.run_dir(run_id))
    assert f"({pids[0]}) alive with its mark" in rows(specctl)[run_id]["why"]
    specctl.kill(run_id)
    assert run_id not in rows(specctl)


def test_a_supervisors_record_that_is_gone_does_not_mean_that_nothing_started(specctl: Specctl) -> None:
    run_id = launch(specctl)
    os.kill(json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"], 9)
    (specctl.run_dir(run_id) / "supervisor.json").write_text("{}")
    assert rows(specctl)[run_id]["state"] == "RUNNING"
    specctl.kill(run_id)
    row = rows(specctl)[run_id]
    assert row["state"] == "LOST"
    assert "supervisor.json cannot be read" in row["why"]


def test_what_was_read_of_a_log_is_read_again_when_its_record_is_damaged(specctl: Specctl) -> None:
    done = specctl.launch("--", "sh", "-c", "for i in 1 2 3; do echo step=$i tok/s=5; done")
    run_id = done.json["run_id"]
    poll_until(lambda: specctl.status(run_id)["state"] == "SUCCEEDED")
    path = specctl.run_dir(run_id) / "scan.json"
    scan = json.loads(path.read_text())
    for offset in ("abc", 10**15, -5):
        scan["logs"][0]["summary"].update(offset=offset, step=77)
        replace(path, json.dumps(scan).encode())
        assert specctl.status(run_id)["step"] == 3, offset


def test_a_lost_run_is_listed_for_a_day_after_its_last_sign_of_life(specctl: Specctl) -> None:
    run_id = launch(specctl)
    os.kill(json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"], 9)
    folder = specctl.run_dir(run_id)
    old = time.time() - 30 * 3600
    specctl.kill(run_id)
    assert rows(specctl)[run_id]["state"] == "LOST"
    for path in [*folder.iterdir(), folder]:
        os.utime(path, (old, old))
    assert rows(specctl) == {}
    assert [row["run_id"] for row in specctl("status", "--all", "--json").json["runs"]] == [run_id]


def test_an_exception_behind_a_pipe_fails_the_launch(specctl: Specctl) -> None:
    (specctl.project / "m.py").write_text(
        "for i in range(3):\n    print(f'step={i + 1} tok/s=5', flush=True)\nraise RuntimeError('crashed')\n"
    )
    done = specctl.launch("--", "bash", "-c", f"{PYTHON} m.py 2>&1 | tee out.txt")
    told = KERNEL_TELLS_ENDS
    assert (done.code, done.json["state"], done.json["verified"]) == (1, "FAILED" if told else "SUCCEEDED", False)
    assert done.json["error"]["message"] == "crashed"
    because = "whose pipe to tee ended with 0" if told else "its last words are"
    assert because in (why := specctl.status()["why"]) and "RuntimeError: crashed" in why


def test_a_program_without_an_environment_is_known_by_pid_and_start_time(specctl: Specctl) -> None:
    specctl.program("steps.py")
    done = specctl.launch("--", "env", "-i", PYTHON, "-u", "steps.py")
    assert done.code == 0, done.err
    (process,) = [item["value"] for item in done.json["evidence"] if item["what"] == "process"]
    assert "the process that was started; its environment shows no mark" in process
    assert specctl("stop", done.json["run_id"], "--now").code == 0


def test_a_run_of_another_host_in_a_shared_workdir_is_neither_judged_nor_stopped(specctl: Specctl) -> None:
    run_id = specctl.launch("--", sys.executable, specctl.program("steps.py")).json["run_id"]
    record = specctl.run_dir(run_id) / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "host": "somewhere-else"}))
    assert specctl("status", "--json").json["runs"] == []
    row = specctl.status(run_id)
    assert row["state"] == "UNREACHABLE" and "somewhere-else" in row["why"]
    assert specctl("stop", run_id).code == 1
    assert specctl.processes(run_id) and not (specctl.run_dir(run_id) / "exit.json").exists()


def test_a_file_among_the_runs_is_no_run(specctl: Specctl) -> None:
    run_id = launch(specctl)
    (specctl.workdir / "runs" / "notes").write_text("what to try next\n")
    assert list(rows(specctl)) == [run_id] and specctl("status").code == 0


def test_a_run_without_a_record_and_without_a_process_has_nothing_to_stop(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, "-c", "print('step=1 tok/s=1')").json["run_id"]
    poll_until(lambda: (specctl.run_dir(run_id) / "exit.json").exists())
    (specctl.run_dir(run_id) / "run.json").unlink()
    done = specctl("stop", run_id)
    assert done.code == 0 and "no process of it is left" in done.out and "run.json is gone" in done.out


def test_a_lost_run_that_is_looked_at_again_and_again_grows_old_all_the_same(specctl: Specctl) -> None:
    run_id = launch(specctl)
    os.kill(json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    specctl.kill(run_id)
    assert specctl.status(run_id)["state"] == "LOST"
    for path in [*specctl.run_dir(run_id).iterdir()]:
        os.utime(path, (1, 1), follow_symlinks=False)
    assert specctl.status(run_id)["state"] == "LOST" and specctl.status(run_id)["step"] is not None
    done = specctl("status")
    assert run_id not in done.out and "1 older" in done.out
