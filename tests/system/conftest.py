"""Fixtures for the commands on this machine and over a loopback sshd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver import Specctl, over_ssh
from tests.sshd import LoopbackSshd


@pytest.fixture
def box(sshd: LoopbackSshd) -> Iterator[Specctl]:
    """`specctl` with a target `box` over SSH; `python:` is the one that runs the tests."""
    driver = Specctl(SPECCTL_SSH_CONFIG=str(sshd.ssh_config))
    over_ssh(driver)
    yield driver
    driver.close()
