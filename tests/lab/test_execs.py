"""How often a node is asked to run something: each time costs the user a round trip, and the node what pct costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver import Specctl
from tests.lab.lab import Lab


@pytest.fixture
def there(lab: Lab) -> Iterator[Specctl]:
    specctl = Specctl(lab.hosts_yaml(workdir="/workspace/execs"), SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    yield specctl
    for vmid in (101, 102):
        lab.clear(vmid, "/workspace/execs")
    specctl.close()


def execs(lab: Lab, specctl: Specctl, *words: str) -> int:
    log = lab.run / "ssh" / "sshd.log"
    before = log.read_text(errors="replace").count("Starting session: command")
    done = specctl(*words)
    assert done.code == 0, done.out + done.err
    return log.read_text(errors="replace").count("Starting session: command") - before


@pytest.mark.real_lab("what a sshd logs of its sessions")
def test_a_launch_takes_three_execs_four_with_new_code_and_a_status_one_for_all(lab: Lab, there: Specctl) -> None:
    launch = ("launch", "ct101", "--until", "process", "--", "sleep", "1000")
    execs(lab, there, *launch)
    assert execs(lab, there, "launch", "ct102", *launch[2:]) > 3, "agent and code come along"
    assert execs(lab, there, *launch) == 3
    (there.project / "changed.py").write_text("# changed\n")
    assert execs(lab, there, *launch) == 4
    assert execs(lab, there, "status", "ct101", "ct102") == 1
