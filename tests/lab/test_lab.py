"""The lab keeps its own promises: labs do not see each other, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.lab import RUNS, Lab, LabUnavailable, cgroup_of, is_abandoned, remove_cgroup, wait_until

CRASHING_OWNER = """
import sys
from tests.lab.lab import Lab
lab = Lab().up()
lab.container(101)
lab.freeze(101)
print(lab.run, flush=True)
sys.stdin.read()
"""


def processes_of(run: Path) -> list[str]:
    """Command lines that name this run's folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(run) in line:
            lines.append(line)
    return lines


def mounts_of(lab: Lab) -> list[str]:
    """Those of this machine that a lab's own would be among: other tests mount things meanwhile."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if lab.run.name in line]


def test_the_session_lab_has_two_running_containers_with_what_an_agent_needs(lab: Lab) -> None:
    assert lab.vmids() == [101, 102]
    done = lab.inside(101, ["python3", "-c", "import ctypes, hashlib, json, subprocess; print('ok')"])
    assert (done.stdout, done.returncode) == ("ok\n", 0)
    for tool in (["tmux", "-V"], ["ps", "--version"], ["grep", "--version"]):
        assert lab.inside(102, tool).returncode == 0


def test_an_ssh_client_reaches_the_containers_with_the_lab_s_configuration_alone(lab: Lab) -> None:
    known_hosts = (lab.ssh_config.parent / "known_hosts").read_text()
    argv = ["ssh", "-F", str(lab.ssh_config), "pve", "hostname; pct exec 102 -- hostname"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("pve\nct102\n", "", 0)
    assert (lab.ssh_config.parent / "known_hosts").read_text() == known_hosts


def test_labs_with_the_same_vmid_live_side_by_side_and_end_without_a_trace(lab_ready: None) -> None:
    with Lab() as one, Lab() as other:
        for lab in (one, other):
            lab.container(101)
        one.inside(101, ["touch", "/root/mine"])
        assert one.inside(101, ["ls", "/root"]).stdout == "mine\n"
        assert other.inside(101, ["ls", "/root"]).stdout == ""
        assert one.hosts_yaml() == "targets:\n  ct101: {ssh: pve, vmid: 101, workdir: /workspace/specctl}\n"
        assert processes_of(one.run)
    for lab in (one, other):
        assert processes_of(lab.run) == []
        assert not lab.run.exists()
        lab.down()
    assert not mounts_of(one) and not mounts_of(other)


def test_a_container_keeps_its_files_over_stop_and_start_and_loses_its_processes(lab_ready: None) -> None:
    with Lab() as lab:
        lab.container(101)
        lab.inside(101, ["sh", "-c", "echo kept >/root/file; tmux new-session -d -s s 'sleep 600'"])
        lab.stop(101)
        lab.start(101)
        assert lab.inside(101, ["cat", "/root/file"]).stdout == "kept\n"
        assert lab.inside(101, ["pgrep", "-c", "tmux"]).stdout == "0\n"


def test_a_lab_dies_with_its_owner_and_the_next_one_clears_its_remains_away(lab_ready: None) -> None:
    root = Path(__file__).resolve().parents[2]
    owner = subprocess.Popen(
        [sys.executable, "-c", CRASHING_OWNER], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout and owner.stdin
    run = Path(owner.stdout.readline().strip())
    assert run.parent == RUNS and processes_of(run)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    wait_until(lambda: is_abandoned(run), "the node outlived its owner")
    assert processes_of(run) == []
    with Lab():
        assert not run.exists()
    remove_cgroup(run)  # fails if any of it is still in use
    assert cgroup_of(run) not in Path("/proc/self/cgroup").read_text()


def test_a_container_that_cannot_start_says_what_lxc_said(lab_ready: None) -> None:
    with Lab() as lab:
        with pytest.raises(RuntimeError, match="startup for container '101' failed"):
            lab.container(101, rootfs="lab:nosuchimage,size=4G")


def test_a_lab_that_is_down_says_how_to_start_one() -> None:
    with pytest.raises(LabUnavailable, match=r"./lab up"):
        Lab(name="never-started").inside(101, ["true"])


def test_without_root_it_says_so_in_one_line_and_fails() -> None:
    code = (
        "import os, sys; from tests.lab import play\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "sys.exit(play.main(['setup']))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("lab: the lab needs root") and done.stderr.count("\n") == 1
