"""A plain SSH machine as target, over a real sshd: the same verbs, and what they say when the link dies."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from tests.driver import Specctl, poll_until
from tests.sshd import LoopbackSshd


@pytest.fixture
def specctl(sshd: LoopbackSshd) -> Iterator[Specctl]:
    driver = Specctl(SPECCTL_SSH_CONFIG=str(sshd.ssh_config))
    driver.inventory.write_text(
        f"targets:\n  box: {{ssh: node1, workdir: {driver.workdir}, python: {sys.executable}}}\n"
        f"  local: {{workdir: {driver.home}/other}}\n"
    )
    yield driver
    sshd.resume()
    driver.close()


def launched(specctl: Specctl) -> str:
    done = specctl.launch("--", "python", specctl.program("steps.py"), target="box")
    assert done.code == 0, done.err
    return str(done.json["run_id"])


def test_launch_status_logs_and_stop_over_ssh(specctl: Specctl) -> None:
    run_id = launched(specctl)
    assert specctl.status("box")["state"] == "RUNNING"
    assert len(specctl("logs", run_id, "--grep", "step=", "-n", "3").out.splitlines()) == 3
    assert specctl("stop", run_id).code == 0
    assert specctl.processes(run_id) == []


def test_noise_of_the_shells_start_up_is_never_taken_for_an_answer(specctl: Specctl, sshd: LoopbackSshd) -> None:
    sshd.make_noisy("Welcome! \x1especctl1 0000 00000000 {}")
    run_id = launched(specctl)
    assert specctl("logs", run_id, "-n", "1").out.startswith("step=")


def test_a_dead_link_is_unknown_and_changes_no_state(specctl: Specctl, sshd: LoopbackSshd) -> None:
    run_id = launched(specctl)
    sshd.stop()
    done = specctl("status", "--json")
    assert done.code == 3 and done.json["runs"] == []
    rows = {row["name"]: row for row in done.json["targets"]}
    assert rows["box"]["state"] == "UNREACHABLE" and rows["local"]["reachable"]
    for words in (("status", run_id), ("stop", run_id), ("logs", run_id)):
        done = specctl(*words)
        assert done.code == 3 and "refused" in done.err, words
        assert not any(word in done.out for word in ("LOST", "FAILED", "STOPPED"))
    assert specctl.processes(run_id)
    sshd.start()
    assert specctl.status(run_id)["state"] == "RUNNING"


def test_following_over_a_link_that_dies_ends_with_3_and_says_that_the_state_is_unknown(
    specctl: Specctl, sshd: LoopbackSshd
) -> None:
    run_id = launched(specctl)
    follower = specctl.start("logs", run_id, "-f", "-n", "1", "--patience", "0")
    assert follower.stdout is not None
    assert follower.stdout.readline().startswith("step=")
    sshd.pause()
    _, err = follower.communicate(timeout=60)
    assert follower.returncode == 3, err
    assert "lost" in err or "not known" in err or "unknown" in err
    sshd.resume()
    poll_until(lambda: specctl.status(run_id)["state"] == "RUNNING")


def test_ctrl_c_stops_the_following_and_not_the_run(specctl: Specctl) -> None:
    run_id = launched(specctl)
    follower = specctl.start("logs", run_id, "-f", "-n", "1")
    assert follower.stdout is not None and follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=30)
    assert follower.returncode == 130
    assert specctl.processes(run_id)


def test_ctrl_c_stops_the_watching_of_a_launch_and_not_the_run(specctl: Specctl) -> None:
    watcher = specctl.start("launch", "box", "--", "python", specctl.program("never_steps.py"))
    assert watcher.stderr is not None
    for line in watcher.stderr:
        if "process" in line:
            break
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=30)
    assert watcher.returncode == 130 and "that does not stop it" in err
    row = specctl.status("box")
    assert row["state"] == "STARTING" and specctl.processes(row["run_id"])
