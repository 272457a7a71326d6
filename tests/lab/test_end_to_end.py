"""The whole path: laptop -> SSH -> pct exec -> tmux -> supervisor -> program in a real container, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.driver import Specctl, poll_until
from tests.lab.lab import Lab

WORKDIR = "/root/w"
ALIVE = {"RUNNING", "STARTING"}
TWO_LOGS = """
import os, time
n, log = 0, open('mine.log', 'a', buffering=1)
while not os.path.exists('end'):
    n += 1
    print('own', n)
    print('mine', n, file=log)
    time.sleep(.02)
raise LookupError('the end')
"""


@pytest.fixture
def specctl(lab: Lab) -> Iterator[Specctl]:
    inventory = f"""
default_target: ct101
defaults: {{ssh: pve, workdir: {WORKDIR}}}
targets:
  ct101: {{vmid: 101}}
  ct102: {{vmid: 102}}
groups: {{both: [ct101, ct102]}}
"""
    driver = Specctl(inventory, SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    yield driver
    for run in driver("status", "--all", "--json").json["runs"]:
        driver("stop", run["run_id"], "--now")
    for vmid in (101, 102):
        lab.inside(vmid, ["sh", "-c", f"tmux -S {WORKDIR}/tmux-0 kill-server; rm -rf {WORKDIR}"], capture_output=True)
    driver.close()


def ended(specctl: Specctl, run_id: str) -> dict[str, object]:
    return dict(poll_until(lambda: (row := specctl.status(run_id))["state"] not in ALIVE and row))


def test_launch_status_logs_and_stop_in_a_container(specctl: Specctl, lab: Lab) -> None:
    done = specctl.launch("--", "python3", specctl.program("steps.py"), target="ct101")
    assert done.code == 0, done.err
    run_id = done.json["run_id"]
    assert done.json["verified"] and done.json["rung"] == "step"
    inside = lab.inside(101, ["tmux", "-S", f"{WORKDIR}/tmux-0", "ls"], capture_output=True, text=True).stdout
    assert inside.startswith(f"{run_id}:")
    assert lab.inside(102, ["test", "-e", WORKDIR], check=False).returncode == 1

    row = specctl.status()
    assert row["run_id"] == run_id and row["target"] == "ct101" and row["state"] == "RUNNING"
    found = specctl("logs", "@last", "--grep", "Exception|Error|tok/s|step=|drafter", "-n", "20")
    assert found.code == 0 and len(found.out.splitlines()) == 20 and "step=" in found.out
    assert run_id in found.err

    done = specctl("stop", "@last")
    assert done.code == 0 and "STOPPED" in done.out
    listing = lab.inside(101, ["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "steps.py" not in listing
    assert ended(specctl, run_id)["state"] == "STOPPED"


@pytest.mark.parametrize(
    ("command", "state", "said"),
    [
        (["python3", "dies_at_import.py"], "FAILED", "a_module_that_nobody_has"),
        (["true"], "SUCCEEDED", "exit"),
        (["sh", "-c", "echo saved; exit 3"], "FAILED", "3"),
        (["no-such-program"], "NEVER_STARTED", "no-such-program"),
    ],
)
def test_failures_in_a_container_are_told_with_their_true_reason(
    specctl: Specctl, command: list[str], state: str, said: str
) -> None:
    specctl.program("dies_at_import.py")
    done = specctl.launch("--", *command, target="ct101")
    assert done.code == 1
    assert done.json["state"] == state and not done.json["verified"]
    assert said in json.dumps(done.json["error"])


def test_a_dead_worker_in_a_container_is_degraded(specctl: Specctl) -> None:
    done = specctl.launch("--", "python3", specctl.program("one_thread_dies.py"), target="ct102")
    assert done.code == 1 and done.json["state"] == "DEGRADED"


def test_a_script_with_its_own_log_in_a_container(specctl: Specctl, lab: Lab) -> None:
    lab.inside(101, ["sh", "-c", "echo 'RuntimeError: the error of yesterday' > /root/train_flex6.log"], check=True)
    script = (specctl.project / specctl.program("own_log.sh")).read_text()
    (specctl.project / "own_log.sh").write_text(script.replace("$LOG", "/root/train_flex6.log"))
    done = specctl.launch("--", "bash", "own_log.sh", "steps", target="ct101")
    assert done.code == 0, done.out
    [foreign] = done.json["foreign_logs"]
    assert foreign["path"] == "/root/train_flex6.log" and foreign["before"] == 37
    shown = specctl("logs", done.json["run_id"])
    assert "yesterday" not in shown.out and "step=1 " in shown.out


def test_status_asks_all_containers_and_a_dead_one_costs_its_own_row(specctl: Specctl, lab: Lab) -> None:
    one = specctl.launch("--", "python3", specctl.program("steps.py"), target="ct101").json["run_id"]
    two = specctl.launch("--", "python3", specctl.program("steps.py"), target="ct102").json["run_id"]
    answer = specctl("status", "--json")
    assert answer.code == 0
    assert {run["run_id"] for run in answer.json["runs"]} == {one, two}
    lab.freeze(102)
    try:
        done = specctl("status", "--json")
        assert done.code == 3
        assert [run["run_id"] for run in done.json["runs"]] == [one]
        rows = {row["name"]: row for row in done.json["targets"]}
        assert rows["ct101"]["reachable"] and not rows["ct102"]["reachable"] and "frozen" in rows["ct102"]["error"]
        assert specctl("status", "ct101").code == 0
        assert specctl("stop", two).code == 3
    finally:
        lab.thaw(102)
    assert specctl.status(two)["state"] == "RUNNING"


def test_a_run_of_a_restarted_container_is_lost_and_its_pids_are_not_mistaken(specctl: Specctl, lab: Lab) -> None:
    run_id = specctl.launch("--", "python3", specctl.program("steps.py"), target="ct102").json["run_id"]
    lab.reboot(102)
    row = specctl.status(run_id)
    assert row["state"] == "LOST" and "restarted" in row["why"]
    done = specctl("logs", run_id, "-n", "1")
    assert done.code == 0 and "LOST" in done.err


def test_a_stopped_container_is_unreachable_and_its_run_is_not_judged(specctl: Specctl, lab: Lab) -> None:
    run_id = specctl.launch("--", "python3", specctl.program("steps.py"), target="ct102").json["run_id"]
    lab.stop(102)
    try:
        done = specctl("status", run_id)
        assert done.code == 3 and "not running" in done.err and "LOST" not in done.out
    finally:
        lab.start(102)


def test_a_run_as_another_user_of_the_container(specctl: Specctl, lab: Lab) -> None:
    lab.inside(101, ["sh", "-c", "id train 2>/dev/null || useradd -m train"], check=True)
    specctl.inventory.write_text("targets:\n  ct101: {ssh: pve, vmid: 101, user: train, workdir: ~/w}\n")
    program = (
        "import os, time; print(os.getuid(), os.environ['HOME'], os.getcwd())\nn = 0\n"
        "while True: n += 1; print(f'step={n} tok/s=1'); time.sleep(.1)"
    )
    done = specctl.launch("--", "python3", "-c", program, target="ct101")
    assert done.code == 0, done.err
    uid = lab.inside(101, ["id", "-u", "train"], capture_output=True, text=True).stdout.strip()
    first = specctl("logs", "@last").out.splitlines()[0]
    assert first.startswith(f"{uid} /home/train /home/train/w/runs/")
    assert specctl("stop", "@last").code == 0


@pytest.mark.real_lab("a sshd that runs on its node")
def test_following_since_and_errors_reach_through_ssh_and_pct_and_over_a_broken_link(
    specctl: Specctl, lab: Lab
) -> None:
    run_id = specctl.launch("--until", "process", "--", "python3", "-c", TWO_LOGS, target="ct101").json["run_id"]
    lines, said = specctl.home / "lines", specctl.home / "said"
    with lines.open("wb") as out, said.open("wb") as err:
        follower = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "logs", run_id, "-f"], cwd=specctl.project, env=specctl.environ,
            stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        )  # fmt: skip
    for number in (1, 2):
        size = lines.stat().st_size
        poll_until(lambda size=size: lines.stat().st_size > size, what="a followed line")
        assert lab.on_node(["pkill", "-KILL", "-f", "^sshd: root@notty"]).returncode == 0
        poll_until(lambda number=number: said.read_text().count("resumed at byte") == number, what=said.read_text())
    lab.inside(101, ["touch", f"{WORKDIR}/runs/{run_id}/code/end"], check=True)
    assert follower.wait(timeout=60) == 1, "as the run ended"
    shown = lines.read_text().splitlines()
    mine = [line for line in shown if line.startswith("mine")]
    assert mine == [f"mine {n + 1}" for n in range(len(mine))]
    assert [line for line in shown if line.startswith("own")] == [f"own {n + 1}" for n in range(len(mine))]
    assert "LookupError: the end" in shown

    [group] = specctl("logs", run_id, "--errors", "--json").objects
    assert (group["type"], group["message"], group["ended"]) == ("LookupError", "the end", "run")
    since = specctl("logs", run_id, "--since", "10m")
    assert sorted(since.out.splitlines()) == sorted(shown) and "the run began only" in since.err
