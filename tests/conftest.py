"""Fixtures for every test: a loopback sshd."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import Specctl
from tests.sshd import LoopbackSshd, SshdMissing


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[LoopbackSshd]:
    """A real sshd on loopback; `sshd.ssh_config` has the host `node1`."""
    try:
        with LoopbackSshd(tmp_path / "sshd") as server:
            yield server
    except SshdMissing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
def specctl() -> Iterator[Specctl]:
    """The command line with a home of its own and one target, `local`."""
    driver = Specctl()
    yield driver
    driver.close()
