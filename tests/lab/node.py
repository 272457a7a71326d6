"""The node: one process tree in namespaces of its own (`node-init`), with a real sshd on a free port of loopback.

When its first process ends, the kernel ends everything of it; its cgroup and its folder are removed by `down`, or by
the next `up` after a crash. So nodes run beside each other, with the same vmids, and leave nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TypeVar

from tests.lab import link
from tests.lab.image import CACHE, LabUnavailable, locked, setup, wait_until
from tests.lab.remains import RUNS, cgroup_of, destroy, is_abandoned, remove_cgroup, sweep, try_lock

HERE = Path(__file__).resolve().parent
USER = "labuser"
"""A login of the node that is not root, with the same key."""
SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey /run/lab/run/ssh/host_key
PidFile /run/lab/sshd.pid
AuthorizedKeysFile /run/lab/run/ssh/authorized_keys
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
PrintMotd no
LogLevel VERBOSE
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
"""
SSH_CONFIG = """\
Host {node}
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {run}/ssh/id
  IdentitiesOnly yes
  UserKnownHostsFile {run}/ssh/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
  LogLevel ERROR
"""


Self = TypeVar("Self", bound="Node")


class Node:
    """One node. `with Node() as node:` is up inside and gone after."""

    def __init__(self, *, node: str = "pve", name: str | None = None, cluster: Node | None = None):
        """`cluster` is another node, up already, whose /etc/pve this one shares; its `name` outlives its maker."""
        self.node = node
        self._cluster = cluster
        self._name = name
        self.run: Path = RUNS / (name or "not-up")
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self: Self) -> Self:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    # the node

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: the host `pve`, its key, and known_hosts with its host key."""
        return self.run / "ssh" / "ssh_config"

    @property
    def root(self) -> Path:
        """The node's own file tree, as seen from outside."""
        return Path(f"/proc/{self._init_pid()}/root")

    def prepare(self) -> None:
        """Raises LabUnavailable if this machine or this user cannot have one."""
        setup(install=False)

    def up(self: Self, *, keep: bool = False) -> Self:
        """Start the node. It ends with this process, unless `keep`: then only `down` ends it."""
        self.prepare()
        RUNS.mkdir(parents=True, exist_ok=True)
        with locked(RUNS / ".lock"):
            sweep()
            if self._name and self.run.exists():
                raise LabUnavailable(f"a lab runs already in {self.run}; first: ./lab down")
            self.run = self.run if self._name else Path(tempfile.mkdtemp(prefix="lab-", dir=RUNS))
            self.run.mkdir(exist_ok=True)
            self.run.chmod(0o755)
            lock = (self.run / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with lock:
                for attempt in range(3):
                    if self._start_node(lock.fileno(), keep=keep, last=attempt == 2):
                        break
        except BaseException:
            self.down()
            raise
        return self

    def _start_node(self, lock_fd: int, *, keep: bool, last: bool) -> bool:
        """Whether it started; False if another program took the port meanwhile and this is not the last try."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._write_run(port)
        log = self.run / "node.log"
        with log.open("wb") as output:
            # the lock is inherited by the node's first process: whoever can take it knows that the node is gone
            self._holder = subprocess.Popen(
                self._init_argv(keep=keep), stdin=subprocess.DEVNULL if keep else subprocess.PIPE,
                stdout=output, stderr=output, pass_fds=[lock_fd], start_new_session=True, cwd="/",
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            )  # fmt: skip
        holder, ready = self._holder, self.run / "init.pid"
        wait_until(lambda: ready.exists() or holder.poll() is not None, "the node did not start")
        if ready.exists():
            return True
        sshd_log = self.run / "ssh" / "sshd.log"
        why = log.read_text(errors="replace") + (sshd_log.read_text(errors="replace") if sshd_log.exists() else "")
        if "Address already in use" in why and not last:
            holder.wait()
            if holder.stdin:
                holder.stdin.close()
            remove_cgroup(self.run)
            return False
        raise LabUnavailable(f"the node did not start (are mounts and namespaces allowed here?): {why.strip()[-800:]}")

    def _init_argv(self, *, keep: bool) -> list[str]:
        unshare = ["unshare", "--mount", "--propagation", "private", "--uts", "--pid", "--fork", "--kill-child"]
        init = [HERE / "node-init", self.run, self.node, cgroup_of(self.run), CACHE, USER, "keep" if keep else ""]
        return [*unshare, "--", *map(str, init), str((self._cluster or self).run / "nodes")]

    def _write_run(self, port: int) -> None:
        ssh, sbin = self.run / "ssh", self.run / "sbin"
        for folder in (ssh, sbin, self.run / "ct", self.run / "nodes"):
            folder.mkdir(exist_ok=True)
        for key in ("host_key", "id"):
            if not (ssh / key).exists():
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", ssh / key], check=True)
        shutil.copy(ssh / "id.pub", ssh / "authorized_keys")
        host_key = " ".join((ssh / "host_key.pub").read_text().split()[:2])
        (ssh / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}\n")
        (ssh / "sshd_config").write_text(SSHD_CONFIG.format(port=port))
        self.ssh_config.write_text(SSH_CONFIG.format(node=self.node, port=port, run=self.run))
        for program in ("pct", "lab-prestart", "node-shell"):
            shutil.copy(HERE / program, sbin / program)
        shutil.copytree(HERE / "standin", sbin / "standin", ignore=shutil.ignore_patterns("*.pyc"), dirs_exist_ok=True)

    def down(self) -> None:
        """End the node with all its processes, and remove what is left of it. Nothing to do is fine."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, LabUnavailable):
            os.kill(self._init_pid(), signal.SIGKILL)
        if self._holder:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself once it has reaped the node
                self._holder.wait(timeout=5 if (self.run / "init.pid").exists() else 0)
            self._holder.kill()
            self._holder.wait()
            if self._holder.stdin:
                self._holder.stdin.close()
            self._holder = None
        if not self.run.exists():
            return
        wait_until(lambda: is_abandoned(self.run), f"the node of {self.run} did not end")
        with locked(RUNS / ".lock"):  # another lab that comes up may be sweeping it away
            if self.run.exists():
                destroy(self.run)

    def _init_pid(self) -> int:
        """The node's first process, as this machine counts. Raises LabUnavailable when the node is not up."""
        try:
            with (self.run / "lock").open() as lock:
                if try_lock(lock.fileno()):
                    raise LabUnavailable(f"the node of {self.run} is gone; start it with: ./lab up")
            return int((self.run / "init.pid").read_text())
        except FileNotFoundError:
            raise LabUnavailable("no lab is up; start it with: ./lab up") from None

    def on_node(self, argv: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command on the node without ssh. Keywords are those of subprocess.run."""
        options: dict[str, object] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "cwd": "/"}
        if "input" in kwargs:
            del options["stdin"]
        return subprocess.run([*self._enter(), *argv], **{**options, **kwargs})  # type: ignore[call-overload, no-any-return]

    def _enter(self) -> list[str]:
        """What goes before a command that is to run on the node."""
        pid = self._init_pid()
        # into the node's cgroup first: from inside its cgroup namespace a process of outside may not be moved
        enter = f'echo 0 >/proc/{pid}/root/sys/fs/cgroup/init.scope/cgroup.procs; exec "$@"'
        spaces = ["--mount", "--uts", "--pid", "--cgroup", f"--net=/proc/{pid}/root/run/lab/net"]
        return ["sh", "-c", enter, "sh", "nsenter", f"--target={pid}", *spaces, "--"]

    def _must(self, argv: list[str]) -> None:
        done = self.on_node(argv)
        if done.returncode != 0:
            why = done.stderr.strip()
            raise RuntimeError(f"`{' '.join(argv)}` on {self.node} exited {done.returncode}: {why}")

    def set_pct_cost(self, cpu_s: float) -> None:
        """Let every `pct` call cost this much CPU time; the real one costs 0.48 s, the stand-in alone 0.05 s."""
        (self.root / "etc/pve/.lab-pct-cpu-s").write_text(f"{cpu_s}\n")

    def set_sudo(self, rule: str) -> None:
        """Let sudo on the node know this one rule, none if it is empty. Raises RuntimeError if it is no rule."""
        path = "/etc/sudoers.d/specctl"
        self._must(["sh", "-ec", f'umask 337; rm -f {path}; printf "%s\\n" "$1" >{path}; visudo -cq', "sh", rule])

    # the link

    @property
    def port(self) -> int:
        """Where its sshd listens on loopback."""
        return int((self.run / "ssh" / "sshd_config").read_text().split()[1])

    def cut(self) -> None:
        """Cut every connection to it, present and to come, as a pulled cable does: no FIN, no answer, until `mend`."""
        link.cut(self._init_pid(), self.port)

    def mend(self) -> None:
        """Put the cable back in: what is still repeated arrives now."""
        link.mend(self._init_pid(), self.port)

    def is_cut(self) -> bool:
        return link.is_cut(self._init_pid())
