"""What specctl costs, side by side with what it stands on: plain ssh, pct and lxc-attach, and Ansible's connection.

    python -m bench.orchestrator [--containers 50] [--goes 7] [--only NAME ...] [--ansible FILE]

Makes a lab (root needed: tests/lab), launches a run in every container, and prints a markdown table: what, how long,
the ratio, and what it has to reach. Every ratio is of medians of goes that alternate, in this one run; in brackets the
lowest and the highest. Execs are counted by the node's sshd. `--ansible` is an `ansible` program whose collections have
community.proxmox; without it, that column stays empty.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.tables import HEAD, machine, ratio, row, shown, side_by_side
from orchestrator.errors import UnreachableError
from orchestrator.fleet import LEG_S, Fleet
from orchestrator.inventory import parse_inventory
from orchestrator.remote import Agent
from orchestrator.transport import NodePool
from tests.driver import Specctl
from tests.lab.lab import Lab

PCT_S = 0.48
"""CPU seconds that one call of the real pct takes."""
FIRST = 101
BARE = ["python3", "-c", "import json"]
BEFORE_IO = """
import os, sys
def leave(event, _):
    if event in ("socket.connect", "socket.getaddrinfo"):
        os._exit(0)
sys.addaudithook(leave)
from orchestrator.__main__ import main
main()
"""
"""specctl until it dials a node; `ssh -G` has answered by then."""
FAN = """
import sys
from orchestrator.transport import NodePool, Request, fanout
with NodePool() as pool:
    legs = list(fanout(pool.node("pve"), [
        Request(vmid=int(vmid), argv=["python3", "-c", "import json"], attach=sys.argv[1]) for vmid in sys.argv[2:]
    ], leg_timeout_s=60, parallel=8))
assert all(leg.result.exit_code == 0 for leg in legs), legs
"""
"""The same fan-out as status, of a Python that does nothing."""


class Bench:
    """The lab, its containers with a run in each, and what was measured."""

    def __init__(self, lab: Lab, specctl: Specctl, containers: int, goes: int, ansible: str | None) -> None:
        self.lab, self.specctl, self.goes, self.ansible = lab, specctl, goes, ansible
        self.vmids = list(range(FIRST, FIRST + containers))
        self.environ = {**specctl.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        self.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed starts from bytecode

    def setup(self) -> None:
        for vmid in self.vmids:
            self.lab.container(vmid)
        self.specctl.inventory.write_text(self.lab.hosts_yaml())
        with ThreadPoolExecutor(4) as crew:
            for done in crew.map(self.launch, self.vmids):
                assert done.code == 0, done.err

    def launch(self, vmid: int) -> Any:
        return self.specctl.launch("--until", "process", "--", "sleep", "100000", target=f"ct{vmid}")

    # --- measuring --------------------------------------------------------------------------------------------------

    def command(self, *argv: str, stdin: bytes = b"") -> Callable[[], None]:
        def run() -> None:
            done = subprocess.run(argv, input=stdin, env=self.environ, cwd=self.specctl.project, capture_output=True)
            assert done.returncode == 0, (argv[:6], done.stdout[-500:], done.stderr[-500:])

        return run

    def words(self, *words: str) -> Callable[[], None]:
        return self.command(sys.executable, "-m", "orchestrator", *words)

    @contextlib.contextmanager
    def execs(self) -> Iterator[list[int]]:
        """Appends how many commands the node's sshd was asked for meanwhile."""
        log = self.lab.run / "ssh" / "sshd.log"
        before = log.read_text(errors="replace").count("Starting session: command")
        counted: list[int] = []
        yield counted
        counted.append(log.read_text(errors="replace").count("Starting session: command") - before)

    def ssh(self, *options: str) -> list[str]:
        return ["ssh", "-F", str(self.lab.ssh_config), *options, self.lab.node]

    @contextlib.contextmanager
    def master(self) -> Iterator[list[str]]:
        """An ssh that rides on a connection which is open already."""
        path = f"{self.specctl.home}/master"
        subprocess.run(self.ssh("-M", "-N", "-f", "-o", f"ControlPath={path}"), check=True, stderr=subprocess.DEVNULL)
        try:
            yield self.ssh("-o", f"ControlPath={path}")
        finally:
            subprocess.run(self.ssh("-O", "exit", "-o", f"ControlPath={path}"), check=False, capture_output=True)

    @contextlib.contextmanager
    def fleet(self) -> Iterator[Fleet]:
        fleet = Fleet(parse_inventory(self.lab.hosts_yaml()))
        try:
            yield fleet
        finally:
            fleet.close()

    # --- rows -------------------------------------------------------------------------------------------------------

    def start_up(self) -> Iterator[str]:
        took = side_by_side(
            self.goes, bare=self.command(sys.executable, "-c", "pass"), help=self.words("--help"),
            status=self.command(sys.executable, "-c", BEFORE_IO, "status", "--json"),
        )  # fmt: skip
        bare = statistics.median(took["bare"])
        for name, what, most_ms in (
            ("help", "`specctl --help`", 150), ("status", "`specctl status`, until it dials the node", 250),
        ):  # fmt: skip
            over_ms = (statistics.median(took[name]) - bare) * 1e3
            yield row(
                f"{what}, over a bare interpreter ({shown(took['bare'])})", shown(took[name]), f"{over_ms:.0f} ms",
                f"< {most_ms} ms", over_ms < most_ms,
            )  # fmt: skip

    def status_of_all(self) -> Iterator[str]:
        """Through lxc-attach, one exec of the node for all."""
        vmids = [str(vmid) for vmid in self.vmids]
        took = side_by_side(
            self.goes, status=self.words("status", "--json"),
            bare=self.command(sys.executable, "-c", FAN, "auto", *vmids),
        )  # fmt: skip
        with self.execs() as count:
            self.words("status", "--json")()
        yield row("remote execs of `specctl status`, all containers on one node", "", str(count[0]), "1", count[0] == 1)
        yield ratio(f"`specctl status`, {len(vmids)} containers, beside a fan-out of `{shlex.join(BARE)}`",
                         took["status"], took["bare"], 2.0)  # fmt: skip

    def status_by_pct(self) -> Iterator[str]:
        """At what pct really costs: the node's cores set the pace."""
        self.lab.set_pct_cost(PCT_S)
        text = self.lab.hosts_yaml().replace("vmid:", "attach: pct, vmid:")
        path = self.specctl.home / "pct.yaml"
        path.write_text(text)
        try:
            took = side_by_side(self.goes, status=self.words("status", "--json", "--inventory", str(path)))["status"]
        finally:
            self.lab.set_pct_cost(0)
        least = len(self.vmids) * PCT_S / (os.cpu_count() or 1)
        yield ratio(
            f"`specctl status`, {len(self.vmids)} containers by pct, beside {len(self.vmids)} x {PCT_S} s of CPU on "
            f"{os.cpu_count()} cores", took, [least], 1.15,
        )  # fmt: skip

    def one_container(self) -> Iterator[str]:
        """A warm connection, and what a user would type instead."""
        vmid = str(FIRST)
        with self.fleet() as fleet, self.master() as warm:
            agent = fleet.agent(fleet.inventory.targets[f"ct{FIRST}"])
            call = shlex.join(["lxc-attach", "-n", vmid, "--clear-env", "--", *agent.argv()])
            pct = shlex.join(["pct", "exec", vmid, "--", *BARE])
            question = agent.request("probe", "0123456789abcdef", LEG_S)
            self.lab.set_pct_cost(PCT_S)
            try:
                ways = {
                    "specctl": lambda: agent.call("probe"), "warm": self.command(*warm, call, stdin=question),
                    "pct": self.command(*warm, pct), "cold": self.command(*self.ssh(), pct),
                }  # fmt: skip
                if self.ansible:
                    ways["ansible"] = self.command(*self._ansible(), "-l", f"ct{FIRST}")
                took = side_by_side(self.goes, **ways)
            finally:
                self.lab.set_pct_cost(0)
        yield ratio("one probe, warm, beside ssh ControlMaster + lxc-attach of the same call",
                         took["specctl"], took["warm"], 3.0)  # fmt: skip
        for name, what in (
            ("pct", "`ssh node pct exec` with ControlMaster"), ("cold", "`ssh node pct exec` without"),
            ("ansible", "Ansible, `proxmox_pct_remote`, `raw`"),
        ):  # fmt: skip
            if name in took:
                times = statistics.median(took[name]) / statistics.median(took["specctl"])
                yield row(f"beside it {what} (pct at {PCT_S} s)", shown(took[name]), f"{times:.1f} x ours")

    def _ansible(self) -> list[str]:
        inventory = self.specctl.home / "ansible.ini"
        if not inventory.exists():  # it knows pct by its full name
            over = "lowerdir=/usr/local/sbin:/usr/sbin"
            assert self.lab.on_node(["mount", "-t", "overlay", "-o", over, "sbin", "/usr/sbin"]).returncode == 0
        lines = [f"ct{vmid} proxmox_vmid={vmid}" for vmid in self.vmids]
        key = self.lab.run / "ssh" / "id"
        inventory.write_text("\n".join([
            "[all]", *lines, "[all:vars]", "ansible_connection=community.proxmox.proxmox_pct_remote",
            f"ansible_host=127.0.0.1\nansible_port={self.lab.port}\nansible_user=root\nansible_ssh_private_key_file={key}",
            "ansible_host_key_checking=false",
        ]) + "\n")  # fmt: skip
        return [str(self.ansible), "-i", str(inventory), "-f", "8", "all", "-m", "raw", "-a", shlex.join(BARE)]

    def ansible_of_all(self) -> Iterator[str]:
        if not self.ansible:
            return
        took = side_by_side(self.goes, status=self.words("status", "--json"), ansible=self.command(*self._ansible()))
        times = statistics.median(took["ansible"]) / statistics.median(took["status"])
        what = f"the same {len(self.vmids)} by Ansible, 8 at a time (pct without its cost)"
        yield row(what, shown(took["ansible"]), f"{times:.1f} x ours")

    def cut_link(self) -> Iterator[str]:
        """Packets dropped, nobody says goodbye, in the middle of a stream."""
        took = []
        for _ in range(3):
            with NodePool() as pool:
                node = pool.node(self.lab.node)
                with node.stream(["sh", "-c", "while echo; do sleep 0.2; done"], deadline_s=120.0) as stream:
                    lines = iter(stream)
                    next(lines)
                    self.lab.cut()
                    begun = time.perf_counter()
                    try:
                        for _ in lines:
                            pass
                    except UnreachableError:
                        took.append(time.perf_counter() - begun)
                    finally:
                        self.lab.mend()
        longest = max(took)
        yield row("a cut link noticed", shown(took), f"{longest:.1f} s", "<= 12 s", longest <= 12 and len(took) == 3)

    def launches(self) -> Iterator[str]:
        vmid = FIRST
        self.launch(vmid)  # whoever edits this very tree meanwhile has made another bundle of it, and another agent
        for what, most in (("its bundle in place", 3), ("one file changed", 4)):
            if most == 4:
                (self.specctl.project / "changed.py").write_text(f"# {time.time()}\n")
            with self.execs() as count:
                done = self.launch(vmid)
            assert done.code == 0, done.err
            asked = f"`specctl launch --until process`, {what}: remote execs"
            yield row(asked, "", str(count[0]), f"<= {most}", count[0] <= most)

    def log_size(self) -> Iterator[str]:
        """A sparse log of 5 GiB: its supervisor stands still meanwhile, or it would still be reading it."""
        small, large = (next(run for run in self.specctl(
            "status", "--json", f"ct{vmid}").json["runs"]) for vmid in self.vmids[1:3])  # fmt: skip
        pid = self.lab.inside(self.vmids[2], ["pgrep", "-of", "orchestrator.agent.supervise"]).stdout.split()[0]
        self.lab.inside(self.vmids[2], ["kill", "-STOP", pid])
        log = large["log"]["path"] if isinstance(large["log"], dict) else large["log"]
        size = int(self.lab.inside(self.vmids[2], ["stat", "-c", "%s", log]).stdout)
        try:
            assert self.lab.inside(self.vmids[2], ["truncate", "-s", "5G", log]).returncode == 0
            with self.fleet() as fleet:
                agents = [fleet.agent(fleet.inventory.targets[f"ct{vmid}"]) for vmid in self.vmids[1:3]]
                small_one, large_one = (partial(agent.call, "probe") for agent in agents)
                took = side_by_side(self.goes, small=small_one, large=large_one)
        finally:
            self.lab.inside(self.vmids[2], ["truncate", "-s", str(size), log])
            self.lab.inside(self.vmids[2], ["kill", "-CONT", pid])
        assert small["run_id"] != large["run_id"]
        yield ratio("one probe of a run whose log has 5 GiB, beside 1 KB", took["large"], took["small"], 1.1)

    def probe_cost(self) -> Iterator[str]:
        """CPU time of lxc-attach and of what it runs, which the clock on the wall cannot tell on a busy machine."""
        with self.fleet() as fleet:
            agent: Agent = fleet.agent(fleet.inventory.targets[f"ct{FIRST}"])
            question = agent.request("probe", "0123456789abcdef", LEG_S).decode()

        def cpu_s(argv: list[str]) -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert self.lab.inside(FIRST, argv, input=question).returncode == 0
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        asked = [(cpu_s(agent.argv()), cpu_s(BARE)) for _ in range(self.goes)]
        for what, values in zip(("a probe", f"`{shlex.join(BARE)}`"), zip(*asked, strict=True), strict=True):
            yield row(f"CPU time of {what} in a container, lxc-attach included", shown(list(values)), "")


ROWS: dict[str, Callable[[Bench], Iterator[str]]] = {
    "start-up": Bench.start_up, "status": Bench.status_of_all, "pct": Bench.status_by_pct, "one": Bench.one_container,
    "ansible": Bench.ansible_of_all, "cut": Bench.cut_link, "launch": Bench.launches, "log": Bench.log_size,
    "probe": Bench.probe_cost,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--containers", type=int, default=50)
    parser.add_argument("--goes", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--ansible")
    asked = parser.parse_args()
    specctl = Specctl()
    with Lab() as lab:
        specctl.environ["SPECCTL_SSH_CONFIG"] = os.environ["SPECCTL_SSH_CONFIG"] = str(lab.ssh_config)
        bench = Bench(lab, specctl, max(3, asked.containers), asked.goes, asked.ansible)
        try:
            bench.setup()
            print(f"`python -m bench.orchestrator {shlex.join(sys.argv[1:])}`, {datetime.date.today()}, {machine()}\n")
            print(HEAD)
            for name in asked.only:
                for line in ROWS[name](bench):
                    print(line, flush=True)
        finally:
            specctl.close()


if __name__ == "__main__":
    main()
