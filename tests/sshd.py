"""A real sshd on loopback, unprivileged and disposable, for tests that need an SSH host and no container.

It listens on a free port of 127.0.0.1 (or ::1) with keys of its own and lets in the user who runs the tests, root too.
Its sessions have a home folder of their own, so nothing of the user's shell start-up, tmux or ssh takes part.
Tests get it as the fixture `sshd` (tests/conftest.py).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SSHD_CONFIG = """\
{options}
Port {port}
ListenAddress {address}
HostKey {root}/host_key
PidFile none
AuthorizedKeysFile {root}/authorized_keys
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM {pam}
PrintMotd no
AcceptEnv LANG LC_*
SetEnv "HOME={home}"
Subsystem sftp internal-sftp
"""
SSH_CONFIG = """\
Host {alias}
  HostName {address}
  Port {port}
  User {user}
  IdentityFile {root}/id
  IdentitiesOnly yes
  UserKnownHostsFile {root}/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
  LogLevel ERROR
"""


class SshdMissing(Exception):
    """This machine has no OpenSSH server; the message says what to install."""


class LoopbackSshd:
    """`with LoopbackSshd(folder) as sshd:` listens inside and is gone after, with all its sessions.

    The folder holds `id` (the client's key), `known_hosts`, `ssh_config` (host `alias`), `authorized_keys`, `home/`.
    """

    def __init__(self, root: Path, *, alias: str = "node1", address: str = "127.0.0.1", options: str = ""):
        """`options` are lines of sshd_config that go before, and so above, the usual ones."""
        self.root, self.alias, self.address, self.options = root, alias, address, options
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self.port = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._paused: list[int] = []

    @property
    def ssh_config(self) -> Path:
        return self.root / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def where(self) -> str:
        """As known_hosts names it."""
        return f"[{self.address}]:{self.port}"

    @property
    def host_key(self) -> str:
        """Type and base64 of its public key."""
        return " ".join((self.root / "host_key.pub").read_text().split()[:2])

    @property
    def logins(self) -> int:
        """How many connections have logged in so far."""
        return self.log.count("Accepted ")

    def ssh_options(self, *more: str) -> str:
        """Its block of an ssh_config, and `more` lines in it."""
        text = SSH_CONFIG.format(alias=self.alias, address=self.address, port=self.port, user=self.user, root=self.root)
        return text + "".join(f"  {line}\n" for line in more)

    @property
    def home(self) -> Path:
        """HOME of every session. Its working directory is still the user's own home."""
        return self.root / "home"

    @property
    def log(self) -> str:
        path = self.root / "sshd.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> LoopbackSshd:
        self.home.mkdir(parents=True, exist_ok=True)
        for name in ("host_key", "id"):
            make_key(self.root / name)
        shutil.copy(self.root / "id.pub", self.root / "authorized_keys")
        for last in (False, False, True):
            with socket.socket(socket.AF_INET6 if ":" in self.address else socket.AF_INET) as probe:
                probe.bind((self.address, 0))
                self.port = probe.getsockname()[1]
            try:
                self.start()
                break
            except RuntimeError:
                if last or "Address already in use" not in self.log:
                    raise
        self.known_hosts.write_text(f"{self.where} {self.host_key}\n")
        self.ssh_config.write_text(self.ssh_options())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ssh(self, *argv: str) -> list[str]:
        """argv of an OpenSSH client that runs a command there."""
        return ["ssh", "-F", str(self.ssh_config), self.alias, *argv]

    def start(self) -> None:
        """Listen on the port of before. Raises RuntimeError with sshd's own words."""
        program = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        if not program:
            raise SshdMissing("no sshd on this machine; install it: apt-get install openssh-server")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd of root insists on it
        config = self.root / "sshd_config"
        pam = "yes" if os.geteuid() == 0 else "no"  # without PAM sshd refuses a root whose password is locked
        config.write_text(
            SSHD_CONFIG.format(
                port=self.port, root=self.root, home=self.home, pam=pam, address=self.address, options=self.options
            )
        )
        told = len(self.log)
        self._server = subprocess.Popen(
            [program, "-D", "-f", config, "-E", self.root / "sshd.log"], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        give_up_at = time.monotonic() + 10
        while "Server listening" not in self.log[told:]:
            if self._server.poll() is not None or time.monotonic() > give_up_at:
                self.stop()
                raise RuntimeError(f"sshd does not listen on {self.where}: {self.log[told:].strip()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the server and its sessions, as when a node goes down. Commands of sessions may live on, as they do."""
        if self._server:
            for pid in self._pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._server.wait()
            self._server = None
        self._paused = []

    def drop(self) -> int:
        """End every connection, as a link that breaks does, while the server goes on; says how many processes that
        were."""
        assert self._server
        sessions = [pid for pid in self._pids() if pid != self._server.pid]
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(sessions)

    def pause(self) -> None:
        """Let the link stand still: connections stay open, nothing answers. Commands of sessions run on."""
        self._paused = self._pids()
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._paused = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def make_noisy(self, text: str = "noise from a shell start-up file") -> None:
        """Let every new session print a line on stdout before its command does. For users of bash or zsh."""
        for name in (".bashrc", ".zshenv"):
            (self.home / name).write_text(f"printf '%s\\n' {shlex.quote(text)}\n")

    def make_quiet(self) -> None:
        for name in (".bashrc", ".zshenv"):
            (self.home / name).unlink(missing_ok=True)

    def rotate_host_key(self) -> None:
        """Answer on the same port with a new host key, which known_hosts does not have."""
        self.stop()
        for path in (self.root / "host_key", self.root / "host_key.pub"):
            path.unlink()
        make_key(self.root / "host_key")
        self.start()

    def _pids(self) -> list[int]:
        """The server and, of its descendants, those that are sshd too."""
        assert self._server
        children: dict[int, list[tuple[int, str]]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                head, _, rest = path.read_text(errors="replace").rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(rest.split()[1]), []).append((int(path.parent.name), head.partition("(")[2]))
        found = [self._server.pid]
        for pid in found:
            found += [child for child, name in children.get(pid, []) if name.startswith("sshd")]
        return found


def make_key(path: Path) -> None:
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", path], check=True)


def answers(port: int) -> bool:
    """Whether an SSH server greets on this port of loopback."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
