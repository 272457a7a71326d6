"""Why a container gave no answer: the words of pct, LXC and sudo, and what the node showed when it was asked. Pure.

They are judged by their text, and only when the caller saw no answer: pct's exit codes 2, 4 and 255 are also those of
any program.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import field

from orchestrator.inventory import Attach
from orchestrator.record import record

DOCS = "docs/proxmox-access.md"


@record
class Seen:
    """What a node showed of itself and of one container (`node.LOOK`). None: it could not be seen."""

    answered: bool
    """The login shell ran what it was given."""
    user: str | None = None
    tools: dict[str, str] = field(default_factory=dict)
    lock: str | None = None
    cluster: bool = False
    """/etc/pve is there."""
    listens: bool = False
    """LXC runs the container, or is about to, or has just ended it."""
    at: list[tuple[str, str]] = field(default_factory=list)
    """(node, lxc or qemu-server) of the cluster's guests with this number."""
    here: list[str] = field(default_factory=list)


def seen_in(text: str) -> Seen:
    """What the output of `node.LOOK` says, between whatever else a shell's start-up printed."""

    def all_of(pattern: str) -> list[str]:
        return re.findall(f"^{pattern}\r?$", text, re.MULTILINE)

    user, lock = all_of(r"user: (.+?)"), all_of(r"lock: (.+?)")
    return Seen(
        answered=bool(user), user=user[-1] if user else None, lock=lock[-1] if lock else None,
        tools=dict(re.findall(r"^(pct|lxc-attach): (/.*?)\r?$", text, re.MULTILINE)), listens=bool(all_of("listens")),
        cluster=bool(all_of(r"node: (.+?)")),
        at=re.findall(r"^at: nodes/([^/\n]+)/(lxc|qemu-server)/", text, re.MULTILINE),
        here=all_of(r"here: lxc/(\d+)\.conf"),
    )  # fmt: skip


@record
class Entrance:
    """Which container of which node, and how it is entered."""

    vmid: int
    ssh: str | None
    attach: Attach

    @property
    def node(self) -> str:
        return self.ssh or "this machine"

    @property
    def late(self) -> str:
        """What to do where no answer comes in time: it may be the container that hangs, or pct."""
        return f"{self.node}, its pct, the container or its workdir hangs, or is slow; {self.trial}"

    @property
    def trial(self) -> str:
        """What to type to see whether the container can be entered at all."""
        return f"try by hand: {self.by_hand(self.way_in, Seen(answered=True))}"

    @property
    def way_in(self) -> str:
        return f"lxc-attach -n {self.vmid} -- true" if self.attach == "lxc" else f"pct exec {self.vmid} -- true"

    def by_hand(self, command: str, seen: Seen) -> str:
        """What to type for `command`, which needs root on the node."""
        if seen.user not in (None, "root"):
            return f"as root on {self.node}: {command}"
        return f"ssh {shlex.quote(self.ssh)} {command}" if self.ssh else command

    def reason(self, said: str, exit_code: int | None, seen: Seen) -> tuple[str, str] | None:
        """(why, what to do) for a command that ended with `exit_code` and `said` this on stderr; None: cannot tell."""
        if not seen.answered:
            # A shell that was given a request for a script repeats it in its complaint, and it may hold secrets.
            words = " ".join(re.sub(r"\{\W*token.*", "(the request)", said).split())[-300:]
            words = words.rstrip(".") or f"nothing, and ended with exit code {exit_code}"
            trial = f"ssh {shlex.quote(self.ssh)} echo works" if self.ssh else "sh -c 'echo works'"
            return (
                f"the login shell on {self.node} does not run what it is given; it said: {words}",
                f"try by hand: {trial}; a start-up file of that user (~/.bashrc) may end the shell or replace it, a "
                "forced command may take its place, and csh is not supported",
            )
        if exit_code == 0:
            return None
        found = (
            self._container(said, seen)
            or self._broken(said, seen)
            or self._node_itself(said, seen)
            or self._sudo(said, seen)
        )
        if found is None and exit_code == 137 and not seen.listens:
            return self._stopped(f"container {self.vmid} stopped while it was being asked", seen)
        return found

    def _container(self, said: str, seen: Seen) -> tuple[str, str] | None:
        """What keeps the container from answering."""
        vmid = self.vmid
        if match := _line(rf"Configuration file 'nodes/([^/']+)/lxc/{vmid}\.conf' does not exist", said):
            return self._absent(match[1], seen)
        if _line(rf"specctl-node: container {vmid} is frozen", said):
            thaw = f"thaw it: {self.by_hand(f'lxc-unfreeze -n {vmid}', seen)}"
            if seen.lock is None:
                return f"container {vmid} is frozen: nothing in it can answer", thaw
            return (
                f"container {vmid} is frozen and locked ({seen.lock}): nothing in it can answer until that has ended",
                f"wait for it, or, if it was cut short, {thaw}",
            )
        if _line(rf"container '{vmid}' not running!", said):
            return self._stopped(f"container {vmid} is not running", seen)
        if _line(rf"can't lock file '\S*pve-config-{vmid}\.lock' - got timeout", said):
            what = f"container {vmid} is locked: another pct command holds its configuration"
            return what, "wait for that command, then ask again"
        if match := _line(r"CT is locked \((.*)\)", said):
            unlock = self.by_hand(f"pct unlock {vmid}", seen)
            return f"container {vmid} is locked ({match[1]})", f"wait for it to end, or, if it was cut short: {unlock}"
        if match := _line(rf'lxc-attach: {vmid}: .*?([A-Z][a-z ]+) - Failed to exec (".*")', said):
            what = f"container {vmid} cannot run {match[2]}: {match[1]}"
            return what, "install it there, or check python: of this target in hosts.yaml"
        if match := _line(rf"lxc-attach: {vmid}: (?:\S+\.c: \w+: \d+ )?(.*)", said):
            if not seen.listens:
                return self._stopped(f"container {vmid} is not running", seen)
            trial = self.by_hand(self.way_in, seen)
            what = f"container {vmid} cannot be entered: {match[1]}"
            return what, f"it may be starting or stopping: ask again, or try by hand: {trial}"
        return None

    def _stopped(self, what: str, seen: Seen) -> tuple[str, str]:
        start = f"start it: {self.by_hand(f'pct start {self.vmid}', seen)}"
        if seen.lock is None:
            return what, start
        unlock = self.by_hand(f"pct unlock {self.vmid}", seen)
        return (
            f"{what}, and is locked ({seen.lock}): it cannot start before that has ended",
            f"wait for it, or, if it was cut short: {unlock}; then {start}",
        )

    def _absent(self, node: str, seen: Seen) -> tuple[str, str]:
        for where, kind in seen.at:
            if kind == "qemu-server":
                what = f"{self.vmid} is a virtual machine on node {where}, not a container"
                return what, "reach it by SSH: give its own address as ssh:, and no vmid:"
            what = f"container {self.vmid} is on node {where}, not on {node}"
            return what, f"set ssh: of this target to an address of {where}"
        what = f"there is no container {self.vmid} on node {node}; its containers: {', '.join(seen.here) or 'none'}"
        return what, f"check vmid: in hosts.yaml; {self.by_hand('pct list', seen)}"

    def _node_itself(self, said: str, seen: Seen) -> tuple[str, str] | None:
        """What the node lacks."""
        if _line("specctl-node: no (pct|/etc/pve/local) on this node", said):
            if seen.cluster:
                install = self.by_hand("apt-get install pve-container", seen)
                return f"{self.node} has no pct any more, though it is a Proxmox node", f"install it there: {install}"
            what = f"{self.node} has no pct, so it has no container {self.vmid}"
            return what, "a container needs a Proxmox node: check ssh: in hosts.yaml, or drop vmid: for a plain machine"
        if _line("specctl-node: no lxc-attach on this node", said):
            what = f"{self.node} has no lxc-attach, which attach: lxc of this target asks for"
            return what, "set attach: auto in hosts.yaml, or leave it out"
        return None

    def _broken(self, said: str, seen: Seen) -> tuple[str, str] | None:
        """What of Proxmox itself does not work."""
        refused = _line(r"(ipcc_send_rec|Unable to load access).*: (Connection refused|Transport endpoint .*)", said)
        missing = _line("specctl-node: no /etc/pve/local on this node", said)
        if refused or (missing and "pct" in seen.tools):
            what = f"the cluster file system of {self.node} (/etc/pve) is down, and without it there is no container"
            words = f": {refused[0]}" if refused else ""
            return what + words, f"look there: {self.by_hand('systemctl status pve-cluster', seen)}"
        if match := _line(r"(Can't locate .+? in @INC|.+ at /usr/\S*perl\S* line \d+).*", said):
            trial = self.by_hand(self.way_in, seen)
            return f"pct of {self.node} does not work: {match[1]}", (
                f"mend it there (an upgrade that was cut short?), then try by hand: {trial}"
            )
        return None

    def _sudo(self, said: str, seen: Seen) -> tuple[str, str] | None:
        """What the node does not let this login do."""
        for pattern, trouble in (
            (r"specctl-node: (no sudo) on this node", "there is no sudo"),
            (r"sudo: (a password is required|a terminal is required .*|no tty present .*)", "sudo asks for a password"),
            (r"\S+ (is not in the sudoers file).*", "sudo does not let it"),
            (r"Sorry, user \S+ (is not allowed to execute|may not run sudo) .*", "sudo does not let it"),
            (r"(sudo: (?!unable to resolve host).*)", "sudo fails ({})"),
            (r"(please run as root|ipcc_send_rec\[\d\] failed: .*)", "pct was not run as root"),
        ):
            if match := _line(pattern, said):
                what = trouble.format(match[1])
                break
        else:
            return None
        user, vmid = seen.user or "USER", self.vmid
        command = f"{seen.tools.get('pct', '/usr/sbin/pct')} exec {vmid} -- *"
        if self.attach == "lxc":
            command = f"{seen.tools.get('lxc-attach', '/usr/bin/lxc-attach')} -n {vmid} --clear-env -- *"
        install = "apt-get install sudo, then " if match[1] == "no sudo" else ""
        return (
            f"container {vmid} is entered as root of {self.node}, but the login is {user}, and {what}",
            f"as root there: {install}visudo -f /etc/sudoers.d/specctl, and write this line: {user} ALL=(root) "
            f"NOPASSWD: {command}   ({DOCS} says what that grants); or log in as root: ssh: root@HOST",
        )


def _line(pattern: str, text: str) -> re.Match[str] | None:
    return re.search(f"^(?:{pattern})\r?$", text, re.MULTILINE)
