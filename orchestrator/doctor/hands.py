"""What a person can type, on this machine, to have something done on a target or on its node. Pure."""

from __future__ import annotations

import re
import shlex

from orchestrator.inventory import Target
from orchestrator.record import record

PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+ -]+")
SEVERAL = re.compile(r"[;&|<>]")
INSTALL = {
    "apt-get": "apt-get install -y", "apk": "apk add", "dnf": "dnf install -y", "yum": "yum install -y",
    "zypper": "zypper install -y", "pacman": "pacman -S --noconfirm",
}  # fmt: skip
NAMES = {
    "apk": {"python3-venv": "python3", "python3-dev": "python3-dev musl-dev", "libc-bin": "musl-locales"},
    "dnf": {"python3-venv": "python3", "python3-dev": "python3-devel", "libc-bin": "glibc-langpack-en"},
    "yum": {"python3-venv": "python3", "python3-dev": "python3-devel", "libc-bin": "glibc-langpack-en"},
    "zypper": {"python3-venv": "python3", "python3-dev": "python3-devel", "libc-bin": "glibc-locale-base"},
    "pacman": {"python3": "python", "python3-venv": "python", "python3-dev": "python", "libc-bin": "glibc"},
}
"""What Debian's packages are called elsewhere."""


@record
class Hands:
    """How a person gets to a target and its node."""

    target: Target
    ssh: list[str]
    """The words that reach the node, `ssh` first; empty for this machine."""
    login: str = "root"
    """Who that login is on the node, or on the machine itself."""
    manager: str = "apt-get"
    """The package manager of the target."""

    def on_node(self, command: str) -> str:
        """`command`, a line of sh, as root of the node."""
        alone = self.login == "root" or not SEVERAL.search(command)
        if self.login != "root":
            command = f"sudo {command}" if alone else f"sudo sh -c {quoted(command)}"
        return self._sent(command)

    def inside(self, command: str) -> str:
        """`command`, a line of sh, as root of the target."""
        if self.target.vmid is None:
            return self.on_node(command)
        inner = command if PLAIN.fullmatch(command) else f"sh -c {quoted(command)}"
        sudo = "" if self.login == "root" else "sudo "
        return self._sent(f"{sudo}pct exec {self.target.vmid} -- {inner}")

    def _sent(self, command: str) -> str:
        if not self.ssh:
            return command
        words = [self.ssh[0], *([] if self.login == "root" else ["-t"]), *self.ssh[1:]]
        return f"{shlex.join(words)} {command if PLAIN.fullmatch(command) else quoted(command)}"

    def install(self, *packages: str) -> str:
        """Debian's `packages`, by the name that they have there."""
        names = NAMES.get(self.manager, {})
        wanted = dict.fromkeys(" ".join(names.get(package, package) for package in packages).split())
        update = "apt-get update && " if self.manager == "apt-get" else ""
        return self.inside(f"{update}{INSTALL.get(self.manager, INSTALL['apt-get'])} {' '.join(wanted)}")

    def restart(self) -> str:
        """The container anew; of a machine itself, the machine."""
        return self.on_node("reboot" if self.target.vmid is None else f"pct reboot {self.target.vmid}")


def quoted(text: str) -> str:
    """One word for sh, as people would write it: quotes in quotes are read more easily as two kinds of them."""
    if "'" in text and not re.search(r'["$`\\!]', text):
        return f'"{text}"'
    return shlex.quote(text)
