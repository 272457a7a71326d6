"""Who is there, and who asks: host keys and logins against a real sshd, with a real agent and real certificates."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import AuthError, ConfigError, HostKeyError
from orchestrator.transport import NodePool
from orchestrator.transport.ssh_options import Jump
from tests.driver import poll_until
from tests.sshd import LoopbackSshd, make_key


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of specctl's own known_hosts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path / "state" / "specctl"


def log_in(sshd: LoopbackSshd, spec: str = "node1", *, accept_new: bool = False) -> None:
    with NodePool(ssh_config=str(sshd.ssh_config), accept_new=accept_new) as pool:
        assert pool.node(spec, target="gpu1").run(["echo", "in"], deadline_s=30).stdout == b"in\n"


def configure(sshd: LoopbackSshd, *options: str) -> None:
    sshd.ssh_config.write_text(sshd.ssh_options(*options))


def keygen(*words: str | Path) -> None:
    subprocess.run(["ssh-keygen", "-q", *words], check=True, capture_output=True)


def test_what_was_looked_for_is_named_where_there_is_no_key_and_no_known_hosts_file(sshd: LoopbackSshd) -> None:
    (sshd.root / "id").rename(sshd.root / "away")
    with pytest.raises(AuthError, match=rf"no key was there to offer \(looked for {sshd.root}/id\)"):
        log_in(sshd)
    sshd.known_hosts.unlink()
    with pytest.raises(HostKeyError, match=r"and there is no known_hosts file$"):
        log_in(sshd)


# --- the host's key -------------------------------------------------------------------------------------------------


def test_the_key_type_on_record_is_asked_for_first(sshd: LoopbackSshd) -> None:
    rsa, ed25519 = sshd.root / "host_rsa", sshd.root / "host_key"
    keygen("-t", "rsa", "-b", "2048", "-N", "", "-f", rsa)
    sshd.stop()
    sshd.options = f"HostKey {rsa}"
    sshd.start()
    for key in (rsa, ed25519):
        sshd.known_hosts.write_text(f"{sshd.where} {key.with_name(f'{key.name}.pub').read_text()}")
        log_in(sshd)


def test_lines_about_certificates_and_broken_ones_do_not_hide_the_key(sshd: LoopbackSshd) -> None:
    good = sshd.known_hosts.read_text()
    other = (sshd.root / "id.pub").read_text()
    sshd.known_hosts.write_text(
        f"@cert-authority * {other}nonsense\n[x]:1 ssh-rsa !!!\n\n# words\n@revoked * {other}!127.0.0.1 {other}{good}"
    )
    log_in(sshd)


def test_the_alias_of_a_host_key_and_several_files_are_honoured(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "second").write_text(f"cluster,elsewhere {sshd.host_key}\n")
    configure(sshd, "HostKeyAlias cluster")
    options = sshd.ssh_config.read_text()
    sshd.ssh_config.write_text(options.replace(str(sshd.known_hosts), f"{tmp_path}/none {tmp_path}/second"))
    log_in(sshd)


def test_a_revoked_key_is_refused_even_when_new_ones_are_accepted(sshd: LoopbackSshd, state: Path) -> None:
    sshd.known_hosts.write_text(f"@revoked * {sshd.host_key}\n")
    with pytest.raises(HostKeyError, match=r"is revoked by .*:1") as caught:
        log_in(sshd, accept_new=True)
    assert caught.value.hint
    assert not (state / "known_hosts").exists()


def test_a_host_known_only_by_its_certificate_is_told_so_with_the_command_that_mends_it(sshd: LoopbackSshd) -> None:
    ca, key = sshd.root / "ca", sshd.root / "host_key"
    make_key(ca)
    keygen("-s", ca, "-h", "-I", "node", "-n", "127.0.0.1", f"{key}.pub")
    sshd.stop()
    sshd.options = f"HostCertificate {key}-cert.pub"
    sshd.start()
    sshd.known_hosts.write_text(f"@cert-authority {sshd.where} {ca.with_name('ca.pub').read_text()}")
    assert subprocess.run(sshd.ssh("true"), check=False).returncode == 0, "ssh itself is content"
    with pytest.raises(HostKeyError, match="a @cert-authority line names it, but specctl cannot check") as caught:
        log_in(sshd)
    command = (caught.value.hint or "").partition("accept it: ")[2].partition("; or")[0]
    command = command.replace("StrictHostKeyChecking=ask", "StrictHostKeyChecking=accept-new")  # nobody is here to ask
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    log_in(sshd)


def test_new_hosts_that_are_accepted_at_once_all_stand_in_specctls_own_file(sshd: LoopbackSshd, state: Path) -> None:
    sshd.known_hosts.write_text("# mine\n")
    names = [f"host{number}" for number in range(6)]
    sshd.ssh_config.write_text(
        "".join(
            sshd.ssh_options(f"HostKeyAlias {name}").replace("Host node1\n", f"Host {name}\n") for name in names
        )
    )  # fmt: skip
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda name: log_in(sshd, name, accept_new=True), names * 2))
    own = state / "known_hosts"
    assert sorted(own.read_text().splitlines()) == [f"{name} {sshd.host_key}" for name in names]
    assert own.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in state.iterdir() if path.is_file()) == ["known_hosts", "known_hosts.lock"]
    assert sshd.known_hosts.read_text() == "# mine\n"
    log_in(sshd, names[0])


def test_specctls_own_record_never_outvotes_the_users(sshd: LoopbackSshd, state: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    state.mkdir(parents=True)
    (state / "known_hosts").write_text(f"{sshd.where} {sshd.host_key}\n")
    log_in(sshd)  # the user's file agrees
    sshd.known_hosts.write_text(f"{sshd.where} {(tmp_path / 'other.pub').read_text()}")
    with pytest.raises(HostKeyError, match=f"has changed.*{sshd.known_hosts}:1"):
        log_in(sshd, accept_new=True)


def test_a_new_key_that_cannot_be_remembered_is_not_trusted(sshd: LoopbackSshd, tmp_path: Path) -> None:
    sshd.known_hosts.write_text("")
    (tmp_path / "state").touch()  # no folder can be made there
    with pytest.raises(HostKeyError, match="cannot be remembered in"):
        log_in(sshd, accept_new=True)


# --- the login ------------------------------------------------------------------------------------------------------


def test_a_key_that_the_node_does_not_know_is_an_auth_error_naming_it(sshd: LoopbackSshd) -> None:
    (sshd.root / "authorized_keys").write_text("")
    with pytest.raises(AuthError, match=f"^gpu1: cannot log in as .*: refused {sshd.root}/id") as caught:
        log_in(sshd)
    assert "authorized_keys" in (caught.value.hint or "") and caught.value.exit_code == 3


def test_what_else_would_let_one_in_is_named_when_the_keys_do_not(sshd: LoopbackSshd) -> None:
    (sshd.root / "authorized_keys").write_text("")
    sshd.stop()
    sshd.options = "PasswordAuthentication yes"
    sshd.start()
    configure(sshd, "PKCS11Provider /usr/lib/token.so")
    with pytest.raises(AuthError, match=r"\(ssh-add -s /usr/lib/token\.so\); it would take password as well"):
        log_in(sshd)
    sshd.stop()
    sshd.options = "PasswordAuthentication yes\nPubkeyAuthentication no"
    sshd.start()
    with pytest.raises(AuthError, match="takes no keys, only password"):
        log_in(sshd)


@contextlib.contextmanager
def ssh_agent(socket_path: Path) -> Iterator[dict[str, str]]:
    """A real agent without keys; what its clients need in the environment."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("no ssh-agent on this machine; install it: apt-get install openssh-client")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket_path], stdout=subprocess.DEVNULL)
    try:
        poll_until(lambda: _listens(socket_path), what="the agent listens")
        yield {**os.environ, "SSH_AUTH_SOCK": str(socket_path)}
    finally:
        agent.terminate()
        agent.wait(10)


def _listens(socket_path: Path) -> bool:
    """Its socket is there a moment before it does."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(socket_path))
        except OSError:
            return False
    return True


def encrypt(sshd: LoopbackSshd) -> None:
    keygen("-p", "-P", "", "-N", "secret", "-f", sshd.root / "id")


def test_an_encrypted_key_without_an_agent_is_named_with_the_command_that_helps(
    sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypt(sshd)
    why = f"{sshd.root}/id is encrypted and the agent does not hold it"
    with pytest.raises(AuthError, match=why) as caught:
        log_in(sshd)
    assert caught.value.hint == f'eval "$(ssh-agent)" && ssh-add {sshd.root}/id'
    configure(sshd, "IdentityAgent none")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sshd.root / "agent"))
    with pytest.raises(AuthError, match=why) as caught:
        log_in(sshd)
    assert (caught.value.hint or "").startswith(f"ssh-add {sshd.root}/id (and drop `IdentityAgent none`")
    configure(sshd)
    with pytest.raises(AuthError, match=f"the agent at {sshd.root}/agent does not answer.*{why}") as caught:
        log_in(sshd)
    assert caught.value.hint == f"ssh-add {sshd.root}/id"


@pytest.mark.parametrize("shown", ["public file", "key file", "only the public file"])
def test_an_encrypted_key_is_used_through_the_agent(sshd: LoopbackSshd, tmp_path: Path, shown: str) -> None:
    with ssh_agent(tmp_path / "agent") as environ:
        subprocess.run(["ssh-add", "-q", sshd.root / "id"], env=environ, check=True)
        encrypt(sshd)
        configure(sshd, f"IdentityAgent {tmp_path / 'agent'}")
        if shown == "key file":
            (sshd.root / "id.pub").unlink()
        elif shown == "only the public file":
            (sshd.root / "id").unlink()
        log_in(sshd)


def test_a_public_key_whose_private_half_is_nowhere_is_told_so(sshd: LoopbackSshd) -> None:
    (sshd.root / "id").write_text((sshd.root / "id.pub").read_text())
    with pytest.raises(AuthError, match=f"{sshd.root}/id is a public key, and the agent does not hold its private"):
        log_in(sshd)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("ed25519", "beside the key"), ("ecdsa", "CertificateFile"), ("ed25519", "agent"), ("rsa", "agent"),
        ("rsa", "key in the agent"),
    ],
)  # fmt: skip
def test_a_certificate_logs_in_where_its_plain_key_does_not(
    certifying: tuple[LoopbackSshd, Path], tmp_path: Path, kind: str, way: str
) -> None:
    sshd, ca = certifying
    key = tmp_path / "mine"
    keygen("-t", kind, *(["-b", "2048"] if kind == "rsa" else []), "-N", "", "-f", key)
    identity = sshd.ssh_options().replace(f"IdentityFile {sshd.root}/id\n", f"IdentityFile {key}\n")
    sshd.ssh_config.write_text(identity)
    with pytest.raises(AuthError, match=f"refused {key}$"):
        log_in(sshd)
    keygen("-s", ca, "-I", "me", "-n", sshd.user, f"{key}.pub")
    with ssh_agent(tmp_path / "agent") as environ:
        options = [f"  IdentityAgent {tmp_path}/agent\n"]
        if way == "CertificateFile":
            (tmp_path / "mine-cert.pub").rename(tmp_path / "certificate")
            options.append(f"  CertificateFile {tmp_path}/certificate\n")
        elif way == "agent":
            subprocess.run(["ssh-add", "-q", key], env=environ, check=True)
            identity = identity.replace("IdentitiesOnly yes", "IdentitiesOnly no").replace(str(key), "none")
        elif way == "key in the agent":
            subprocess.run(["ssh-add", "-q", key], env=environ, check=True)
            key.unlink()
        sshd.ssh_config.write_text(identity + "".join(options))
        log_in(sshd)


@pytest.fixture(scope="module")
def certifying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoopbackSshd, Path]]:
    """An sshd that lets in whom its authority certifies, and that authority's key."""
    if shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("no sshd on this machine; install it: apt-get install openssh-server")
    root = tmp_path_factory.mktemp("certifying")
    make_key(root / "ca")
    with LoopbackSshd(root / "sshd", options=f"TrustedUserCAKeys {root}/ca.pub\nAuthorizedKeysFile none") as sshd:
        yield sshd, root / "ca"


def security_key() -> bytes:
    kind = b"sk-ssh-ed25519@openssh.com"
    return b"".join(struct.pack(">I", len(part)) + part for part in (kind, b"\1" * 32, b"ssh:"))


def test_a_dsa_key_is_refused_by_name(sshd: LoopbackSshd, tmp_path: Path) -> None:
    key, parts = tmp_path / "id_dsa", (b"ssh-dss", b"\1" * 129, b"\1" * 21, b"\1" * 128, b"\1" * 128)
    key.touch()
    public = base64.b64encode(b"".join(struct.pack(">I", len(part)) + part for part in parts)).decode()
    (tmp_path / "id_dsa.pub").write_text(f"ssh-dss {public} me\n")
    sshd.ssh_config.write_text(sshd.ssh_options().replace(f"{sshd.root}/id\n", f"{key}\n"))
    with pytest.raises(AuthError, match=rf"{key} is a DSA key"):
        log_in(sshd)


def test_a_security_key_is_refused_by_name_from_a_file_and_from_the_agent(sshd: LoopbackSshd, tmp_path: Path) -> None:
    key = tmp_path / "id_ed25519_sk"
    key.touch()
    public = base64.b64encode(security_key()).decode()
    (tmp_path / "id_ed25519_sk.pub").write_text(f"sk-ssh-ed25519@openssh.com {public} me\n")
    options = sshd.ssh_options().replace(f"{sshd.root}/id\n", f"{key}\n")
    sshd.ssh_config.write_text(options)
    with pytest.raises(AuthError, match=rf"{key} is a security key \(sk-ssh-ed25519@openssh\.com\)"):
        log_in(sshd)
    # A real agent takes a security key only together with the device: this one just lists it.
    listing = struct.pack(">BI", 12, 1) + b"".join(struct.pack(">I", len(x)) + x for x in (security_key(), b"my yubi"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(5)
                connection.sendall(struct.pack(">I", len(listing)) + listing)
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        sshd.ssh_config.write_text(
            options.replace("IdentitiesOnly yes", f"IdentityAgent {tmp_path}/agent").replace(str(key), "none")
        )
        with pytest.raises(AuthError, match=r"no key was there to offer; my yubi \(agent\) is a security key"):
            log_in(sshd)
        thread.join(10)


# --- what both sides speak ------------------------------------------------------------------------------------------


def test_the_algorithms_that_ssh_config_allows_are_the_only_ones(sshd: LoopbackSshd) -> None:
    configure(sshd, "Ciphers aes256-ctr", "MACs hmac-sha2-512", "KexAlgorithms ecdh-sha2-nistp256")
    with NodePool(ssh_config=str(sshd.ssh_config)) as pool:
        pool.node("node1").run(["true"], deadline_s=30)
        link = pool._ssh_node(Jump(host="node1", via=None))._link
        assert link is not None
        assert (link.transport.remote_cipher, link.transport.remote_mac) == ("aes256-ctr", "hmac-sha2-512")
    configure(sshd, "HostKeyAlgorithms ssh-ed25519-cert-v01@openssh.com")
    with pytest.raises(ConfigError, match=r"HostKeyAlgorithms ssh-ed25519-cert-v01@.* allows none that specctl knows"):
        log_in(sshd)
