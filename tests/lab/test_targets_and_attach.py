"""In real containers: is the setup right, and a look into a live session as the run's own user."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.driver import Specctl
from tests.lab.lab import Lab
from tests.terminal import typed


@pytest.fixture
def specctl(lab: Lab) -> Iterator[Specctl]:
    lab.inside(101, ["sh", "-c", "id train 2>/dev/null || useradd -m train"], check=True)
    inventory = """
defaults: {ssh: pve}
targets:
  ct101: {vmid: 101, workdir: ~/seen, user: train}
  ct102: {vmid: 102, workdir: /root/w}
  other: {vmid: 102, workdir: /root/w, user: nobody-of-that-name}
"""
    driver = Specctl(inventory, SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    yield driver
    driver("stop", "@last", "--now")
    script = """
        tmux -S "$1/tmux-$(id -u train)" kill-server
        for i in $(seq 50); do rm -rf "$1" && break; sleep 0.1; done
    """
    lab.inside(101, ["sh", "-c", script, "sh", "/home/train/seen"], capture_output=True)
    driver.close()


def test_targets_tells_containers_that_are_ready_from_those_that_are_not(specctl: Specctl, lab: Lab) -> None:
    lab.inside(102, ["sh", "-c", "mv /usr/bin/tmux /usr/bin/tmux.away"], check=True)
    try:
        done = specctl("targets", "--json")
    finally:
        lab.inside(102, ["sh", "-c", "mv /usr/bin/tmux.away /usr/bin/tmux"], check=True)
    assert done.code == 1
    rows = {row["name"]: row for row in done.json["targets"]}
    assert rows["ct101"]["ready"] and rows["ct101"]["found"]["user"] == "train"
    assert rows["ct101"]["found"]["workdir"] == "/home/train/seen"
    [problem] = [one for one in rows["ct102"]["problems"] if one["fatal"]]
    assert "tmux not found" in problem["what"] and "apt-get install tmux" in problem["mend"]
    assert "no user 'nobody-of-that-name'" in rows["other"]["error"]["message"] and rows["other"]["reachable"]
    assert lab.inside(101, ["test", "-e", "/home/train/seen"], check=False).returncode == 1
    lab.stop(102)
    try:
        done = specctl("targets", "ct102")
        assert done.code == 3 and "ct102  UNREACHABLE" in done.out and "pct start 102" in done.out
    finally:
        lab.start(102)


def test_attach_shows_the_session_of_a_container_as_the_user_of_the_run(specctl: Specctl, lab: Lab) -> None:
    words = ("--until", "process", "--", "python3", specctl.program("steps.py"))
    run_id = specctl.launch(*words, target="ct101").json["run_id"]
    with typed(specctl, "attach", run_id) as terminal:
        before = terminal.settings
        terminal.until("step=")
        assert b"\r\r\n" not in terminal.seen, "two terminals on the way end a line once"
        listing = ["ps", "-eo", "user,args"]
        clients = [
            line
            for line in lab.inside(101, listing, capture_output=True, text=True).stdout.splitlines()
            if "attach-session" in line
        ]
        assert [line.split()[0] for line in clients] == ["train"] and " -r " in clients[0]
        terminal.seen = b""
        terminal.resize(70, 12)
        os.kill(terminal.pid, signal.SIGWINCH)
        terminal.until_bytes(b"[1;12r")
        terminal.type("\x02d")
        assert terminal.end() == 0 and terminal.settings == before
        assert "it goes on: RUNNING" in terminal.text
