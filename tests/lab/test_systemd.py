"""A container that boots as a Debian template does: systemd and logind, where a login's end takes what it has left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver import Specctl, poll_until
from tests.lab.lab import Lab

KILLS = "cd /etc/systemd; printf '[Login]\\nKillUserProcesses=yes\\n' >logind.conf; systemctl restart systemd-logind"
LOGIN = "su -l train -c 'sleep 71.7 >/dev/null 2>&1 & cat /proc/self/cgroup'"


@pytest.fixture
def specctl(lab: Lab) -> Iterator[Specctl]:
    """Targets `root` and `train`: two users of one container of systemd, whose logind is strict."""
    lab.container(133, entrypoint="/sbin/init")
    driver = Specctl(
        "defaults: {ssh: pve, vmid: 133, workdir: ~/w}\ntargets: {root: {}, train: {user: train}}\n",
        SPECCTL_SSH_CONFIG=str(lab.ssh_config),
    )
    try:
        poll_until(lambda: lab.inside(133, ["systemctl", "is-active", "systemd-logind"]).stdout == "active\n")
        lab.inside(133, ["sh", "-ec", f"useradd -m train; {KILLS}"], check=True)
        yield driver
    finally:
        driver.close()
        lab.stop(133)
        lab.undefine(133)


def test_b6_a_run_outlives_every_login_and_a_reload_of_the_manager(specctl: Specctl, lab: Lab) -> None:
    for target in ("root", "train"):
        done = specctl.launch("--no-source", "--until", "process", "--", "sleep", "600", target=target)
        assert done.code == 0, done.err
    assert "/user.slice/" in lab.inside(133, ["sh", "-ec", LOGIN]).stdout, "a real login, of the same user"
    poll_until(lambda: lab.inside(133, ["pgrep", "-f", "sleep 71[.]7"]).returncode == 1, what="logind's kill")
    lab.inside(133, ["sh", "-ec", "systemctl daemon-reload; systemctl daemon-reexec"], check=True)
    rows = specctl("status", "--json").json["runs"]
    assert [row["state"] for row in rows] == ["STARTING", "STARTING"], "both are alive"
