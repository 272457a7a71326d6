"""Into a container through `pct exec` on its node: wraps another transport's argv, and tells pct's own failures.

A small guard runs on the node before pct: a frozen container would let `pct exec` hang, so it is recognised first and
answered at once; `timeout` ends on the node what closing a channel does not. It does so by KILL to the whole group:
with TERM it is content when lxc-attach ends, and a command that ignores TERM lives on in the container.

What pct says is judged by its text, and only when the caller saw no answer: its exit codes 2, 4 and 255 are also those
of any program.
"""

from __future__ import annotations

import re
import shlex

from orchestrator.errors import ContainerError, SpecctlError
from orchestrator.transport.base import Completed, Limits, Stdin, Stream, Transport

ON_NODE = ["env", "-u", "ENV", "-u", "BASH_ENV", "-u", "CDPATH", "LC_ALL=C.UTF-8", "sh", "-c"]
"""What every script on a node starts with. perl refuses to run with ENV or BASH_ENV, and without a UTF-8 locale it
turns each byte of an argument that is not ASCII into U+FFFD."""

PRELUDE = r"""
PATH="$PATH:/usr/sbin:/sbin"
frozen() {
    for file in /sys/fs/cgroup/lxc/"$1"/cgroup.events /sys/fs/cgroup/lxc/"$1"/ns/cgroup.events \
        /sys/fs/cgroup/freezer/lxc/"$1"/freezer.state /sys/fs/cgroup/freezer/lxc/"$1"/ns/freezer.state; do
        [ -r "$file" ] || continue
        while read -r key value; do
            case "$key $value" in
            "frozen 1" | "FROZEN " | "FREEZING ")
                echo "specctl-node: container $1 is frozen" >&2
                return 0
                ;;
            esac
        done <"$file"
    done
    return 1
}
no_pct() {
    command -v pct >/dev/null && return 1
    echo "specctl-node: no pct on this node" >&2
}
"""

_GUARD = (
    PRELUDE
    + r"""
vmid=$1 limit_s=$2
shift 2
cd / || exit 255
if frozen "$vmid" || no_pct; then exit 255; fi
[ "$limit_s" = none ] && exec pct exec "$vmid" -- "$@"
exec timeout -s KILL "$limit_s" pct exec "$vmid" -- "$@"
"""
)

_LOOK = r"""
cd /etc/pve || exit 0
for file in nodes/*/lxc/"$1".conf nodes/*/qemu-server/"$1".conf; do [ -e "$file" ] && echo "at: $file"; done
for file in lxc/*.conf; do [ -e "$file" ] && echo "here: $file"; done
exit 0
"""
_LOOK_DEADLINE_S = 10.0


class PctTransport(Transport):
    """Runs commands in one container of the node that `inner` reaches, as root of the container.

    PATH there is pct's own and knows no /usr/local; HOME and other variables of the node's session leak in.
    """

    def __init__(self, inner: Transport, vmid: int, *, node: str | None = None, target: str | None = None) -> None:
        super().__init__(target or inner.target)
        self._inner, self.vmid, self._ssh = inner, vmid, node

    def _open(self, argv: list[str], stdin: Stdin, limits: Limits, stderr_limit: int) -> Stream:
        # A second later than here, so that the deadline is told by the one who waits, and cleaned up after there.
        limit_s = "none" if limits.deadline_s is None else f"{limits.deadline_s + 1:.1f}"
        guarded = [*ON_NODE, _GUARD, "specctl-pct", str(self.vmid), limit_s, *argv]
        return self._inner._open(guarded, stdin, limits, stderr_limit)

    def close(self) -> None:
        self._inner.close()

    def explain(self, completed: Completed) -> SpecctlError | None:
        """Also the failures of pct itself. A container that this node does not have is looked for on the others."""
        if completed.exit_code == 0:
            return None
        text = completed.stderr.decode(errors="replace")
        return super().explain(completed) or self._absent(text) or self._failure(text)

    def _failure(self, text: str) -> ContainerError | None:
        vmid = self.vmid
        for pattern, what, hint in (
            (rf"specctl-node: container {vmid} is frozen", "is frozen: nothing in it can answer",
             f"thaw it: {self._on_node(f'lxc-unfreeze -n {vmid}')}"),
            (rf"container '{vmid}' not running!", "is not running",
             f"start it: {self._on_node(f'pct start {vmid}')}"),
            (rf"can't lock file '\S*pve-config-{vmid}\.lock' - got timeout",
             "is locked: another pct command holds its configuration", "wait for that command, then ask again"),
            (r"CT is locked \((?P<detail>.*)\)", "is locked ({detail})",
             f"wait for it to end, or, if it was cut short: {self._on_node(f'pct unlock {vmid}')}"),
            (rf'lxc-attach: {vmid}: .*?(?P<detail>[A-Z][a-z ]+) - Failed to exec (?P<program>".*")',
             "cannot run {program}: {detail}", "install it there, or check python: of this target in hosts.yaml"),
            (rf"lxc-attach: {vmid}: (?P<detail>.*)", "cannot be entered: {detail}",
             f"try by hand: {self._on_node(f'pct exec {vmid} -- true')}"),
        ):  # fmt: skip
            if match := re.search(f"^{pattern}\r?$", text, re.MULTILINE):
                return self._error(f"container {vmid} {what.format(**match.groupdict())}", hint)
        if re.search(r"^specctl-node: no pct on this node\r?$", text, re.MULTILINE):
            hint = "a container needs a Proxmox node: check ssh: in hosts.yaml, or drop vmid: for a plain machine"
            return self._error(f"{self._node} has no pct, so it has no container {vmid}", hint)
        if re.search(r"^please run as root\r?$|^\S*: Permission denied\b.*\bpct\b", text, re.MULTILINE):
            hint = "log in to the node as root: ssh: root@host"
            return self._error(f"pct on {self._node} needs root to enter container {vmid}", hint)
        return None

    def _absent(self, text: str) -> ContainerError | None:
        pattern = rf"^Configuration file 'nodes/(?P<node>[^/']+)/lxc/{self.vmid}\.conf' does not exist\r?$"
        match = re.search(pattern, text, re.MULTILINE)
        if match is None:
            return None
        seen = self._look()
        elsewhere = re.search(rf"^at: nodes/([^/]+)/(lxc|qemu-server)/{self.vmid}\.conf$", seen, re.MULTILINE)
        if elsewhere and elsewhere[2] == "qemu-server":
            message = f"{self.vmid} is a virtual machine on node {elsewhere[1]}, not a container"
            return self._error(message, "reach it by SSH: give its own address as ssh:, and no vmid:")
        if elsewhere:
            message = f"container {self.vmid} is on node {elsewhere[1]}, not on {match['node']}"
            return self._error(message, f"set ssh: of this target to an address of {elsewhere[1]}")
        here = ", ".join(re.findall(r"^here: lxc/(\d+)\.conf$", seen, re.MULTILINE)) or "none"
        message = f"there is no container {self.vmid} on node {match['node']}; its containers: {here}"
        return self._error(message, f"check vmid: in hosts.yaml; {self._on_node('pct list')}")

    def _look(self) -> str:
        try:
            argv = [*ON_NODE, _LOOK, "specctl-look", str(self.vmid)]
            return self._inner.run(argv, deadline_s=_LOOK_DEADLINE_S).stdout.decode(errors="replace")
        except SpecctlError:
            return ""

    @property
    def _node(self) -> str:
        return self._ssh or "this machine"

    def _on_node(self, command: str) -> str:
        return f"ssh {shlex.quote(self._ssh)} {command}" if self._ssh else command

    def _error(self, message: str, hint: str) -> ContainerError:
        return ContainerError(message, target=self.target, hint=hint)
