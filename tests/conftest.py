"""Fixtures for every test: a loopback sshd."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import Specctl
from tests.sshd import LoopbackSshd, SshdMissing

if threading.current_thread() is threading.main_thread():
    # In the background of a script, or under nohup, they are ignored, and so by every program that a test starts.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


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
