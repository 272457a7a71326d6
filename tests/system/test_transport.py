"""The local and SSH transports against real processes and a real loopback sshd: bytes, deadlines, keys, lost links."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator import frames
from orchestrator.errors import AuthError, ConfigError, DeadlineExceeded, HostKeyError, LinkLost, UnreachableError
from orchestrator.transport.base import Transport
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.ssh import SshNode, SshTransport
from tests.sshd import LoopbackSshd, answers, make_key

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


def test_both_streams_come_whole_and_in_any_order_with_the_exit_code(transport: Transport) -> None:
    script = "head -c 3145728 /dev/zero >&2; head -c 3145728 /dev/zero | tr '\\0' x; exit 7"
    done = transport.run(["sh", "-c", script], deadline_s=60)
    assert (len(done.stderr), len(done.stdout), done.exit_code) == (3 * 2**20, 3 * 2**20, 7)
    assert set(done.stdout) == {ord("x")}


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


def test_the_deadline_holds_when_the_outputs_end_and_the_command_does_not(transport: Transport) -> None:
    with pytest.raises(DeadlineExceeded):
        transport.run(["sh", "-c", "exec >&- 2>&-; sleep 50"], deadline_s=1.5)


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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


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


def test_a_dropped_link_is_unknown_never_an_exit_code(sshd: LoopbackSshd, node: SshNode, tmp_path: Path) -> None:
    transport = SshTransport(node, "gpu1")
    running = tmp_path / "running"

    def kill_connection() -> None:
        wait_until(running.exists, "the command runs")
        for pid in sessions(sshd):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_connection)
    killer.start()
    done = transport.run(["sh", "-c", f"echo part; touch {running}; sleep 20; :"], deadline_s=60)
    killer.join()
    assert (done.exit_code, done.stdout, done.link_lost) == (None, b"part\n", True)
    error = transport.explain(done)
    assert isinstance(error, LinkLost)
    assert str(error).startswith("gpu1: the connection ended before the command did")


def test_a_frozen_sshd_hangs_nobody(sshd: LoopbackSshd, node: SshNode) -> None:
    transport = SshTransport(node, "gpu1")
    stream = transport.stream(["sh", "-c", "while :; do echo beat; sleep 0.1; done"], idle_s=2)
    with stream:
        chunks = iter(stream)
        next(chunks)
        sshd.pause()
        with pytest.raises(LinkLost, match=r"nothing was heard for 2 s|the connection ended"):
            for _ in chunks:
                pass
    with pytest.raises((DeadlineExceeded, UnreachableError)) as caught:
        transport.run(["true"], deadline_s=2)
    assert caught.value.exit_code == 3
    assert caught.value.target == "gpu1"
    sshd.resume()
    assert transport.run(["echo", "back"], deadline_s=30).stdout == b"back\n"


def test_noise_of_the_shell_s_start_up_is_around_the_frame_and_harms_nothing(sshd: LoopbackSshd) -> None:
    sshd.make_noisy("\x1b[31mWelcome!\x1b[0m")
    done = SshTransport(node_of(sshd)).run(["cat"], stdin=frames.encode("tok", {"a": 1}), deadline_s=30)
    assert done.stdout.startswith(b"\x1b[31mWelcome!"), "the shell of this user reads no start-up file"
    assert frames.FrameReader("tok").feed(done.stdout) == [{"a": 1}]


# --- SSH: who is there, and who asks --------------------------------------------------------------------------------


@pytest.mark.parametrize("hashed", [False, True])
def test_an_unknown_and_a_changed_key_are_two_errors_with_host_port_and_mending_command(
    sshd: LoopbackSshd, tmp_path: Path, hashed: bool
) -> None:
    where = f"[127.0.0.1]:{sshd.port}"
    make_key(tmp_path / "other")
    trust(sshd, tmp_path / "other.pub")
    if hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", sshd.known_hosts], check=True, capture_output=True)
        assert where not in sshd.known_hosts.read_text()
    before = sshd.known_hosts.read_bytes()
    with pytest.raises(HostKeyError) as changed:
        SshTransport(node_of(sshd), "gpu1").run(["true"], deadline_s=30)
    assert f"gpu1: the host key of {where} has changed" in str(changed.value)
    assert f"{sshd.known_hosts}:1" in str(changed.value)
    assert sshd.known_hosts.read_bytes() == before
    # The hint is the mending command: after it, the key is unknown, no longer changed.
    command = (changed.value.hint or "").partition(": ")[2]
    assert "ssh-keygen" in command
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    with pytest.raises(HostKeyError) as unknown:
        SshTransport(node_of(sshd), "gpu1").run(["true"], deadline_s=30)
    assert f"gpu1: the host key of {where} is not known" in str(unknown.value)
    assert f"ssh -o StrictHostKeyChecking=ask -F {sshd.ssh_config} node1 true" in (unknown.value.hint or "")
    printed = subprocess.run(["ssh-keygen", "-lf", sshd.root / "host_key.pub"], capture_output=True, text=True)
    assert printed.stdout.split()[1] in str(unknown.value)
    assert unknown.value.exit_code == changed.value.exit_code == 3


def test_the_key_type_on_record_is_asked_for_first(sshd: LoopbackSshd) -> None:
    rsa, ed25519 = sshd.root / "host_rsa", sshd.root / "host_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", rsa], check=True)
    config = (sshd.root / "sshd_config").read_text().replace(f"Port {sshd.port}", f"HostKey {rsa}\nPort {sshd.port}")
    with second_sshd(sshd, config):
        for key in (rsa, ed25519):
            trust(sshd, key.with_name(f"{key.name}.pub"))
            node = node_of(sshd)
            assert SshTransport(node).run(["true"], deadline_s=30).exit_code == 0
            node.close()


@contextlib.contextmanager
def second_sshd(sshd: LoopbackSshd, config: str) -> Iterator[None]:
    """The server with another configuration, on the same port."""
    sshd.stop()
    path = sshd.root / "sshd_config.other"
    path.write_text(config)
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or "sshd"
    process = subprocess.Popen([program, "-D", "-e", "-f", path], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(sshd.port), "sshd answers")
        yield
    finally:
        process.kill()
        process.wait(10)


def test_lines_about_certificates_and_broken_ones_do_not_hide_the_key(sshd: LoopbackSshd) -> None:
    good = sshd.known_hosts.read_text()
    key = (sshd.root / "id.pub").read_text().split()
    sshd.known_hosts.write_text(f"@cert-authority * {key[0]} {key[1]}\nnonsense\n[x]:1 ssh-rsa !!!\n\n# words\n{good}")
    assert SshTransport(node_of(sshd)).run(["true"], deadline_s=30).exit_code == 0


def test_a_revoked_key_is_refused(sshd: LoopbackSshd) -> None:
    good = sshd.known_hosts.read_text()
    key = (sshd.root / "host_key.pub").read_text().split()
    sshd.known_hosts.write_text(f"{good}@revoked * {key[0]} {key[1]}\n")
    with pytest.raises(HostKeyError, match=r"is revoked by .*:2"):
        SshTransport(node_of(sshd)).run(["true"], deadline_s=30)


def test_a_key_that_the_node_does_not_know_is_an_auth_error_naming_it(sshd: LoopbackSshd) -> None:
    (sshd.root / "authorized_keys").write_text("")
    with pytest.raises(AuthError, match=f"refused {sshd.root}/id") as caught:
        SshTransport(node_of(sshd), "gpu1").run(["true"], deadline_s=30)
    assert "authorized_keys" in (caught.value.hint or "")


def encrypt(sshd: LoopbackSshd) -> None:
    path = sshd.root / "id"
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", path], check=True, capture_output=True)


def test_an_encrypted_key_without_an_agent_is_named_with_the_command_that_helps(
    sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypt(sshd)
    for there, hint in (
        (False, f'eval "$(ssh-agent)" && ssh-add {sshd.root}/id'),
        (True, f"ssh-add {sshd.root}/id (and drop `IdentityAgent none` for this host in ssh_config)"),
    ):
        if there:
            configure(sshd, "IdentityAgent none")
            monkeypatch.setenv("SSH_AUTH_SOCK", str(sshd.root / "agent"))
        else:
            monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        why = f"{sshd.root}/id is encrypted and the agent does not hold it"
        with pytest.raises(AuthError, match=why) as caught:
            SshTransport(node_of(sshd)).run(["true"], deadline_s=30)
        assert caught.value.hint == hint


@pytest.mark.parametrize("public_file", [True, False])
def test_an_encrypted_key_is_used_through_the_agent(sshd: LoopbackSshd, tmp_path: Path, public_file: bool) -> None:
    socket_path = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket_path], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket_path.exists, "the agent listens")
        environ = {**os.environ, "SSH_AUTH_SOCK": str(socket_path)}
        subprocess.run(["ssh-add", "-q", sshd.root / "id"], env=environ, check=True)
        encrypt(sshd)
        if not public_file:
            (sshd.root / "id.pub").unlink()
        configure(sshd, f"IdentityAgent {socket_path}")
        assert SshTransport(node_of(sshd)).run(["echo", "in"], deadline_s=30).stdout == b"in\n"
    finally:
        agent.terminate()
        agent.wait(10)


# --- SSH: nobody there ----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def test_a_port_that_hangs_up_at_once_is_tried_a_few_times_and_then_named(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("")
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                accepted.append(1)
                connection.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        node = SshNode(f"127.0.0.1:{listener.getsockname()[1]}", ssh_config_file=str(config))
        with pytest.raises(UnreachableError, match="hangs up before it says that it is an SSH server"):
            SshTransport(node).run(["true"], deadline_s=60)
        listener.shutdown(socket.SHUT_RDWR)
    assert len(accepted) == 5


def test_a_broken_ssh_config_is_told_with_its_line(sshd: LoopbackSshd) -> None:
    configure(sshd, "NoSuchOption yes")
    with pytest.raises(ConfigError, match=r"line \d+: Bad configuration option: nosuchoption"):
        SshTransport(node_of(sshd)).run(["true"], deadline_s=30)
