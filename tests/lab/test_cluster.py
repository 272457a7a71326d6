"""Several nodes in one inventory, links that are cut, and the command `lab` that people type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import Specctl
from tests.lab.lab import Lab
from tests.lab.remains import RUNS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def nodes(lab_ready: None) -> Iterator[tuple[Lab, Lab]]:
    """A cluster: pve with container 101, pve2 with 201 and a shell that greets."""
    with Lab() as pve, Lab(node="pve2", cluster=pve) as pve2:
        pve.container(101)
        pve2.container(201)
        pve2.on_node(["sh", "-c", "echo 'echo Welcome' >/root/.bashrc"], check=True)
        yield pve, pve2


def test_nodes_of_a_cluster_answer_side_by_side_and_one_that_is_cut_off_takes_no_other_along(
    nodes: tuple[Lab, Lab], tmp_path: Path
) -> None:
    _, pve2 = nodes
    (tmp_path / "ssh_config").write_text("\n".join(lab.ssh_config.read_text() for lab in nodes))
    specctl = Specctl(f"""
ssh_config: {tmp_path}/ssh_config
defaults: {{workdir: /root/w}}
targets:
  here: {{ssh: pve, vmid: 101}}
  there: {{ssh: pve2, vmid: 201}}
  moved: {{ssh: pve, vmid: 201}}
""")
    try:
        runs = {}
        for target in ("here", "there"):
            words = ("--no-source", "--until", "process", "--", "sleep", "600")
            done = specctl.launch(*words, target=target)
            assert done.code == 0, done.err
            runs[target] = done.json["run_id"]
        done = specctl("status")
        assert done.code == 3
        assert "UNREACHABLE moved (container 201 on pve): container 201 is on node pve2, not on pve." in done.out
        assert all(run_id in done.out for run_id in runs.values())

        pve2.cut()
        done = specctl("status", "here", "there")
        assert done.code == 3 and runs["here"] in done.out
        assert "UNREACHABLE there" in done.out and "did not answer" in done.out, done.out
        pve2.mend()
        assert specctl.status("there")["state"] == "STARTING"
    finally:
        specctl.close()


def test_a_follower_notices_a_cut_link_and_goes_on_where_it_was_once_the_link_is_back(lab: Lab) -> None:
    specctl = Specctl(
        "targets: {ct101: {ssh: pve, vmid: 101, workdir: /root/cut}}\n", SPECCTL_SSH_CONFIG=str(lab.ssh_config)
    )
    specctl.program("steps.py")
    run_id = specctl.launch("--", "python3", "steps.py", target="ct101").json["run_id"]
    follower = specctl.start("logs", run_id, "-f")
    assert follower.stdout and follower.stderr
    seen: list[int] = []

    def read_a_step() -> None:
        assert follower.stdout
        if match := re.match(r"step=(\d+)", follower.stdout.readline()):
            seen.append(int(match[1]))

    try:
        while not seen:
            read_a_step()
        lab.cut()
        assert lab.is_cut()
        assert "link lost" in follower.stderr.readline()
        written = int(lab.inside(101, ["sh", "-c", "grep -c step= /root/cut/runs/*/*.a1.log"]).stdout)
        lab.mend()
        assert not lab.is_cut()
        while seen[-1] <= written:
            read_a_step()
        assert seen == list(range(1, len(seen) + 1)), "each line once, in order"
    finally:
        lab.mend()
        follower.terminate()
        follower.communicate()
    assert specctl("stop", run_id, "--now").code == 0
    lab.clear(101, "/root/cut")
    specctl.close()


class Play:
    """Types `lab ...` as a person does, beside whatever lab this machine has."""

    def __init__(self, hosts: Path) -> None:
        self.name, self.hosts = f"play-{os.getpid()}", hosts

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, ROOT / "lab", *words], env={**os.environ, "SPECCTL_LAB_NAME": self.name},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, cwd="/",
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def play(lab_ready: None, tmp_path: Path) -> Iterator[Play]:
    play = Play(tmp_path / "hosts.lab.yaml")
    yield play
    play("down")


def test_make_lab_leaves_a_lab_whose_cables_one_can_pull_and_put_back(play: Play) -> None:
    assert "no lab is up; start it with: make lab" in play("status", code=1)
    said = play("up", "plain", "gpus", "--write", str(play.hosts))
    assert f"export SPECCTL_INVENTORY={play.hosts}" in said
    assert "specctl launch ct101" in said and "./lab freeze ct101" in said
    assert "first: ./lab down" in play("up", "--write", str(play.hosts), code=1)
    specctl = Specctl(play.hosts.read_text())
    specctl.program("steps.py")
    try:
        assert "python3 steps.py" not in specctl("status").out
        run_id = specctl.launch("--", "python3", "steps.py", target="ct101").json["run_id"]
        play("freeze", "ct101")
        assert "ct101  frozen" in play("status")
        for word in ("fill", "reboot"):
            assert "ct101 is frozen; first: ./lab thaw ct101" in play(word, "ct101", code=1)
        done = specctl("status", "ct101")
        assert done.code == 3 and "container 101 is frozen" in done.out
        play("thaw")
        play("cut", "node")
        assert "pve  the link to it is cut" in play("status")
        assert specctl("status", "ct101").code == 3
        play("heal")
        assert "cut" not in play("status")
        assert specctl.status(run_id)["state"] == "RUNNING"
        assert "1 tmux server," in play("kill-tmux", "ct101") and "no tmux server" in play("kill-tmux", "ct101")
        play("reboot", "ct101")
        assert specctl.status(run_id)["state"] == "LOST"
        play("fill", "101")
        done = specctl("launch", "ct101", "--no-source", "--", "true")
        assert done.code == 1 and "0 MiB free" in done.err, done.err
        assert "disk full" in play("status")
        play("heal")
        assert "disk full" not in play("status")
        assert "off by -2h" in play("clock", "ct101", "-2h") and "running, clock -2h" in play("status")
        play("heal")
        assert "clock" not in play("status")
        for _ in range(2):
            assert "ct201 is stopped" in play("stop", "ct201")
        assert "lab: ct201 is stopped; first: ./lab start ct201" in play("freeze", "ct201", code=1)
        assert "ct201 is running" in play("start")
        assert "there is no container ct999; there are ct101" in play("freeze", "ct999", code=1)
        assert "there is no node x; there are pve, pve2" in play("cut", "x", code=1)
        assert "there is no kind of container x" in play("up", "x", code=1)
        assert "not 'soon'" in play("clock", "ct101", "soon", code=1)
    finally:
        specctl.close()
    assert "the lab is gone" in play("down")
    assert not play.hosts.exists() and not list(RUNS.glob(f"{play.name}*"))
