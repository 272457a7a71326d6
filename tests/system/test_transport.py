"""The local and SSH transports against real processes and a real loopback sshd: bytes, deadlines, keys, lost links."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from orchestrator.errors import ConfigError, DeadlineExceeded, LinkLost, UnreachableError
from orchestrator.transport.base import Transport
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.ssh import SshNode, SshTransport
from tests.driver import alive
from tests.sshd import LoopbackSshd

PYTHON = sys.executable
NASTY = [
    "",
    " ",
    "a b",
    'it\'s "quoted"',
    "$HOME ${PATH} $(echo X) `echo Y`",
    "line\nbreak\n",
    "tab\tand\\back\\slash",
    "*.py ? [a-z] {a,b} ~ ~root",
    "; echo X # & | > < !",
    "-n",
    "--",
    "--help",
    "ünï☃ 日本語",
    "\x01\x7f",
    "=",
    "%s%n",
]
"""Arguments that a second layer of quoting, or none, would change."""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


def node_of(sshd: LoopbackSshd) -> SshNode:
    return SshNode(sshd.alias, ssh_config_file=str(sshd.ssh_config))


def trust(sshd: LoopbackSshd, public_key: Path) -> None:
    """Let known_hosts have this key for the server, and nothing else."""
    sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {public_key.read_text()}")


def configure(sshd: LoopbackSshd, option: str) -> None:
    """Add an option to the host in ssh_config."""
    sshd.ssh_config.write_text(f"{sshd.ssh_config.read_text()}  {option}\n")


def sessions(sshd: LoopbackSshd) -> list[int]:
    """The sshd processes of the connections, without the server that listens."""
    return sshd._pids()[1:]


@pytest.fixture
def node(sshd: LoopbackSshd) -> Iterator[SshNode]:
    made = node_of(sshd)
    yield made
    made.close()


@pytest.fixture(params=["local", "ssh"])
def transport(request: pytest.FixtureRequest) -> Transport:
    if request.param == "local":
        return LocalTransport("t")
    return SshTransport(request.getfixturevalue("node"), "t")


# --- both -----------------------------------------------------------------------------------------------------------


def test_every_argument_arrives_byte_for_byte(transport: Transport) -> None:
    code = "import sys, os; sys.stdout.buffer.write(b'\\0'.join(os.fsencode(a) for a in sys.argv[1:]))"
    done = transport.run([PYTHON, "-c", code, *NASTY], deadline_s=60)
    assert done.stdout.split(b"\0") == [text.encode() for text in NASTY]


def test_a_hundred_megabytes_of_stdin_arrive_whole(transport: Transport) -> None:
    block = os.urandom(2**20)
    digest = hashlib.sha256(block * 100).hexdigest()
    done = transport.run(["sha256sum"], stdin=(block for _ in range(100)), deadline_s=120)
    assert done.stdout.split()[0].decode() == digest


def test_stdin_larger_than_any_buffer_is_fed_while_the_answer_is_read(transport: Transport) -> None:
    data = os.urandom(8 * 2**20)
    assert transport.run(["cat"], stdin=data, deadline_s=60).stdout == data


def test_without_stdin_a_reader_sees_its_end(transport: Transport) -> None:
    done = transport.run(["cat"], deadline_s=30)
    assert (done.stdout, done.exit_code) == (b"", 0)


def test_a_command_that_reads_nothing_of_its_stdin_still_answers(transport: Transport) -> None:
    done = transport.run(["sh", "-c", "echo done; exit 3"], stdin=b"x" * 2**24, deadline_s=60)
    assert (done.stdout, done.exit_code) == (b"done\n", 3)


def test_a_stdin_that_fails_is_the_caller_s_error_and_no_short_input(transport: Transport) -> None:
    def failing() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the disk went away")

    with pytest.raises(RuntimeError, match="the disk went away"):
        transport.run(["sh", "-c", "cat; echo took it"], stdin=failing(), deadline_s=30)


def test_the_deadline_ends_the_wait(transport: Transport) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"^t: no complete answer within 1\.5 s$") as caught:
        transport.run(["sleep", "50"], deadline_s=1.5)
    assert time.monotonic() - started < 20
    assert caught.value.exit_code == 3


def test_a_program_that_does_not_exist_is_127_and_named(transport: Transport) -> None:
    done = transport.run(["no-such-program-here"], deadline_s=30)
    assert done.exit_code == 127
    assert b"no-such-program-here" in done.stderr


def test_death_by_a_signal_is_no_exit_code(transport: Transport) -> None:
    done = transport.run(["sh", "-c", "echo before; kill -9 $$"], deadline_s=30)
    assert (done.exit_code, done.stdout, done.link_lost) == (None, b"before\n", False)
    assert "signal" in (done.why_unknown or "")
    assert transport.explain(done) is None


def test_a_stream_gives_what_has_come_before_the_command_ends(transport: Transport) -> None:
    # The command ends only after its first line was read here, and answered.
    script = 'echo first; read answer; echo "got $answer"; echo late >&2; exit 4'
    heard = threading.Event()

    def answer() -> Iterator[bytes]:
        assert heard.wait(30)
        yield b"yes\n"

    # The local transport pulls stdin from the reading thread, so the answer must be there before the next read.
    with transport.stream(["sh", "-c", script], stdin=b"yes\n", deadline_s=30) as stream:
        text = b"".join(stream)
    assert (text, stream.exit_code, stream.stderr) == (b"first\ngot yes\n", 4, b"late\n")
    if isinstance(transport, SshTransport):
        with transport.stream(["sh", "-c", script], stdin=answer(), deadline_s=30) as stream:
            chunks = iter(stream)
            assert next(chunks) == b"first\n"
            heard.set()
            assert b"".join(chunks) == b"got yes\n"


def test_silence_in_a_stream_is_a_lost_link(transport: Transport) -> None:
    with transport.stream(["sh", "-c", "echo beat; sleep 50"], idle_s=1.5) as stream:
        chunks = iter(stream)
        assert next(chunks) == b"beat\n"
        with pytest.raises(LinkLost, match=r"^t: nothing was heard for 1\.5 s"):
            next(chunks)


def test_the_reader_s_own_pause_is_not_silence(transport: Transport) -> None:
    with transport.stream(["sh", "-c", "echo one; echo two"], idle_s=1.0) as stream:
        text = b""
        for chunk in stream:
            text += chunk
            time.sleep(1.2)  # the pause is what is tested
    assert text == b"one\ntwo\n"


def test_a_stream_keeps_only_the_end_of_stderr(transport: Transport) -> None:
    with transport.stream(["sh", "-c", "head -c 5000000 /dev/zero >&2; echo end >&2"], deadline_s=60) as stream:
        assert list(stream) == []
    assert stream.stderr.endswith(b"\0end\n")
    assert len(stream.stderr) <= 2**18


def test_twenty_threads_share_a_transport(transport: Transport) -> None:
    def one(number: int) -> bytes:
        return transport.run(["sh", "-c", f"echo {number}; cat"], stdin=b"x" * 70_000, deadline_s=60).stdout

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(one, range(20)))
    assert answers == [b"%d\n" % number + b"x" * 70_000 for number in range(20)]


# --- local ----------------------------------------------------------------------------------------------------------


def test_letting_go_of_a_local_command_kills_its_whole_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 50 & echo $! $$ > {pids}; echo up; wait"
    with LocalTransport().stream(["sh", "-c", script]) as stream:
        assert next(iter(stream)) == b"up\n"
    for pid in pids.read_text().split():
        wait_until(lambda pid=pid: not alive(int(pid)), f"{pid} is dead")


# --- SSH: one connection --------------------------------------------------------------------------------------------


def connections(sshd: LoopbackSshd) -> int:
    return sshd.log.count("Accepted publickey")


def test_all_commands_of_a_node_use_one_connection(sshd: LoopbackSshd, node: SshNode) -> None:
    transports = [SshTransport(node, f"t{number}") for number in range(3)]
    with ThreadPoolExecutor(12) as pool:
        done = list(pool.map(lambda n: transports[n % 3].run(["sleep", "0.3"], deadline_s=60), range(24)))
    assert {one.exit_code for one in done} == {0}
    assert connections(sshd) == 1


def test_a_closed_connection_is_opened_again(sshd: LoopbackSshd, node: SshNode) -> None:
    transport = SshTransport(node)
    assert transport.run(["true"], deadline_s=30).exit_code == 0
    transport.close()
    assert transport.run(["true"], deadline_s=30).exit_code == 0
    for pid in sessions(sshd):
        os.kill(pid, signal.SIGKILL)
    assert transport.run(["true"], deadline_s=30).exit_code == 0
    assert connections(sshd) == 3


def test_a_dropped_link_is_unknown_never_an_exit_code_and_nothing_is_sent_again(
    sshd: LoopbackSshd, node: SshNode, tmp_path: Path
) -> None:
    transport = SshTransport(node, "gpu1")
    running = tmp_path / "running"

    def kill_connection() -> None:
        wait_until(running.exists, "the command runs")
        for pid in sessions(sshd):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_connection)
    killer.start()
    done = transport.run(["sh", "-c", f"echo part; echo once >>{running}; sleep 20; :"], deadline_s=60)
    killer.join()
    assert (done.exit_code, done.stdout, done.link_lost) == (None, b"part\n", True)
    error = transport.explain(done)
    assert isinstance(error, LinkLost)
    assert str(error).startswith("gpu1: the connection ended before the command did")
    assert running.read_text() == "once\n", "what may have run is never sent again"


# --- SSH: nobody there ----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_link_that_ends_while_one_tells_the_peer_that_there_is_room_again_is_lost_too(
    sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_of(sshd)
    transport = SshTransport(node, "gpu1")

    def gone(*_: object) -> None:
        raise EOFError  # as paramiko's packetizer does for a socket that takes no more (write_all)

    with transport.stream(["head", "-c", "50000000", "/dev/zero"]) as stream:
        chunks = iter(stream)
        next(chunks)
        monkeypatch.setattr(paramiko.packet.Packetizer, "send_message", gone)
        with pytest.raises(LinkLost, match="gpu1: the connection ended before the command did"):
            for _ in chunks:
                pass
        monkeypatch.undo()
    node.close()


def test_a_refused_port_and_an_unknown_name_each_say_so(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("")
    port = free_port()
    with pytest.raises(UnreachableError, match=rf"^gpu1: \[127\.0\.0\.1\]:{port} refused the connection") as caught:
        node = SshNode(f"root@127.0.0.1:{port}", ssh_config_file=str(config))
        SshTransport(node, "gpu1").run(["true"], deadline_s=30)
    assert caught.value.hint
    with pytest.raises(UnreachableError, match=r"no address for host 'no-such-host\.invalid'"):
        SshTransport(SshNode("no-such-host.invalid", ssh_config_file=str(config))).run(["true"], deadline_s=30)


def test_a_port_that_takes_connections_and_says_nothing_is_given_up(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("ConnectTimeout 1\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = SshNode(f"127.0.0.1:{listener.getsockname()[1]}", ssh_config_file=str(config))
        with pytest.raises(UnreachableError, match="no key exchange came within 1 s") as caught:
            SshTransport(node).run(["true"], deadline_s=60)
    assert caught.value.exit_code == 3


def test_a_port_where_something_else_speaks_is_named_with_its_words(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=greet, daemon=True).start()
        node = SshNode(f"127.0.0.1:{listener.getsockname()[1]}", ssh_config_file=str(config))
        with pytest.raises(UnreachableError, match=r"is no SSH server: it says '220 mail\.example ESMTP'") as caught:
            SshTransport(node).run(["true"], deadline_s=60)
    assert "port" in (caught.value.hint or "")


def test_a_broken_ssh_config_is_told_with_its_line(sshd: LoopbackSshd) -> None:
    configure(sshd, "NoSuchOption yes")
    with pytest.raises(ConfigError, match=r"line \d+: Bad configuration option: nosuchoption"):
        SshTransport(node_of(sshd)).run(["true"], deadline_s=30)
