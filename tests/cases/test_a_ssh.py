"""Group A of the public bug cases, as far as they are SSH's: each test names its case, and runs against a real sshd.

A11 as a user meets it, in `logs -f`, is in tests/system/test_ssh_target.py; more of A9 and A10 is in test_ssh_hops.py
and test_ssh_keys.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator import frames
from orchestrator.errors import AgentError, DeadlineExceeded, HostKeyError, LinkLost, SpecctlError, UnreachableError
from orchestrator.inventory import load_inventory
from orchestrator.remote import Agent
from orchestrator.transport import NodePool, Transport, open_transport
from orchestrator.transport.local import LocalTransport
from tests.driver import Specctl, poll_until
from tests.sshd import LoopbackSshd, make_key


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def pool(sshd: LoopbackSshd) -> Iterator[NodePool]:
    with NodePool(ssh_config=str(sshd.ssh_config)) as made:
        yield made


@pytest.fixture(params=["local", "ssh"])
def transport(request: pytest.FixtureRequest) -> Transport:
    if request.param == "local":
        return LocalTransport("gpu1")
    pool: NodePool = request.getfixturevalue("pool")
    return pool.node("node1", target="gpu1")


# --- A1, A2: streams and the exit status ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["stderr", "stdout"])
def test_a1_both_streams_come_whole_with_the_exit_code_whichever_fills_first(transport: Transport, first: str) -> None:
    big = {"stderr": "head -c 3145728 /dev/zero >&2", "stdout": "head -c 3145728 /dev/zero | tr '\\0' x"}
    second = "stdout" if first == "stderr" else "stderr"
    done = transport.run(["sh", "-c", f"{big[first]}; {big[second]}; exit 7"], deadline_s=60)
    assert (len(done.stderr), len(done.stdout), done.exit_code) == (3 * 2**20, 3 * 2**20, 7)
    assert set(done.stdout) == {ord("x")}


def test_a2_streams_that_end_without_a_status_are_waited_for_until_the_deadline(transport: Transport) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"^gpu1: no complete answer within 1\.5 s") as caught:
        transport.run(["sh", "-c", "exec >&- 2>&-; exec sleep 50"], deadline_s=1.5)
    assert time.monotonic() - started < 20
    assert caught.value.exit_code == 3, "unknown is not failed"


def test_a2_what_ran_past_its_deadline_is_ended_on_the_node_with_its_children(pool: NodePool, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' TERM HUP; sleep 50 & echo $! $$ > {pids}; wait"
    with pytest.raises(DeadlineExceeded):
        pool.node("node1").run(["sh", "-c", script], deadline_s=1)
    for pid in pids.read_text().split():
        poll_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), what=f"the end of {pid}")


def test_a2_a_node_without_timeout_runs_commands_all_the_same(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("sh", "cat"):
        (bare / name).symlink_to(f"/bin/{name}")
    with (
        LoopbackSshd(tmp_path / "sshd", options=f"SetEnv PATH={bare} HOME={tmp_path}/sshd/home") as sshd,
        NodePool(ssh_config=str(sshd.ssh_config)) as pool,
    ):
        done = pool.node("node1").run(["sh", "-c", 'echo "$0 $PATH"; cat; exit 3', "it's"], stdin=b"in", deadline_s=30)
    assert (done.stdout, done.exit_code) == (f"it's {bare}\nin".encode(), 3)


# --- A9: jump hosts -------------------------------------------------------------------------------------------------


def test_a9_a_host_behind_two_jumps_is_never_dialled_directly(sshd: LoopbackSshd, tmp_path: Path) -> None:
    dialled = []
    with LoopbackSshd(tmp_path / "b", alias="b", options="AllowTcpForwarding no") as b:
        with socket.create_server(("127.0.0.1", 0)) as node:

            def watch() -> None:
                while True:
                    try:
                        connection, peer = node.accept()
                    except OSError:
                        return
                    dialled.append(peer)
                    connection.close()

            threading.Thread(target=watch, daemon=True).start()
            behind = f"Host gpu\n  HostName 127.0.0.1\n  Port {node.getsockname()[1]}\n  ProxyJump node1,b\n"
            config = tmp_path / "config"
            config.write_text(behind + sshd.ssh_options() + b.ssh_options())
            with (
                NodePool(ssh_config=str(config)) as pool,
                pytest.raises(UnreachableError, match=r"^gpu: jump host b does not allow a way on to \[127"),
            ):
                pool.node("gpu").run(["true"], deadline_s=30)
            assert (sshd.logins, b.logins, dialled) == (1, 1, [])
            config.write_text(config.read_text().replace("ProxyJump node1,b", "ProxyJump node1"))
            with NodePool(ssh_config=str(config)) as pool, pytest.raises(UnreachableError):
                pool.node("gpu").run(["true"], deadline_s=2)
            assert dialled, "the watch over direct dials sees none at all"
            node.shutdown(socket.SHUT_RDWR)


# --- A10: host keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hashed", [False, True])
def test_a10_an_unknown_and_a_changed_key_are_two_errors_with_host_port_and_mending_command(
    sshd: LoopbackSshd, pool: NodePool, tmp_path: Path, hashed: bool
) -> None:
    make_key(tmp_path / "other")
    sshd.known_hosts.write_text(f"{sshd.where} {(tmp_path / 'other.pub').read_text()}")
    if hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", sshd.known_hosts], check=True, capture_output=True)
        sshd.known_hosts.with_suffix(".old").unlink()
        assert sshd.where not in sshd.known_hosts.read_text()
    before = sshd.known_hosts.read_bytes()
    node = pool.node("node1", target="gpu1")
    with pytest.raises(HostKeyError) as changed:
        node.run(["true"], deadline_s=30)
    assert f"gpu1: the host key of {sshd.where} has changed" in str(changed.value)
    assert f"{sshd.known_hosts}:1" in str(changed.value)
    assert sshd.known_hosts.read_bytes() == before
    # The hint is the mending command: after it, the key is unknown, no longer changed.
    command = (changed.value.hint or "").partition(": ")[2]
    assert "ssh-keygen" in command
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    with pytest.raises(HostKeyError) as unknown:
        node.run(["true"], deadline_s=30)
    assert f"gpu1: the host key of {sshd.where} is not known" in str(unknown.value)
    printed = subprocess.run(["ssh-keygen", "-lf", sshd.root / "host_key.pub"], capture_output=True, text=True)
    assert printed.stdout.split()[1] in str(unknown.value)
    assert unknown.value.exit_code == changed.value.exit_code == 3
    # And so is this one: after it, the host is known. Nobody is here to be asked.
    command = (unknown.value.hint or "").partition("accept it: ")[2].partition("; or")[0]
    assert f"ssh -o StrictHostKeyChecking=ask -F {sshd.ssh_config} node1 true" in command
    command = command.replace("StrictHostKeyChecking=ask", "StrictHostKeyChecking=accept-new")
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    assert node.run(["true"], deadline_s=30).exit_code == 0


def test_a10_accept_new_trusts_once_writes_only_specctls_own_file_and_never_takes_a_changed_key(
    sshd: LoopbackSshd,
) -> None:
    specctl = Specctl(SPECCTL_SSH_CONFIG=str(sshd.ssh_config))
    try:
        specctl.inventory.write_text(
            f"targets:\n  box: {{ssh: node1, workdir: {specctl.workdir}, python: {sys.executable}}}\n"
        )
        sshd.known_hosts.write_text("# my own words\n")
        own = specctl.home / "state" / "specctl" / "known_hosts"
        refused = specctl("status", "box")
        assert refused.code == 3 and "is not known" in refused.err + refused.out
        assert "specctl --accept-new" in refused.err + refused.out
        assert not own.exists()
        nameless = specctl("stop")
        assert nameless.code == 3 and "name the run: box could not be asked" in nameless.err
        assert "specctl --accept-new" in nameless.err, "the way on from there stands here too"
        accepted = specctl("--accept-new", "status", "box", COLUMNS="1000")
        assert accepted.code == 0
        assert f"{sshd.where} is trusted from now on, by ssh-ed25519 SHA256:" in accepted.err
        assert str(own) in accepted.err
        again = specctl("--accept-new", "status", "box")
        assert again.code == 0 and "trusted" not in again.err
        assert own.read_text() == f"{sshd.where} {sshd.host_key}\n"
        sshd.rotate_host_key()
        changed = specctl("--accept-new", "status", "box", COLUMNS="1000")
        assert changed.code == 3 and "has changed" in changed.err + changed.out
        mend = f"ssh-keygen -f {own} -R '{sshd.where}'"
        assert mend in changed.err + changed.out
        assert sshd.host_key not in own.read_text() and sshd.known_hosts.read_text() == "# my own words\n"
        subprocess.run(["sh", "-c", mend], check=True, capture_output=True)
        assert specctl("--accept-new", "status", "box").code == 0
        assert sshd.host_key in own.read_text() and sshd.known_hosts.read_text() == "# my own words\n"
    finally:
        specctl.close()


# --- A11: a peer that is dead and does not say so -------------------------------------------------------------------


def test_a11_a_frozen_sshd_is_a_lost_link_and_hangs_nobody(sshd: LoopbackSshd, pool: NodePool) -> None:
    node = pool.node("node1", target="gpu1")
    with node.stream(["sh", "-c", "while :; do echo beat; sleep 0.1; done"], idle_s=2) as stream:
        chunks = iter(stream)
        next(chunks)
        sshd.pause()
        with pytest.raises(LinkLost, match=r"nothing was heard for 2 s|the connection ended") as lost:
            for _ in chunks:
                pass
    assert "not known" in (lost.value.hint or "")
    with pytest.raises(UnreachableError) as caught:
        node.run(["true"], deadline_s=2)
    assert (caught.value.exit_code, lost.value.exit_code, caught.value.target) == (3, 3, "gpu1")
    sshd.resume()
    assert node.run(["echo", "back"], deadline_s=30).stdout == b"back\n"


# --- A12: what a shell's start-up does ------------------------------------------------------------------------------


def asked(
    sshd: LoopbackSshd, pool: NodePool, root: Path, start_up: str, *, deadline_s: float = 60
) -> SpecctlError | None:
    """How an answer of the agent fails, which first is sent there, after this start-up file."""
    (sshd.home / ".bashrc").write_text(start_up)
    (root / "hosts.yaml").write_text(f"targets:\n  box: {{ssh: node1, workdir: {root}/w, python: {sys.executable}}}\n")
    inventory = load_inventory(str(root / "hosts.yaml"), environ={}, cwd=root, home=root)
    target = inventory.targets["box"]
    try:
        Agent(target, open_transport(target, pool)).call("probe", deadline_s=deadline_s)
        return None
    except SpecctlError as error:
        return error


NOTICE = "printf '\\033[33mWelcome!\\033[0m\\n'; echo and more >&2\n"


def test_a12_a_coloured_notice_of_the_start_up_is_in_nobodys_way(
    sshd: LoopbackSshd, pool: NodePool, tmp_path: Path
) -> None:
    assert asked(sshd, pool, tmp_path, NOTICE) is None
    done = pool.node("node1").run(["cat"], stdin=frames.encode("tok", {"a": 1}), deadline_s=30)
    assert done.stdout.startswith(b"\x1b[33mWelcome!"), "the shell of this user reads no start-up file"
    assert frames.FrameReader("tok").feed(done.stdout) == [{"a": 1}]


@pytest.mark.parametrize(
    ("start_up", "words"),
    [
        ("echo 'disk quota exceeded'; exit 1\n", r"no answer \(exit code 1\): disk quota exceeded"),
        ("echo 'down for maintenance'; exit 0\n", r"no answer \(exit code 0\): down for maintenance"),
        ("read -r answer\n", "a shell start-up file there that reads stdin takes it away"),
        ("cat >/dev/null\n", "a shell start-up file there that reads stdin takes it away"),
    ],
)
def test_a12_a_start_up_that_lets_no_command_through_is_named(
    sshd: LoopbackSshd, pool: NodePool, tmp_path: Path, start_up: str, words: str
) -> None:
    with pytest.raises(AgentError, match=words) as caught:
        raise asked(sshd, pool, tmp_path, start_up) or AssertionError("it answered")
    assert "reads stdin" in words or "try by hand: ssh node1 echo works; a start-up file" in (caught.value.hint or "")


def test_a12_a_start_up_that_hangs_is_told_with_what_it_said(
    sshd: LoopbackSshd, pool: NodePool, tmp_path: Path
) -> None:
    with pytest.raises(DeadlineExceeded, match=r"within 2 s; all it said is: waiting for the VPN$") as caught:
        raise asked(
            sshd, pool, tmp_path, "printf '\\033[31mwaiting\\033[0m for the VPN'; exec sleep 30\n", deadline_s=2
        ) or AssertionError("it answered")
    assert "start-up file" in (caught.value.hint or "")


# --- bursts ---------------------------------------------------------------------------------------------------------

BURST = """
import sys
from concurrent.futures import ThreadPoolExecutor
from orchestrator.transport import NodePool

def one(_):
    with NodePool(ssh_config=sys.argv[1]) as pool:
        return pool.node("node1").run(["true"], deadline_s=60).exit_code

with ThreadPoolExecutor(10) as threads:
    assert set(threads.map(one, range(10))) == {0}
"""


def test_a_burst_of_logins_from_several_processes_stays_under_max_startups(tmp_path: Path) -> None:
    with LoopbackSshd(tmp_path / "sshd", options="MaxStartups 8:100:8") as sshd:
        environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        argv = [sys.executable, "-c", BURST, str(sshd.ssh_config)]
        processes = [subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:
            said = list(threads.map(lambda process: process.communicate(timeout=120)[1], processes))
        assert [process.returncode for process in processes] == [0, 0], said
        assert (sshd.logins, "drop connection" in sshd.log, "beginning MaxStartups" in sshd.log) == (20, False, False)
