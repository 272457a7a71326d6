"""A link that is cut at any byte is a lost link, in words for people, or is dialled again: never a crash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import AuthError, LinkLost
from orchestrator.transport import NodePool
from tests.sshd import LoopbackSshd
from tests.wire import DOWN, UP, Wire

STEP = 113
"""Bytes between two cuts; no divisor of a packet's length, so that all parts of packets are hit."""


@pytest.fixture
def wire(sshd: LoopbackSshd) -> Iterator[Wire]:
    with Wire(sshd.port) as wire:
        block = sshd.ssh_options().replace(f"Port {sshd.port}", f"Port {wire.port}")
        sshd.ssh_config.write_text(block)
        sshd.known_hosts.write_text(f"[{sshd.address}]:{wire.port} {sshd.host_key}\n")
        yield wire


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_link_that_is_cut_at_any_byte_of_the_login_is_a_lost_link_or_is_dialled_again(
    sshd: LoopbackSshd, wire: Wire, direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    met: Counter[str] = Counter()
    wire.count()
    with NodePool(ssh_config=str(sshd.ssh_config)) as pool:
        assert pool.node("node1").run(["echo", "hi"], deadline_s=20).stdout == b"hi\n"
    for count in range(1, wire.bytes[direction], STEP):
        wire.at(direction, count, wire.cut)
        with NodePool(ssh_config=str(sshd.ssh_config)) as pool:
            try:
                done = pool.node("node1").run(["echo", "hi"], deadline_s=20)
                met["lost" if done.link_lost else "answered"] += 1
                assert done.link_lost or (done.exit_code, done.stdout) == (0, b"hi\n")
            except LinkLost as error:
                met["lost"] += 1
                assert error.hint and "ask again" in error.hint
    assert met["lost"] > 2 and met["answered"] > 2, met


def test_an_sshd_that_says_goodbye_to_too_many_keys_is_no_lost_link(sshd: LoopbackSshd, tmp_path: Path) -> None:
    sshd.stop()
    sshd.options = "MaxAuthTries 1\nLogLevel VERBOSE"
    (sshd.root / "authorized_keys").write_text("")
    sshd.start()
    with NodePool(ssh_config=str(sshd.ssh_config)) as pool, pytest.raises(AuthError) as caught:
        pool.node("node1").run(["echo", "hi"], deadline_s=20)
    assert "Too many authentication failures" in caught.value.message, caught.value
    assert caught.value.hint and "IdentitiesOnly" in caught.value.hint
