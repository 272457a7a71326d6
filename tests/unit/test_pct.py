"""pct's own failures, by the words that the real one says, and only by them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from orchestrator.errors import ContainerError, LinkLost
from orchestrator.transport.base import Completed
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.pct import PctTransport


def explain(stderr: str, exit_code: int | None = 255, *, node: str | None = "root@pve1:2222") -> str | None:
    transport = PctTransport(LocalTransport(), 101, node=node, target="gpu1")
    error = transport.explain(Completed(exit_code=exit_code, stdout=b"", stderr=stderr.encode()))
    if error is None:
        return None
    assert isinstance(error, ContainerError)
    assert error.exit_code == 3
    return f"{error} | {error.hint}"


@pytest.mark.parametrize(
    ("stderr", "exit_code", "said"),
    [
        (
            "container '101' not running!\n",
            255,
            "gpu1: container 101 is not running | start it: ssh root@pve1:2222 pct start 101",
        ),
        (
            "perl: warning: Setting locale failed.\nperl: warning: Falling back.\r\ncontainer '101' not running!\r\n",
            255,
            "gpu1: container 101 is not running | start it: ssh root@pve1:2222 pct start 101",
        ),
        (
            "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout\n",
            4,
            "gpu1: container 101 is locked: another pct command holds its configuration | "
            "wait for that command, then ask again",
        ),
        (
            "CT is locked (backup)\n",
            255,
            "gpu1: container 101 is locked (backup) | wait for it to end, or, if it was cut short: "
            "ssh root@pve1:2222 pct unlock 101",
        ),
        (
            "specctl-node: container 101 is frozen\n",
            255,
            "gpu1: container 101 is frozen: nothing in it can answer | thaw it: ssh root@pve1:2222 lxc-unfreeze -n 101",
        ),
        (
            "lxc-attach: 101: ../src/lxc/attach.c: lxc_attach_run_command: 1841 No such file or directory - "
            'Failed to exec "python3"\n',
            127,
            'gpu1: container 101 cannot run "python3": No such file or directory | '
            "install it there, or check python: of this target in hosts.yaml",
        ),
        (
            "specctl-node: no pct on this node\n",
            255,
            "gpu1: root@pve1:2222 has no pct, so it has no container 101 | a container needs a Proxmox node: "
            "check ssh: in hosts.yaml, or drop vmid: for a plain machine",
        ),
        (
            "please run as root\n",
            255,
            "gpu1: pct on root@pve1:2222 needs root to enter container 101 | "
            "log in to the node as root: ssh: root@host",
        ),
    ],
)
def test_each_failure_of_pct_is_an_error_of_its_own_with_the_next_command(
    stderr: str, exit_code: int, said: str
) -> None:
    assert explain(stderr, exit_code) == said


@pytest.mark.parametrize(
    ("stderr", "exit_code"),
    [
        ("", 255),
        ("", 2),
        ("Traceback (most recent call last):\n", 1),
        ("container '102' not running!\n", 255),
        ("my log: container '101' not running!\n", 1),
        ("container '101' not running!\n", 0),
        ("Configuration file 'nodes/pve/lxc/1011.conf' does not exist\n", 2),
    ],
)
def test_an_exit_code_or_another_text_alone_means_nothing(stderr: str, exit_code: int) -> None:
    assert explain(stderr, exit_code) is None


def test_without_ssh_the_hint_is_the_bare_command() -> None:
    assert explain("container '101' not running!\n", node=None) == (
        "gpu1: container 101 is not running | start it: pct start 101"
    )


def test_a_lost_link_is_told_as_such() -> None:
    lost = Completed(exit_code=None, stdout=b"", stderr=b"", why_unknown="the connection ended", link_lost=True)
    error = PctTransport(LocalTransport(), 101, target="gpu1").explain(lost)
    assert isinstance(error, LinkLost)
    assert str(error) == "gpu1: the connection ended"


def test_without_an_ssh_target_paramiko_is_never_imported() -> None:
    code = (
        "import sys; from orchestrator.inventory import Target; from orchestrator.transport import NodePool, "
        "open_transport; open_transport(Target(name='a', vmid=101), NodePool()); print('paramiko' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
