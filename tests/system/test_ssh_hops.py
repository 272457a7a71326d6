"""Jump hosts, proxy commands and IPv6, over several real sshds: the way that `ssh` would take, or an error."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import AuthError, ConfigError, DeadlineExceeded, HostKeyError, LinkLost, UnreachableError
from orchestrator.transport import NodePool
from orchestrator.transport.ssh_options import Jump
from tests.driver import poll_until
from tests.sshd import LoopbackSshd

RELAY = """
import os, socket, sys, threading
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def back():
    while data := link.recv(65536):
        os.write(1, data)
    os._exit(0)
threading.Thread(target=back, daemon=True).start()
while data := os.read(0, 65536):
    link.sendall(data)
"""
"""What `nc HOST PORT` does."""


class Lab:
    """Three sshds: `a`, `b`, and the node `t` behind them. One ssh_config, made anew by each test."""

    def __init__(self, root: Path, a: LoopbackSshd, b: LoopbackSshd, t: LoopbackSshd) -> None:
        self.root, self.a, self.b, self.t = root, a, b, t
        self.config = root / "config"

    def configure(self, *, a: str = "", b: str = "", t: str = "", more: str = "") -> None:
        blocks = ((self.a, a), (self.b, b), (self.t, t))
        self.config.write_text("".join(one.ssh_options(*option.splitlines()) for one, option in blocks) + more)

    def pool(self) -> NodePool:
        return NodePool(ssh_config=str(self.config))

    def run(self, spec: str = "t", *, deadline_s: float = 30) -> bytes:
        """The port of the sshd that ran a command, and of the client that it saw."""
        with self.pool() as pool:
            return (
                pool.node(spec, target="gpu1").run(["sh", "-c", "echo $SSH_CONNECTION"], deadline_s=deadline_s).stdout
            )

    def logins(self) -> tuple[int, int, int]:
        return self.a.logins, self.b.logins, self.t.logins


@pytest.fixture(scope="module")
def sshds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("no sshd on this machine; install it: apt-get install openssh-server")
    root = tmp_path_factory.mktemp("hops")
    with (
        LoopbackSshd(root / "a", alias="a") as a,
        LoopbackSshd(root / "b", alias="b", options="AllowTcpForwarding local") as b,
        LoopbackSshd(root / "t", alias="t", options="AllowTcpForwarding no") as t,
    ):
        yield Lab(root, a, b, t)


@pytest.fixture
def lab(sshds: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    sshds.configure()
    return sshds


def more_logins(lab: Lab, before: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(lab.logins(), before, strict=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"t": "ProxyJump a"}, (1, 0, 1)),
        ({"t": "ProxyJump a,b"}, (1, 1, 1)),
        ({"t": "ProxyJump b", "b": "ProxyJump a"}, (1, 1, 1)),
        ({"t": "ProxyJump b", "b": "ProxyJump none", "more": "Match host 127.0.0.1\n  ProxyJump a\n"}, (0, 1, 1)),
    ],
)  # fmt: skip
def test_every_jump_host_is_gone_through_and_the_node_is_never_dialled_past_them(
    lab: Lab, options: dict[str, str], expected: tuple[int, int, int]
) -> None:
    lab.configure(**options)
    before = lab.logins()
    assert lab.run().split()[-1:] == [str(lab.t.port).encode()]
    assert more_logins(lab, before) == expected


def test_a_jump_host_has_a_user_a_port_and_files_of_its_own(lab: Lab) -> None:
    lab.configure(t=f"ProxyJump {lab.a.user}@elsewhere:{lab.a.port}")
    block = lab.a.ssh_options().replace("Host a", "Host elsewhere").replace(f"Port {lab.a.port}", "Port 1")
    lab.config.write_text(lab.config.read_text() + block.replace("User ", "#User "))
    before = lab.logins()
    assert lab.run()
    assert more_logins(lab, before) == (1, 0, 1)


def test_megabytes_and_many_commands_go_through_two_hops_over_one_connection_each(lab: Lab) -> None:
    lab.configure(t="ProxyJump a,b")
    before = lab.logins()
    script = "head -c 3145728 /dev/zero >&2; cat; exit 7"
    with lab.pool() as pool, ThreadPoolExecutor(3) as threads:
        node = pool.node("t")
        runs = threads.map(lambda _: node.run(["sh", "-c", script], stdin=b"x" * 1_000_000, deadline_s=60), range(3))
        assert {(len(one.stdout), len(one.stderr), one.exit_code) for one in runs} == {(1_000_000, 3 * 2**20, 7)}
    assert more_logins(lab, before) == (1, 1, 1)


def test_one_connection_to_a_jump_host_serves_all_nodes_behind_it_and_itself(lab: Lab) -> None:
    lab.configure(b="ProxyJump a", t="ProxyJump a")
    before = lab.logins()
    with lab.pool() as pool, ThreadPoolExecutor(3) as threads:
        done = list(threads.map(lambda spec: pool.node(spec).run(["true"], deadline_s=30).exit_code, "abt"))
    assert done == [0, 0, 0]
    assert more_logins(lab, before) == (1, 1, 1)


def test_jump_hosts_that_need_each_other_are_a_configuration_error(lab: Lab) -> None:
    lab.configure(a="ProxyJump b", b="ProxyJump a", t="ProxyJump a")
    with pytest.raises(ConfigError, match=r"^gpu1: .*ProxyJump goes round in a circle: t -> a -> b -> a$"):
        lab.run()
    lab.configure(t="ProxyJump t")
    with pytest.raises(ConfigError, match=r"in a circle: t -> t$"):
        lab.run()


def test_an_error_names_the_hop_that_it_happened_at(lab: Lab, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        lab.configure(t=f"ProxyJump b,127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(
            UnreachableError, match=r"^gpu1: jump host \[127.*: jump host b cannot reach \[127.*: connect failed"
        ) as caught:
            lab.run()
        assert caught.value.exit_code == 3 and caught.value.hint
        lab.configure(t="ProxyJump a", a=f"Port {nobody.getsockname()[1]}")
        lab.config.write_text(f"Host a\n  Port {nobody.getsockname()[1]}\n{lab.config.read_text()}")
        with pytest.raises(UnreachableError, match=r"^gpu1: jump host a: \[127\.0\.0\.1\]:\d+ refused the connection"):
            lab.run()
    lab.configure(a="ProxyJump t", t="ProxyJump none")
    with pytest.raises(UnreachableError, match=r"^gpu1: jump host t does not allow a way on to \[127") as caught:
        lab.run("a")
    assert "AllowTcpForwarding" in (caught.value.hint or "")


def test_each_hops_own_host_key_is_checked_and_named(lab: Lab, tmp_path: Path) -> None:
    other = tmp_path / "known"
    other.write_text(f"{lab.a.where} {lab.t.host_key}\n")
    lab.configure(t="ProxyJump a")
    lab.config.write_text(f"Host a\n  UserKnownHostsFile {other}\n{lab.config.read_text()}")
    before = lab.logins()
    with pytest.raises(HostKeyError, match=f"^gpu1: jump host a: the host key of {lab.a.where}".replace("[", r"\[")):
        lab.run()
    other.write_text(f"{lab.a.where} {lab.a.host_key}\n")
    lab.config.write_text(f"Host t\n  UserKnownHostsFile {tmp_path}/none\n{lab.config.read_text()}")
    with pytest.raises(HostKeyError, match=f"^gpu1: the host key of {lab.t.where} is not known".replace("[", r"\[")):
        lab.run()
    assert more_logins(lab, before) == (1, 0, 0)


def test_each_hops_own_login_is_named(lab: Lab, tmp_path: Path) -> None:
    lab.configure(t="ProxyJump a")
    lab.config.write_text(f"Host a\n  IdentityFile {lab.b.root}/id\n{lab.config.read_text()}")
    lab.config.write_text(lab.config.read_text().replace(f"  IdentityFile {lab.a.root}/id\n", ""))
    with pytest.raises(AuthError, match=rf"^gpu1: jump host a: cannot log in as \w+@127.*{lab.b.root}/id"):
        lab.run()


def test_a_jump_host_that_dies_is_a_lost_link_and_the_next_command_goes_through_it_anew(lab: Lab) -> None:
    lab.configure(t="ProxyJump a")
    with lab.pool() as pool:
        node = pool.node("t", target="gpu1")
        with node.stream(["sh", "-c", "echo up; exec sleep 50"], deadline_s=60) as stream:
            chunks = iter(stream)
            assert next(chunks) == b"up\n"
            lab.a.stop()
            try:
                with pytest.raises(LinkLost, match="gpu1: the connection ended before the command did"):
                    next(chunks)
            finally:
                lab.a.start()
        assert node.run(["echo", "back"], deadline_s=30).stdout == b"back\n"


def test_a_jump_host_that_hangs_hangs_nobody_and_is_dialled_anew(lab: Lab) -> None:
    lab.configure(t="ProxyJump a")
    with lab.pool() as pool:
        node = pool.node("t", target="gpu1")
        assert node.run(["true"], deadline_s=30).exit_code == 0
        with lab.a.paused():
            with pytest.raises(DeadlineExceeded):
                node.run(["true"], deadline_s=1)
            before = lab.logins()
        assert node.run(["echo", "back"], deadline_s=30).stdout == b"back\n"
    assert more_logins(lab, before) == (1, 0, 1)


def test_every_socket_to_a_first_host_notices_a_dead_peer_soon(lab: Lab) -> None:
    lab.configure(t="ProxyJump a")
    with lab.pool() as pool:
        pool.node("t").run(["true"], deadline_s=30)
        link = pool._ssh_node(Jump(host="a", via=None))._link
        assert link is not None
        connection = link.transport.sock
        for level, option in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        ):
            assert connection.getsockopt(level, option)


# --- ProxyCommand ---------------------------------------------------------------------------------------------------


def relay(root: Path, words: str = "%h %p") -> str:
    (root / "relay.py").write_text(RELAY)
    return f"ProxyCommand {sys.executable} {root}/relay.py {words}"


def processes(word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_proxy_command_is_the_way_and_ends_with_the_connection(lab: Lab, tmp_path: Path) -> None:
    mark = f"mark-{lab.t.port}"
    lab.configure(t=relay(tmp_path, f"%h %p {mark} %n-%r"))
    with lab.pool() as pool:
        node = pool.node("t")
        done = node.run(["sh", "-c", "head -c 1000000 /dev/zero >&2; cat"], stdin=b"x" * 1_000_000, deadline_s=60)
        assert (len(done.stdout), len(done.stderr), done.exit_code) == (1_000_000, 1_000_000, 0)
        [process] = processes(mark)
        assert f"t-{lab.t.user}".encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    poll_until(lambda: not processes(mark), what="the end of the proxy command")


def test_a_proxy_command_reads_no_start_up_file_of_the_shell_even_where_nothing_is_below_it(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bashrc").write_text("echo from the start-up file; touch ~/was-read\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.delenv("SHLVL", raising=False)  # as under cron
    lab.configure(t=relay(tmp_path))
    assert lab.run()
    assert not (tmp_path / "was-read").exists()


def test_a_proxy_command_that_is_ssh_itself_is_the_way_through_its_host(lab: Lab) -> None:
    lab.configure(t=f"ProxyCommand ssh -F {lab.config} -W %h:%p a")
    before = lab.logins()
    assert lab.run()
    assert more_logins(lab, before) == (1, 0, 1)


def test_a_proxy_command_that_fails_is_told_in_its_own_words(lab: Lab) -> None:
    lab.configure(t="ProxyCommand sh -c 'echo no tunnel today >&2; exit 1'")
    before = lab.logins()
    with pytest.raises(UnreachableError, match=r"ProxyCommand sh .* brought no SSH server; it says: no tunnel today"):
        lab.run()
    lab.configure(t="ProxyCommand no-such-program %h %p")
    with pytest.raises(UnreachableError, match=r"no-such-program: (command )?not found"):
        lab.run()
    assert more_logins(lab, before) == (0, 0, 0)


def test_a_proxy_command_that_says_nothing_is_given_up_and_ended(lab: Lab) -> None:
    mark = f"5{lab.t.port}"
    lab.configure(t=f"ConnectTimeout 1\nProxyCommand sleep {mark}")
    with pytest.raises(UnreachableError, match=r"through ProxyCommand sleep .* no key exchange came within 1 s"):
        lab.run()
    poll_until(lambda: not processes(mark), what="the end of the proxy command")


# --- IPv6 -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def six(tmp_path: Path) -> Iterator[LoopbackSshd]:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with LoopbackSshd(tmp_path / "six", alias="six", address="::1") as sshd:
        yield sshd


def test_an_ipv6_address_is_dialled_recorded_and_named_in_brackets(six: LoopbackSshd, lab: Lab) -> None:
    literal = six.ssh_options().replace("Host six", "Host ::1").replace("  HostName ::1\n", "")
    lab.configure(a="ProxyJump none", more=six.ssh_options() + literal)
    for spec in ("six", f"[::1]:{six.port}", f"{six.user}@[::1]:{six.port}", "::1"):
        assert lab.run(spec).split()[2] == b"::1", spec
    lab.configure(more=six.ssh_options("ProxyJump a"))
    assert lab.run("six").split()[2] == b"::1"
    six.known_hosts.write_text(f"[::1]:{six.port} {lab.a.host_key}\n")
    with pytest.raises(HostKeyError, match=rf"the host key of \[::1\]:{six.port} has changed"):
        lab.run("six")


def test_the_address_family_is_honoured(lab: Lab) -> None:
    lab.configure()
    lab.config.write_text(f"Host t\n  AddressFamily inet6\n{lab.config.read_text()}")
    with pytest.raises(UnreachableError, match=r"no IPv6 address for host '127\.0\.0\.1'"):
        lab.run()


# --- what a burst does ----------------------------------------------------------------------------------------------


def test_a_server_that_is_full_is_tried_again_and_says_why_when_it_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with LoopbackSshd(tmp_path / "full", alias="full", options="MaxStartups 1:100:1") as full:
        pool = NodePool(ssh_config=str(full.ssh_config))
        with socket.create_connection(("127.0.0.1", full.port)) as visitor:
            assert visitor.recv(4) == b"SSH-"  # not logged in yet: the one place is taken

            def leave_when_somebody_was_dropped() -> None:
                poll_until(lambda: "drop connection" in full.log)
                visitor.close()

            leaver = threading.Thread(target=leave_when_somebody_was_dropped)
            leaver.start()
            assert pool.node("full").run(["echo", "in"], deadline_s=60).stdout == b"in\n"
            leaver.join()
        pool.close()
        with socket.create_connection(("127.0.0.1", full.port)) as visitor:
            assert visitor.recv(4) == b"SSH-"
            with pytest.raises(UnreachableError, match=r"Exceeded MaxStartups.*; tried 5 times") as caught:
                pool.node("full").run(["true"], deadline_s=60)
        assert "MaxStartups" in (caught.value.hint or "")
        pool.close()
