"""The lab: a Proxmox node on this machine's loopback, with real LXC containers, for tests and for play.

A `Lab` is a node (`node.py`: its processes, its sshd, the link to it) and the containers on it: overlays over one small
root image (`image.py`), started by the `pct` stand-in. `kinds.py` makes the odd ones; `play.py` is the command `lab`
for people. Standard library only; needs root. What tests use is named here.
"""

from __future__ import annotations

import re
import subprocess

from tests.lab.image import IMAGE, LabUnavailable, setup, shifted_image, wait_until
from tests.lab.node import HERE, USER, Node
from tests.lab.remains import RUNS, cgroup_of, is_abandoned, remove_cgroup

__all__ = [
    "RUNS",
    "USER",
    "Lab",
    "LabUnavailable",
    "cgroup_of",
    "is_abandoned",
    "remove_cgroup",
    "setup",
    "wait_until",
]

CONTAINER = {
    "arch": "amd64",
    "cores": "1",
    "entrypoint": "/usr/bin/tini -s -- /usr/bin/sleep infinity",
    "memory": "512",
    "ostype": "debian",
    "rootfs": f"lab:{IMAGE},size=4G",
    "swap": "0",
}
WRITE = 'cat >"$1.new"; chmod 755 "$1.new"; mv "$1.new" "$1"'


class Lab(Node):
    """One node and its containers. `with Lab() as lab:` is up inside and gone after."""

    def define(self, vmid: int, **conf: str) -> None:
        """Write a container's configuration; keys are those of Proxmox, `rootfs` and `entrypoint` included."""
        keys = {"hostname": f"ct{vmid}", **CONTAINER, **conf}
        if conf.get("unprivileged") == "1":
            keys["rootfs"] = f"lab:{shifted_image()},size=4G"
        if "net0" in conf:
            self._bridge()
        path = self.root / f"etc/pve/nodes/{self.node}/lxc/{vmid}.conf"
        path.write_text("".join(f"{key}: {value}\n" for key, value in sorted(keys.items())))
        path.chmod(0o640)  # as pmxcfs shows it: to root and www-data

    def _bridge(self) -> None:
        """Make sure of the node's `vmbr0`, 10.77.0.1/24, where `net0: name=eth0,bridge=vmbr0,ip=10.77.0.9/24` joins."""
        up = "ip link add vmbr0 type bridge; ip addr add 10.77.0.1/24 dev vmbr0; ip link set vmbr0 up"
        self._must(["sh", "-ec", f"ip link show vmbr0 >/dev/null 2>&1 || {{ {up}; }}"])

    def disk(self, vmid: int, size: str) -> str:
        """A disk of its own for a container, of so many `k` or `m`: the node's side of an `mp0: DISK,mp=/path`."""
        path = f"/run/lab/disk/{vmid}"
        self._must(["sh", "-ec", f"mkdir -p {path}; mount -t tmpfs -o size={size},mode=755 disk {path}"])
        return path

    def host(self, path: str) -> str:
        """Where the node sees `path` of this machine, for a mount point: its own /tmp, /root and /home are others."""
        return f"/run/lab/host{path}"

    def undefine(self, vmid: int) -> None:
        """Remove a stopped container's configuration. Its files stay, for a container of the same number."""
        (self.root / f"etc/pve/nodes/{self.node}/lxc/{vmid}.conf").unlink()

    def remove(self, vmid: int) -> None:
        """Stop a container, and leave nothing of it: the next of its number is a new one."""
        self.stop(vmid)
        self.undefine(vmid)
        self._must(["rm", "-rf", f"/run/lab/run/ct/{vmid}"])

    def container(self, vmid: int, **conf: str) -> None:
        """Define and start a container."""
        self.define(vmid, **conf)
        self.start(vmid)

    def start(self, vmid: int) -> None:
        self._must(["pct", "start", str(vmid)])

    def stop(self, vmid: int) -> None:
        self._must(["pct", "stop", str(vmid)])

    def reboot(self, vmid: int) -> None:
        self._must(["pct", "reboot", str(vmid)])

    def freeze(self, vmid: int) -> None:
        self._must(["lxc-freeze", "-n", str(vmid)])

    def thaw(self, vmid: int) -> None:
        self._must(["lxc-unfreeze", "-n", str(vmid)])

    def inside(self, vmid: int, argv: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, past ssh and pct. Keywords are those of subprocess.run."""
        return self.on_node(["lxc-attach", "-n", str(vmid), "--clear-env", "--", *argv], **kwargs)

    def clock(self, vmid: int, offset: str = "+0s", *, passed_s: int = 0) -> None:
        """Let the container's wall clock be off by so many `s`, `m`, `h` or `d`, from now on: `+3600s`, `-2h`.

        It is the clock of its Pythons, so of specctl's agent and supervisor, and jumps at once in those that started
        after the first call. A file has the time that the clock showed when it was written. The time since boot stays,
        but for what is to have `passed`, by the wall clock too; the monotonic clock stays in any case.
        """
        if not (match := re.fullmatch(r"([+-]\d+)([smhd])", offset)):
            raise LabUnavailable(f"a clock's offset is like +3600s or -2h, not {offset!r}")
        wall_s = int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] + passed_s
        script = (
            "for f in /usr/lib/python3.*/encodings/__init__.py; do grep -q lab-clock $f || cat >>$f; done; "
            "c=/etc/lab-clock; touch $c; { tail -n 20 $c; echo $(date +%s%N) $1 $2; } >$c.new; mv $c.new $c"
        )
        words = ["sh", "-ec", script, "sh", str(wall_s * 10**9), str(passed_s * 10**9)]
        self.inside(vmid, words, input=(HERE / "clock.py").read_text(), check=True)

    def nvidia_smi(self, vmid: int, says: str, code: int = 0) -> None:
        """Let the container's nvidia-smi print this whatever it is asked, and exit so; a GPU's row is
        `0, NVIDIA H200, 37, 1024, 143771` (number, name, busy %, MiB used, MiB in all)."""
        script = f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {code}\n"
        self.inside(vmid, ["sh", "-ec", WRITE, "sh", "/usr/local/bin/nvidia-smi"], input=script, check=True)

    def clear(self, vmid: int, workdir: str) -> None:
        """End everything in a container but its init, and remove `workdir`: as if nobody had been there."""
        script = (
            "for p in /proc/[0-9]*; do n=${p#/proc/}; [ $n = 1 ] || [ $n = $$ ] || "
            "tr '\\0' ' ' <$p/cmdline | grep -q 'sleep infinity' || kill -9 $n; done 2>/dev/null; "
            "while umount -l \"$1\" 2>/dev/null; do :; done; rm -rf \"$1\""
        )
        self.inside(vmid, ["sh", "-c", script, "sh", workdir])

    def vmids(self) -> list[int]:
        folder = self.root / f"etc/pve/nodes/{self.node}/lxc"
        return sorted(int(path.stem) for path in folder.glob("*.conf"))

    def hosts_yaml(self, *, workdir: str = "/workspace/specctl") -> str:
        """An inventory with one target for each container: `ct101`, ..."""
        lines = ["targets:"]
        lines += [f"  ct{vmid}: {{ssh: {self.node}, vmid: {vmid}, workdir: {workdir}}}" for vmid in self.vmids()]
        return "\n".join(lines) + "\n"
