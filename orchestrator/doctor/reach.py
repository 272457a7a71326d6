"""The way to a target, rung by rung: what stands, where it is broken, and what was not looked at therefore. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.doctor.check import RUNGS, Examined, Outcome, Rung
from orchestrator.errors import AuthError, ConfigError, HostKeyError, SpecctlError
from orchestrator.transport.pct_errors import Seen

ASKS: dict[Rung, str] = {
    "ssh": "ssh_config says how to get to the node, and asks for nothing that specctl cannot do",
    "reachable": "the node, and the hosts on the way to it, answer on their SSH ports",
    "host key": "the node's key is the one on record; a new one is never asked about and never trusted by itself",
    "login": "the node takes one of your keys, without a passphrase, a touch, a password or a ticket",
    "shell": "the login shell runs what it is given",
    "pct": "the node is a Proxmox node with pct, and which versions it has",
    "container": "the container is on this node, running, and not frozen",
    "entry": "this login may enter it, by itself or through sudo",
}


def rungs(examined: Examined) -> Iterator[tuple[Rung, Outcome]]:
    """Each rung that this target has. Those after the broken one are unknown."""
    target = examined.target
    has = [rung for rung in RUNGS if (target.ssh if RUNGS.index(rung) < 5 else target.vmid) is not None]
    broken = False
    for rung in has:
        if broken:
            yield rung, Outcome(status="unknown", what=f"not looked at: {examined.broken} comes first")
        elif rung == examined.broken and examined.error is not None:
            broken = True
            yield rung, _trouble(examined, rung, examined.error)
        else:
            yield rung, Outcome(status="ok", what=_fine(examined, rung))


def of_error(error: SpecctlError) -> Rung:
    """Which rung an error of the connection to the node is about."""
    if isinstance(error, ConfigError):
        return "ssh"
    if isinstance(error, HostKeyError):
        return "host key"
    if isinstance(error, AuthError):
        return "login"
    return "reachable"


def of_container(seen: Seen, *, frozen: bool, vmid: int) -> Rung:
    """Which rung it is about that a container of a node that answers did not."""
    if "pct" not in seen.tools or not seen.cluster:
        return "pct"
    return "container" if frozen or not seen.listens or str(vmid) not in seen.here else "entry"


def _trouble(examined: Examined, rung: Rung, error: SpecctlError) -> Outcome:
    evidence = ""
    mend = error.hint or ""
    vmid, node = examined.target.vmid, examined.node
    if rung == "container" and vmid is not None and node is not None:
        # Said with the very words that reach the node from here.
        if "frozen" in node.facts:
            mend = examined.hands.on_node(f"lxc-unfreeze -n {vmid}")
            evidence = "its cgroup on the node says frozen"
        elif "is not running" in error.message and "locked" not in error.message:
            mend = examined.hands.on_node(f"pct start {vmid}")
            evidence = "LXC of the node has no such container running"
    if rung == "entry" and node is not None and node.text("sudo"):
        evidence = f"sudo -n -l there says: {' '.join(node.text('sudo').split())[:200]}"
    return Outcome(status="fail", what=error.message, evidence=evidence, mend=mend)


def _fine(examined: Examined, rung: Rung) -> str:
    node, target = examined.node or examined.report, examined.target
    login = node.one("login") if node is not None else ""
    if rung == "reachable" and examined.connected_s is not None:
        return f"{target.ssh} answered within {examined.connected_s:.1f} s"
    if rung == "login" and login:
        return f"as {login}"
    if rung == "shell" and node is not None:
        return f"{node.one('host')}, {node.one('kernel')}"
    if rung == "pct" and node is not None:
        return ", ".join(node.all("version")) or "it is there"
    if rung == "container":
        return f"container {target.vmid} runs there"
    if rung == "entry":
        return "root of the node" if login == "root" else f"{login}, through sudo"
    return {"ssh": "nothing in ssh_config is in the way", "reachable": "it answers",
            "host key": "it is the one on record"}.get(rung, "it works")
