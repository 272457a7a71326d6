"""Two containers of one node with the same GPUs: the folder that the node mounts into both keeps their runs apart.

Their nvidia-smi prints what the real one would print in both; folder, locks, containers and their end are real.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver import Specctl, poll_until
from tests.lab.lab import Lab
from tests.smi import ONE, PROGRAM

FIRST, SECOND = 151, 152
FOLDER = "/run/lab/gpu-claims"
INVENTORY = """
defaults: {ssh: pve, workdir: /srv/w, claims_dir: /gpu-claims}
targets:
  first: {vmid: 151}
  second: {vmid: 152}
"""
SLEEPS = ("--no-source", "--until", "process", "--", "sh", "-c", "echo gpus=$CUDA_VISIBLE_DEVICES; exec sleep 600")


@pytest.fixture
def containers(lab: Lab) -> Iterator[Lab]:
    assert lab.on_node(["install", "-d", "-m", "1777", FOLDER]).returncode == 0
    # The second has ids of its own, as Proxmox makes containers by default.
    for vmid, conf in ((FIRST, {}), (SECOND, {"unprivileged": "1"})):
        lab.container(vmid, mp0=f"{FOLDER},mp=/gpu-claims", **conf)
        script = 'cat >/usr/local/bin/nvidia-smi; echo "$1" >/usr/local/bin/listed; echo "$2" >/usr/local/bin/rows'
        listed, rows = f"GPU 0: NVIDIA H200 (UUID: {ONE})", "0, NVIDIA H200, 0, 3, 143771"
        words = ["sh", "-ec", f"{script}; chmod 755 /usr/local/bin/nvidia-smi", "sh", listed, rows]
        lab.inside(vmid, words, input=PROGRAM, check=True)
    yield lab
    for vmid in (FIRST, SECOND):  # with whatever still runs in them
        lab.remove(vmid)


@pytest.fixture
def specctl(containers: Lab) -> Iterator[Specctl]:
    driver = Specctl(INVENTORY, SPECCTL_SSH_CONFIG=str(containers.ssh_config))
    yield driver
    driver.close()


def test_runs_of_two_containers_take_turns_on_a_gpu_that_both_of_them_have(specctl: Specctl, containers: Lab) -> None:
    first = specctl.launch(*SLEEPS, target="first").json["run_id"]
    done = specctl("launch", "second", *SLEEPS)
    assert done.code == 1 and f"held by run {first} of " in done.err, done.err
    assert "(first, container 151 on pve; host " in done.err
    second = specctl.launch("--queue", *SLEEPS, target="second").json["run_id"]
    waits = specctl.launch("--queue", "--name", "waits", *SLEEPS, target="first").json["run_id"]
    assert specctl.status(second)["in_line"]["position"] == 1
    assert specctl.status(waits)["in_line"]["ahead"] == [second]
    containers.reboot(FIRST)  # which ends who holds it, and one who waits
    row = poll_until(lambda: (found := specctl.status(second))["state"] != "QUEUED" and found, timeout_s=60)
    assert row["state"] in ("STARTING", "RUNNING")
    assert poll_until(lambda: specctl("logs", second).out) == f"gpus={ONE}\n"
    row = specctl.status(waits)
    assert row["state"] == "NEVER_STARTED" and "the container restarted while it waited in line" in row["why"]
    assert specctl.status(first)["state"] == "LOST"
    done = specctl("launch", "first", *SLEEPS)
    assert done.code == 1 and f"held by run {second} of " in done.err and "container 152 on pve" in done.err, done.err
