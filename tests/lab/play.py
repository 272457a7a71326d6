"""The command `lab`: a lab to play in, that stays up, with a container of each kind and cables to pull.

`lab up` writes `hosts.lab.yaml` beside hosts.yaml, and with it specctl finds nodes, keys and containers by itself.
Every other word breaks one thing on purpose or mends it; `heal` mends all. What is up is read from the nodes each
time: nothing is remembered elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.lab.kinds import KINDS, WORKDIR
from tests.lab.lab import Lab, LabUnavailable, setup
from tests.lab.remains import is_abandoned

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "hosts.lab.yaml"
NAME = os.environ.get("SPECCTL_LAB_NAME", "play")
NODES = {"pve": NAME, "pve2": f"{NAME}-2"}
"""The nodes of the cluster, and the names by which later commands find them."""
PLAN = {"pve": [name for name in KINDS if name != "torch"] + ["bridged"], "pve2": ["plain", "no_init"]}
FIRST_VMID = {"pve": 101, "pve2": 201}
MOVED = 209
"""A container that lives on pve2, while hosts.lab.yaml looks for it on pve."""
FILLER = f"{WORKDIR}/filled-by-the-lab"
Say = Callable[[str], None]


def open_labs() -> dict[str, Lab]:
    labs = {node: Lab(node=node, name=name) for node, name in NODES.items()}
    if any(is_abandoned(lab.run) for lab in labs.values()):
        raise LabUnavailable("no lab is up; start it with: make lab")
    return labs


def find(labs: dict[str, Lab], name: str) -> tuple[Lab, int]:
    """(its node, its number) of a container called `ct101` or `101`."""
    vmid = int(name.removeprefix("ct")) if name.removeprefix("ct").isdigit() else 0
    for lab in labs.values():
        if vmid in lab.vmids():
            return lab, vmid
    known = ", ".join(f"ct{vmid}" for lab in labs.values() for vmid in lab.vmids())
    raise LabUnavailable(f"there is no container {name}; there are {known}")


def state(lab: Lab, vmid: int) -> str:
    said = lab.on_node(["lxc-info", "-n", str(vmid), "-s", "-H"]).stdout.strip().lower()
    return said if said in ("running", "frozen") else "stopped"


# --- up and down ----------------------------------------------------------------------------------------------------


def up(say: Say, *, chosen: list[str], hosts: Path) -> None:
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise LabUnavailable(f"there is no kind of container {unknown[0]}; there are {', '.join(KINDS)}")
    setup()
    labs: dict[str, Lab] = {}
    keys: dict[int, dict[str, str]] = {}
    try:
        for node, name in NODES.items():
            labs[node] = Lab(node=node, name=name, cluster=next(iter(labs.values()), None)).up(keep=True)
            kinds = PLAN[node]
            if node == "pve":
                kinds = chosen or kinds + ["torch"] * bool(importlib.util.find_spec("torch"))
            for vmid, kind in enumerate(kinds, FIRST_VMID[node]):
                what = KINDS[kind].what.replace("VMID", str(vmid))
                say(f"{node}  ct{vmid}  {what}")
                keys[vmid] = {"vmid": str(vmid), **KINDS[kind].make(labs[node], vmid)}
                (labs[node].run / f"{vmid}.kind").write_text(what)
        labs["pve2"].on_node(["sh", "-c", "echo 'echo Welcome to pve2, said by its shell' >/root/.bashrc"])
        labs["pve2"].define(MOVED)
        write_inventory(labs, keys, hosts)
    except BaseException:
        for lab in labs.values():
            lab.down()
        raise
    say(f"""
{hosts.name} names them all; specctl is in .venv/bin, if make has put it there. Type:
  export SPECCTL_INVENTORY={shlex.quote(str(hosts.resolve()))}
  specctl launch ct101 -- sh -c 'n=0; while sleep 1; do n=$((n+1)); echo step=$n tok/s=100; done'
  specctl status
and then pull cables, and ask again:
  ./lab freeze ct101      ./lab cut node      ./lab fill ct101      ./lab kill-tmux ct101      ./lab reboot ct101
  ./lab heal              ./lab status        ./lab down            ./lab --help""")


def write_inventory(labs: dict[str, Lab], keys: dict[int, dict[str, str]], hosts: Path) -> None:
    config = labs["pve"].run / "ssh" / "all_nodes"
    config.write_text("\n".join(lab.ssh_config.read_text() for lab in labs.values()))
    lines = [
        "# Written by `make lab`, removed by `./lab down`: the containers of the lab. docs/lab.md",
        f"ssh_config: {config}",
        f"defaults: {{ssh: pve, workdir: {WORKDIR}}}",
        "targets:",
    ]
    for lab in labs.values():
        for vmid in (vmid for vmid in lab.vmids() if vmid in keys):
            node = {} if lab.node == "pve" else {"ssh": lab.node}
            entry = ", ".join(f"{key}: {value}" for key, value in {**node, **keys[vmid]}.items())
            lines.append(f"  ct{vmid}: {{{entry}}}".ljust(44) + f" # {(lab.run / f'{vmid}.kind').read_text()}")
    lines.append(f"  ct{MOVED}: {{vmid: {MOVED}}}".ljust(44) + " # it lives on pve2, whatever this says")
    hosts.write_text("\n".join(lines) + "\n")
    (labs["pve"].run / "hosts").write_text(str(hosts.resolve()))
    owner = os.environ.get("SUDO_UID", "")
    if owner.isdigit():  # whoever typed sudo is the one who types specctl
        for path in (hosts, *(lab.run / "ssh" / "id" for lab in labs.values())):
            os.chown(path, int(owner), -1)


def down(say: Say) -> None:
    for node, name in NODES.items():
        lab = Lab(node=node, name=name)
        if (written := lab.run / "hosts").exists():
            Path(written.read_text()).unlink(missing_ok=True)
        lab.down()
    say("the lab is gone, with all that ran in it")


def show(labs: dict[str, Lab], say: Say) -> None:
    for lab in labs.values():
        say(f"{lab.node}  the link to it is {'cut' if lab.is_cut() else 'up'}")
        for vmid in lab.vmids():
            kind = lab.run / f"{vmid}.kind"
            filled = lab.on_node(["test", "-e", f"/run/lab/disk/{vmid}/{Path(FILLER).name}"]).returncode == 0
            about = kind.read_text() if kind.exists() else "hosts.lab.yaml looks for it on pve"
            wrong = f", clock {clock_of(lab, vmid).read_text()}" if clock_of(lab, vmid).exists() else ""
            say(f"  ct{vmid}  {state(lab, vmid)}{', disk full' if filled else ''}{wrong}".ljust(31) + f" {about}")


# --- what breaks and what mends -------------------------------------------------------------------------------------


def must_run(lab: Lab, vmid: int) -> None:
    if (seen := state(lab, vmid)) != "running":
        raise LabUnavailable(f"ct{vmid} is {seen}; first: ./lab {'thaw' if seen == 'frozen' else 'start'} ct{vmid}")


def freeze(lab: Lab, vmid: int) -> str:
    if state(lab, vmid) != "frozen":
        must_run(lab, vmid)
        lab.freeze(vmid)
    return "is frozen: its processes stand still, and nothing in it answers. Undo: ./lab thaw"


def thaw(lab: Lab, vmid: int) -> str:
    if state(lab, vmid) == "frozen":
        lab.thaw(vmid)
    return f"is {state(lab, vmid)}"


def reboot(lab: Lab, vmid: int) -> str:
    must_run(lab, vmid)
    lab.reboot(vmid)
    return "was rebooted: its files are there, its processes are not"


def stop(lab: Lab, vmid: int) -> str:
    if state(lab, vmid) != "stopped":
        lab.stop(vmid)
    return f"is stopped. Undo: ./lab start ct{vmid}"


def start(lab: Lab, vmid: int) -> str:
    if state(lab, vmid) == "stopped":
        lab.start(vmid)
    return f"is {state(lab, vmid)}"


def fill(lab: Lab, vmid: int) -> str:
    must_run(lab, vmid)
    script = f'cat /dev/zero 2>/dev/null >{FILLER}; [ -s {FILLER} ] && df -h {WORKDIR} | tail -1'
    done = lab.inside(vmid, ["sh", "-c", script])
    if done.returncode != 0:
        raise LabUnavailable(f"ct{vmid}: {WORKDIR} takes not a byte (read-only, or full already)")
    return f"has no room left in {WORKDIR} ({done.stdout.split()[1]}). Undo: ./lab heal"


def empty(lab: Lab, vmid: int) -> None:
    lab.on_node(["rm", "-f", f"/run/lab/disk/{vmid}/{Path(FILLER).name}"])


def kill_tmux(lab: Lab, vmid: int) -> str:
    must_run(lab, vmid)
    # the kernel's name of the server is `tmux: server`, that of a client is not
    killed = int(lab.inside(vmid, ["pkill", "-KILL", "-c", "-x", "tmux: server"]).stdout.strip() or 0)
    return f"had {killed} tmux server{'s' * (killed > 1)}, killed now" if killed else "has no tmux server to kill"


def clock(lab: Lab, vmid: int, offset: str) -> str:
    must_run(lab, vmid)
    lab.clock(vmid, offset)
    if re.fullmatch(r"[+-]0+.", offset):
        clock_of(lab, vmid).unlink(missing_ok=True)
        return "has the right time again"
    clock_of(lab, vmid).write_text(offset)
    return f"has a wall clock that is off by {offset}, for what specctl starts there. Undo: ./lab clock ct{vmid} +0s"


def clock_of(lab: Lab, vmid: int) -> Path:
    """By how much somebody has set its clock wrong."""
    return lab.run / f"{vmid}.clock"


VERBS: dict[str, tuple[Callable[[Lab, int], str], str]] = {
    "freeze": (freeze, "let everything in a container stand still"),
    "thaw": (thaw, "let it go on (all, if none is named)"),
    "reboot": (reboot, "pct reboot; a process 1 that ignores it, as of no_init, takes it a minute"),
    "stop": (stop, "pct stop"),
    "start": (start, "pct start (all that are stopped, if none is named)"),
    "fill": (fill, "fill the disk of its workdir to the last byte"),
    "kill-tmux": (kill_tmux, "SIGKILL its tmux servers"),
}
ALL_BY_DEFAULT = ("thaw", "start")


def containers(labs: dict[str, Lab], names: Iterable[str]) -> list[tuple[Lab, int]]:
    everything = [(lab, vmid) for lab in labs.values() for vmid in lab.vmids() if vmid != MOVED]
    return [find(labs, name) for name in names] or everything


def cut(labs: dict[str, Lab], name: str, say: Say) -> None:
    lab = labs.get("pve" if name == "node" else name)
    if lab is None:
        raise LabUnavailable(f"there is no node {name}; there are {', '.join(labs)}")
    lab.cut()
    say(f"{lab.node} is cut off: packets to it vanish, and no connection was told. Undo: ./lab heal")


def heal(labs: dict[str, Lab], say: Say) -> None:
    for lab in labs.values():
        lab.mend()
    for lab, vmid in containers(labs, []):
        empty(lab, vmid)
        thaw(lab, vmid)
        start(lab, vmid)
        if clock_of(lab, vmid).exists():
            clock(lab, vmid, "+0s")
    say("links are up, containers run, disks have room, clocks are right; what was killed stays dead. "
        "Next: specctl status")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    def say(text: str) -> None:
        print(text, flush=True)

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(prog="./lab", description="Two Proxmox nodes with real containers, to break.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    verbs.add_parser("setup", help="install what is missing (apt) and make the containers' root image")
    words = verbs.add_parser("up", help="start it, leave it running, and write hosts.lab.yaml")
    words.add_argument("kind", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; or all")
    words.add_argument("--write", type=Path, default=HOSTS, metavar="FILE", help="another file than hosts.lab.yaml")
    verbs.add_parser("status", help="what runs, and what is broken")
    for name, (_, about) in VERBS.items():
        words = verbs.add_parser(name, help=about)
        words.add_argument("container", nargs="*" if name in ALL_BY_DEFAULT else "+", help="ct101 or 101")
    words = verbs.add_parser("clock", help="let a container's wall clock be off by so much: +3600s, -2h, +0s")
    words.add_argument("container")
    # all that follows, since argparse would take -2h for an option
    words.add_argument("offset", nargs=argparse.REMAINDER, help="a sign, a whole number and s, m, h or d")
    words = verbs.add_parser("cut", help="cut the link to a node: pve (or just `node`), pve2")
    words.add_argument("node")
    verbs.add_parser("heal", help="undo all of it")
    verbs.add_parser("down", help="end the lab and everything in it")
    args = parser.parse_args(argv)
    try:
        if args.verb == "setup":
            setup()
        elif args.verb == "up":
            up(say, chosen=args.kind, hosts=args.write)
        elif args.verb == "down":
            down(say)
        elif args.verb == "status":
            show(open_labs(), say)
        elif args.verb == "cut":
            cut(open_labs(), args.node, say)
        elif args.verb == "heal":
            heal(open_labs(), say)
        elif args.verb == "clock":
            lab, vmid = find(open_labs(), args.container)
            say(f"ct{vmid} {clock(lab, vmid, ' '.join(args.offset))}")
        else:
            for lab, vmid in containers(open_labs(), args.container):
                say(f"ct{vmid} {VERBS[args.verb][0](lab, vmid)}")
    except (LabUnavailable, RuntimeError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0
