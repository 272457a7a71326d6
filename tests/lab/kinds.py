"""Containers that are odd in one way each, as people have them: made the same way for tests and for play.

A kind makes a container and says what hosts.yaml must know of it besides node and number. All have a workdir on a small
disk of their own, so that a full disk is theirs alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.lab import Lab

WORKDIR = "/workspace"
Keys = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    what: str
    """In a few words, for people."""
    make: Callable[[Lab, int], Keys]


KINDS: dict[str, Kind] = {}


def kind(what: str) -> Callable[[Callable[[Lab, int], Keys]], Callable[[Lab, int], Keys]]:
    def register(make: Callable[[Lab, int], Keys]) -> Callable[[Lab, int], Keys]:
        KINDS[make.__name__] = Kind(what=what, make=make)
        return make

    return register


def container(lab: Lab, vmid: int, *, disk: str = "256m", options: str = "", **conf: str) -> Keys:
    """A container whose workdir is a disk of that size; what it holds outlives a reboot."""
    lab.container(vmid, mp0=f"{lab.disk(vmid, disk)},mp={WORKDIR}{options}", **conf)
    return {}


def without(lab: Lab, vmid: int, files: str) -> Keys:
    container(lab, vmid)
    lab.inside(vmid, ["sh", "-ec", f"rm -r {files}"], check=True)
    return {}


@kind("a bare init that reaps and nothing more")
def plain(lab: Lab, vmid: int) -> Keys:
    return container(lab, vmid)


@kind("process 1 is sleep, which reaps nothing")
def no_init(lab: Lab, vmid: int) -> Keys:
    return container(lab, vmid, entrypoint="/usr/bin/sleep infinity")


@kind("systemd, as a Debian template boots")
def systemd(lab: Lab, vmid: int) -> Keys:
    return container(lab, vmid, entrypoint="/sbin/init")


@kind("no tmux")
def no_tmux(lab: Lab, vmid: int) -> Keys:
    return without(lab, vmid, "/usr/bin/tmux")


@kind("no Python")
def no_python(lab: Lab, vmid: int) -> Keys:
    return without(lab, vmid, "/usr/bin/python3*")


@kind("no UTF-8 locale")
def no_utf8(lab: Lab, vmid: int) -> Keys:
    return without(lab, vmid, "/usr/lib/locale/C.utf8")


@kind("a workdir of 12 MiB")
def tiny_disk(lab: Lab, vmid: int) -> Keys:
    return container(lab, vmid, disk="12m")


@kind("a workdir that cannot be written")
def read_only(lab: Lab, vmid: int) -> Keys:
    return container(lab, vmid, options=",ro=1")


@kind("a wall clock that is an hour fast")
def wrong_clock(lab: Lab, vmid: int) -> Keys:
    container(lab, vmid)
    lab.clock(vmid, "+3600s")
    return {}


@kind("10.77.0.VMID, on the node's bridge with others")
def bridged(lab: Lab, vmid: int) -> Keys:
    return container(lab, vmid, net0=f"name=eth0,bridge=vmbr0,ip=10.77.0.{vmid}/24")


@kind("two GPUs, says its nvidia-smi")
def gpus(lab: Lab, vmid: int) -> Keys:
    container(lab, vmid)
    lab.nvidia_smi(vmid, "0, NVIDIA H200, 37, 1024, 143771\n1, NVIDIA H200, 0, 3, 143771")
    return {}


@kind("this machine's Python with torch, mounted read-only")
def torch(lab: Lab, vmid: int) -> Keys:
    folders = {str(Path(one).resolve()) for one in (sys.prefix, *python_of_venv())}
    mounts = {f"mp{n}": f"{lab.host(path)},mp={path},ro=1" for n, path in enumerate(sorted(folders), 1)}
    container(lab, vmid, **mounts)
    return {"python": f"{Path(sys.prefix).resolve()}/bin/python"}


def python_of_venv() -> list[str]:
    """What the interpreter of this virtual environment is made of: all of its prefix, but of /usr only its own part."""
    if sys.base_prefix != "/usr":
        return [sys.base_prefix]
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [str(path) for path in (Path("/usr/bin", name), Path("/usr/lib", name)) if path.exists()]
