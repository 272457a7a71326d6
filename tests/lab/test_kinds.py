"""Containers that are odd in one way each (`kinds.py`), and what specctl makes of each.

What a container lacks (tmux, Python, a locale) is in test_containers.py, systemd in test_systemd.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.driver import Specctl, poll_until
from tests.lab.kinds import KINDS, WORKDIR
from tests.lab.lab import Lab

VMID = {"no_init": 141, "tiny_disk": 142, "read_only": 143, "wrong_clock": 144, "gpus": 145, "torch": 146}
MEETING = """
import socket, sys
rank, address = int(sys.argv[1]), (sys.argv[2], 29500)
if rank == 0:
    with socket.create_server(address) as server:
        peer, _ = server.accept()
        peer.sendall(b'hello, rank 1\\n')
        print(peer.makefile().readline(), end='')
else:
    with socket.create_connection(address, timeout=30) as peer:
        print(peer.makefile().readline(), end='')
        peer.sendall(b'hello, rank 0\\n')
"""
Make = Callable[..., Specctl]


@pytest.fixture
def make(lab: Lab) -> Iterator[Make]:
    """Call it with the kinds of containers wanted, as `name=number`; it answers with a user who has those targets."""
    made: list[int] = []
    drivers: list[Specctl] = []

    def call(**kinds: tuple[str, int]) -> Specctl:
        lines = [f"defaults: {{ssh: pve, workdir: {WORKDIR}}}", "targets:"]
        for name, (kind, vmid) in kinds.items():
            made.append(vmid)
            keys = {"vmid": str(vmid), **KINDS[kind].make(lab, vmid)}
            lines.append(f"  {name}: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}")
        drivers.append(Specctl("\n".join(lines) + "\n", SPECCTL_SSH_CONFIG=str(lab.ssh_config)))
        return drivers[-1]

    yield call
    for driver in drivers:
        driver.close()
    for vmid in set(made) & set(lab.vmids()):
        lab.stop(vmid)
        lab.undefine(vmid)


def test_a_zombie_that_no_init_reaps_is_no_life(make: Make, lab: Lab) -> None:
    specctl = make(box=("no_init", 141))
    done = specctl.launch("--no-source", "--until", "process", "--", "sleep", "617", target="box")
    assert done.code == 0, done.err
    assert specctl.status("box")["state"] == "STARTING"
    lab.inside(141, ["sh", "-c", "kill -KILL $(pgrep -f 'tmux|supervise|617' | grep -vx 1)"])
    assert " Z" in lab.inside(141, ["ps", "-eo", "pid,stat"]).stdout, "process 1 reaps nothing"
    row = specctl.status("box")
    assert row["state"] in ("LOST", "KILLED"), row
    assert specctl("stop", done.json["run_id"]).code == 0


def test_a_run_that_fills_its_tiny_disk_is_told_from_one_that_is_silent(make: Make, lab: Lab) -> None:
    specctl = make(box=("tiny_disk", 142))
    program = "import os, time\nwhile not os.path.exists('/root/go'): time.sleep(.1)\nwhile True: print('x' * 4000)"
    done = specctl.launch("--no-source", "--until", "process", "--", "python3", "-c", program, target="box")
    assert done.code == 0, done.err
    run_id = done.json["run_id"]
    lab.inside(142, ["touch", "/root/go"])
    poll_until(lambda: specctl.status("box")["state"] == "FAILED", timeout_s=60, what="the program to meet the end")
    said = specctl("status", run_id).out
    assert "0.0 of 12.0 MiB free" in said, said
    assert "xxxx" in specctl("logs", run_id, "-n", "1").out


def test_a_workdir_that_is_read_only_is_looked_at_and_not_launched_into(make: Make) -> None:
    specctl = make(box=("read_only", 143))
    assert specctl("status", "box").code == 0
    done = specctl("launch", "box", "--no-source", "--", "true")
    assert done.code == 1 and "read-only" in done.err and "`workdir:`" in done.err


def test_a_container_whose_clock_is_an_hour_fast_has_runs_of_today(make: Make, lab: Lab) -> None:
    specctl = make(box=("wrong_clock", 144))
    specctl.program("steps.py")
    done = specctl.launch("--", "python3", "steps.py", target="box")
    assert done.code == 0, done.err
    row = specctl.status("box")
    assert row["state"] == "RUNNING" and row["last_progress_age_s"] < 60, row
    assert "step=" in specctl("logs", done.json["run_id"], "--since", "50s").out
    assert "its clock is 3,60" in specctl("targets", "box").out


def test_runs_of_two_containers_meet_on_the_bridge(make: Make) -> None:
    specctl = make(first=("bridged", 147), second=("bridged", 148))
    runs = {}
    for rank, target in enumerate(("first", "second")):
        program = ("python3", "-c", MEETING, str(rank), "10.77.0.147")
        done = specctl.launch("--no-source", "--until", "process", "--", *program, target=target)
        runs[target] = done.json["run_id"]
    for target, said in (("first", "hello, rank 0\n"), ("second", "hello, rank 1\n")):
        poll_until(lambda t=target: specctl.status(runs[t])["state"] == "SUCCEEDED", timeout_s=60, what=target)
        assert specctl("logs", runs[target]).out == said


def test_gpus_are_what_nvidia_smi_says_and_its_failure_is_told(make: Make, lab: Lab) -> None:
    specctl = make(box=("gpus", 145))
    assert "GPU 0 NVIDIA H200: 37 % busy, 1,024 of 143,771 MiB" in specctl("targets", "box").out
    lab.nvidia_smi(145, "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error", code=9)
    said = specctl("targets", "box").out
    assert "143,771" not in said and "Unknown Error" in said, said


def test_a_run_imports_torch_from_a_python_that_is_mounted_read_only(make: Make) -> None:
    import torch

    specctl = make(box=("torch", 146))
    program = "import sys, torch; print(sys.prefix, torch.__version__, torch.ones(3).sum().item())"
    done = specctl.launch("--no-source", "--until", "process", "--", "python", "-c", program, target="box")
    run_id = done.json["run_id"]
    poll_until(lambda: specctl.status(run_id)["state"] == "SUCCEEDED", timeout_s=60, what="torch")
    assert specctl("logs", run_id).out == f"{sys.prefix} {torch.__version__} 3.0\n"
