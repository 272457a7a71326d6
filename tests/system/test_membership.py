"""Which processes are a run's: by mark, by descent, by record, by output; and which are another's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver import Specctl, alive, poll_until

PYTHON = sys.executable


def supervisor(specctl: Specctl, run_id: str) -> dict[str, int]:
    return dict(json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text()))


@pytest.mark.parametrize("program", ["forgets.py", "titled.py"])
def test_a_program_that_lost_its_environment_is_still_the_runs(specctl: Specctl, program: str) -> None:
    done = specctl.launch("--", PYTHON, specctl.program(program))
    assert done.code == 0, done.out
    run_id = done.json["run_id"]
    record = supervisor(specctl, run_id)
    os.kill(record["pid"], signal.SIGKILL)
    step = specctl.status(run_id)["step"]
    row = poll_until(lambda: (found := specctl.status(run_id))["step"] > step and found)
    assert row["state"] == "RUNNING"
    assert specctl("stop", run_id).code == 0
    assert not alive(record["program_pid"])


def test_a_run_that_launches_a_run_does_not_own_it(specctl: Specctl) -> None:
    specctl.program("steps.py")
    nested = f"{PYTHON} -m orchestrator launch local -- {PYTHON} steps.py"
    forever = "n=0; while :; do echo step=$((n+=1)) tok/s=1; sleep .1; done"
    outer = specctl.launch("--", "bash", "-c", f"{nested}; {forever}")
    assert outer.code == 0, outer.out
    [inner] = [run["run_id"] for run in specctl("status", "--json").json["runs"] if "steps" in run["run_id"]]
    assert specctl("stop", outer.json["run_id"], "--now").code == 0
    assert specctl.status(inner)["state"] == "RUNNING" and specctl.processes(inner)


def test_none_is_left_is_not_said_of_a_chain_of_forks_that_goes_on(specctl: Specctl) -> None:
    run_id = specctl.launch("--timeout", "3", "--", PYTHON, specctl.program("fork_chain.py")).json["run_id"]
    done = specctl("stop", run_id, "--now", "--json")
    alive = specctl.processes(run_id)
    assert done.code == 0 or alive or done.json["state"] != "STOPPED"
    if done.code == 0:
        assert done.json["state"] == "STOPPED"
        assert not alive, "it said that no process is left"
    specctl.kill(run_id)


def test_a_start_that_was_given_up_is_not_carried_out_later(specctl: Specctl) -> None:
    (specctl.home / "bin").mkdir()
    slow = specctl.home / "bin" / "tmux"
    slow.write_text(
        "#!/bin/sh\n"
        'case "$*" in *new-session*) (sleep 14; exec /usr/bin/tmux "$@") >/dev/null 2>&1 & exit 0;; esac\n'
        'exec /usr/bin/tmux "$@"\n'
    )
    slow.chmod(0o755)
    path = f"{specctl.home / 'bin'}:{os.environ['PATH']}"
    done = specctl.launch("--", PYTHON, specctl.program("steps.py"), PATH=path)
    run_id = done.json["run_id"]
    assert done.code == 1 and done.json["state"] == "NEVER_STARTED"
    server = specctl.workdir / f"tmux-{os.geteuid()}"
    poll_until(server.exists, what="the late session")
    poll_until(lambda: not specctl.processes(run_id))
    row = specctl.status(run_id)
    assert row["state"] == "NEVER_STARTED" and row["step"] is None
    assert not (specctl.run_dir(run_id) / f"{run_id}.a1.log").exists()
    assert not (specctl.run_dir(run_id) / "env").exists(), "the environment may hold secrets"


def test_a_workdir_is_a_path_and_nothing_else(specctl: Specctl) -> None:
    strange = specctl.home / "w #(touch pwned) $(touch pwned) 'q' #{pane_id}"
    specctl.inventory.write_text(f'targets:\n  local: {{workdir: "{strange}"}}\n')
    done = specctl.launch("--", "sh", "-c", "pwd; echo step=1 tok/s=1")
    assert done.code == 0, done.out + done.err
    assert specctl("logs", "@last").out.splitlines()[0].startswith(str(strange))
    assert not list(specctl.home.rglob("pwned")) and not Path("/pwned").exists()


def test_what_is_shipped_is_its_users_alone(specctl: Specctl) -> None:
    (specctl.project / ".env").write_text("KEY=1")
    run_id = specctl.launch("--", "sh", "-c", "echo step=1 tok/s=1").json["run_id"]
    assert specctl.run_dir(run_id).stat().st_mode & 0o077 == 0
    for bundle in (specctl.workdir / "bundles").iterdir():
        assert bundle.stat().st_mode & 0o077 == 0


def test_nothing_gets_away_by_forgetting_who_it_is_even_without_a_supervisor(specctl: Specctl) -> None:
    log = specctl.home / "own.log"
    done = specctl.launch("--", PYTHON, specctl.program("ghost.py"), str(log))
    assert done.code == 0, done.out + done.err
    run_id = done.json["run_id"]
    record = supervisor(specctl, run_id)
    if record.get("cgroup") is None:
        pytest.skip("no cgroup can be made here")
    ghost = int((specctl.home / "own.log.pid").read_text())
    assert ghost not in specctl.processes(run_id)
    os.kill(record["pid"], signal.SIGKILL)
    poll_until(lambda: specctl.status(run_id)["state"] == "RUNNING")
    step = specctl.status(run_id)["step"]
    poll_until(lambda: specctl.status(run_id)["step"] > step)
    assert specctl("stop", run_id, "--now").code == 0
    assert not alive(ghost)
    assert not Path(record["cgroup"]).exists()


def test_a_run_that_lost_its_record_is_stopped_by_its_full_id(specctl: Specctl) -> None:
    launch = ("--until", "process", "--", PYTHON, specctl.program("steps.py"))
    damaged, removed = (specctl.launch(*launch).json["run_id"] for _ in range(2))
    (specctl.run_dir(damaged) / "run.json").unlink()
    shutil.rmtree(specctl.run_dir(removed))
    for run_id in (damaged, removed):
        assert specctl.processes(run_id)
        done = specctl("stop", run_id)
        assert done.code == 0 and "no process of it is left" in done.out and " is gone" in done.out
        assert not specctl.processes(run_id)
    # What is left of the one still says that there was a run; of the other nothing does.
    assert "no process of it is left" in specctl("stop", damaged).out
    assert specctl("stop", removed).code == 4
    assert not specctl.run_dir(removed).exists()


def test_a_record_of_another_boot_names_nobody_whoever_has_its_pids_and_start_times_now(specctl: Specctl) -> None:
    run_id = specctl.launch("--until", "process", "--", "sleep", "600").json["run_id"]
    path, record = specctl.run_dir(run_id) / "supervisor.json", supervisor(specctl, run_id)
    os.kill(record["pid"], signal.SIGKILL)
    specctl.kill(run_id)
    with subprocess.Popen(["sleep", "600"]) as other:
        ticks = int(Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19])
        mistaken = {"pid": other.pid, "start_ticks": ticks, "program_pid": other.pid, "program_start_ticks": ticks}
        path.write_text(json.dumps({**record, **mistaken}))
        assert specctl.status(run_id)["state"] != "LOST", "as it looks where the boot is the same"
        path.write_text(json.dumps({**record, **mistaken, "boot": "another:1"}))
        assert specctl.status(run_id)["state"] == "LOST"
        assert specctl("stop", run_id, "--now").code == 0
        assert other.poll() is None, "somebody else's process was killed"
        other.kill()
