"""The lab without root: the same node and the same `pct`, but containers are namespaces of a user, not LXC's.

The sshd is a user's, on a high port; what it starts enters the node, which is root of nothing but a file tree of its
own (`user/`). What takes a real container is refused by `LabUnavailable`, and a test of it is skipped for that reason.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
from typing import NoReturn

from tests.lab import link
from tests.lab.image import LabUnavailable, find_tool, wait_until
from tests.lab.lab import Lab
from tests.lab.node import HERE, SSH_CONFIG

TOOLS = {
    "sshd": "openssh-server", "ssh": "openssh-client", "tmux": "tmux", "ip": "iproute2", "unshare": "util-linux",
    "/usr/bin/python3": "python3",
}  # fmt: skip
SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {run}/ssh/host_key
PidFile none
AuthorizedKeysFile {run}/ssh/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
AcceptEnv LANG LC_*
ForceCommand {run}/sbin/shell
"""
SPACES = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private", "--uts", "--pid", "--net"]
PR_SET_PDEATHSIG = 1
NOT_HERE = {"unprivileged": "ids of its own", "net0": "a bridge", "entrypoint": "an init of its own"}


class UserLab(Lab):
    """A node of a user. What is missing here is what its methods refuse."""

    _sshd: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        missing = sorted({package for tool, package in TOOLS.items() if not find_tool(tool)})
        if missing:
            raise LabUnavailable(f"missing: {', '.join(missing)}; install them: apt-get install {' '.join(missing)}")
        done = subprocess.run([*SPACES, "--fork", "true"], capture_output=True, text=True)
        if done.returncode != 0:
            raise LabUnavailable(f"a user may not make namespaces here: {done.stderr.strip()}")
        shell = pwd.getpwuid(os.geteuid()).pw_shell
        if shell.endswith(("nologin", "false")):
            raise LabUnavailable(f"this user cannot log in: its shell is {shell}")

    def _init_argv(self, *, keep: bool) -> list[str]:
        nodes = (self._cluster or self).run / "nodes"
        init = [self.run / "sbin" / "node-init", self.run, self.node, nodes]
        return [*SPACES, "--fork", "--kill-child", "--", *map(str, init)]

    def _write_run(self, port: int) -> None:
        super()._write_run(port)
        user = pwd.getpwuid(os.geteuid()).pw_name
        text = SSH_CONFIG.format(node=self.node, port=port, run=self.run)
        self.ssh_config.write_text(text.replace("User root", f"User {user}"))
        (self.run / "ssh" / "sshd_config").write_text(SSHD_CONFIG.format(port=port, run=self.run))
        for path in (HERE / "user").iterdir():
            shutil.copy(path, self.run / "sbin" / path.name)
        for verb in ("start", "wait", "info", "stop", "attach"):
            (self.run / "sbin" / f"lxc-{verb}").symlink_to("lxc")

    def _start_node(self, lock_fd: int, *, keep: bool, last: bool) -> bool:
        started = super()._start_node(lock_fd, keep=keep, last=last)
        libc = ctypes.CDLL(None)
        log = self.run / "ssh" / "sshd.log"
        self._sshd = subprocess.Popen(
            [str(find_tool("sshd")), "-D", "-f", self.run / "ssh" / "sshd_config", "-E", log],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
        wait_until(lambda: log.exists() and "Server listening" in log.read_text(), "sshd does not listen")
        return started

    def down(self) -> None:
        if self._sshd:
            for pid in [self._sshd.pid, *link.sshd_of(self._sshd.pid)]:
                link.send(pid, signal.SIGKILL)
            self._sshd.wait()
            self._sshd = None
        super().down()

    def _enter(self) -> list[str]:
        spaces = ["--user", "--preserve-credentials", "--mount", "--uts", "--pid", "--net", "--root", "--wd"]
        return [
            "env", "-i", "HOME=/root", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "nsenter", f"--target={self._init_pid()}", *spaces, "--",
        ]  # fmt: skip

    def on_node(self, argv: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        if "useradd" in " ".join(argv):
            needs("users besides its root")
        try:
            done = super().on_node(argv, **kwargs)
        except subprocess.CalledProcessError as error:
            self._refuse(error.stderr)
            raise
        if done.returncode != 0:
            self._refuse(done.stderr)
        return done

    def _refuse(self, said: object) -> None:
        """The system's own files, its devices and other users are root's; a test that changes them cannot be had."""
        text = said if isinstance(said, str) else ""
        for words in ("Permission denied", "Operation not permitted", "Read-only file system", "Invalid argument"):
            if words in text:
                needs(f"a root that may do all ({text.strip().splitlines()[-1]})")

    def define(self, vmid: int, **conf: str) -> None:
        for key, what in NOT_HERE.items():
            if key in conf:
                needs(what)
        super().define(vmid, **conf)

    def freeze(self, vmid: int) -> None:
        needs("the cgroup freezer")

    def set_sudo(self, rule: str) -> None:
        needs("a second user of the node")

    def cut(self) -> None:
        needs("root, to cut the link of an sshd")

    def host(self, path: str) -> str:
        needs(f"{path} of this machine")


def needs(what: str) -> NoReturn:
    raise LabUnavailable(f"this needs a real container, for {what}: run it as root")


