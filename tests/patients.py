"""Targets in every state that the doctor knows a word for: what the script printed on a machine that is well, recorded,
and for each trouble the few lines that are otherwise.

The tests hold every check to them, and scripts/doctor_page.py makes docs/doctor.md of what is said of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from orchestrator.doctor import checks, report
from orchestrator.doctor.check import Examined, Outcome, Rung
from orchestrator.doctor.hands import Hands
from orchestrator.errors import AuthError, ConfigError, ContainerError, HostKeyError, SpecctlError, UnreachableError
from orchestrator.inventory import Target

TOKEN = "specctl-0"
TARGET = Target(
    name="gpu1", ssh="root@pve1", vmid=200, workdir="/workspace/specctl", user="train", gpus=[0, 1],
    python="/opt/venv/bin/python",
)  # fmt: skip
ALONE = Target(name="box", ssh="train@box1", workdir="/data/specctl")
"""An SSH machine whose login is not root, without GPUs."""

WELL = """
at who
now 1796017643
login root
uid 1000
user train
groups train video render
home /home/train
home-is directory writable
at system
path /sbin:/bin:/usr/sbin:/usr/bin
locale C.UTF-8
host gpu1
kernel Linux 6.8.12-4-pve x86_64
system Debian GNU/Linux 12 (bookworm)
program tmux /usr/bin/tmux
program python3 /usr/bin/python3
program grep /usr/bin/grep
program gcc /usr/bin/gcc
program cc /usr/bin/cc
program clang
program nvidia-smi /usr/bin/nvidia-smi
program sudo
manager apt-get
at limits
limits Max cpu time              unlimited            unlimited            seconds
limits Max file size             unlimited            unlimited            bytes
limits Max processes             256841               256841               processes
limits Max open files            1024                 1048576              files
limits Max locked memory         8419237888           8419237888           bytes
limits Max address space         unlimited            unlimited            bytes
meminfo MemTotal:       67108864 kB
meminfo MemAvailable:   61203412 kB
processors 16
cgroup /sys/fs/cgroup/.lxc memory.current 4096000
cgroup /sys/fs/cgroup/.lxc memory.max max
cgroup /sys/fs/cgroup/ memory.max 68719476736
cgroup /sys/fs/cgroup/ memory.current 6442450944
cgroup /sys/fs/cgroup/ pids.max max
cgroup /sys/fs/cgroup/ pids.current 41
at tmux
utf8 C.utf8
tmux /usr/bin/tmux 0 tmux 3.3a
socket /workspace/specctl/tmux-1000
socket-is srw------- 1 train train 0 Nov 30 05:44 /workspace/specctl/tmux-1000
socket-says 20261130-054401-demo-3fa9: 1 windows (created Mon Nov 30 05:44:01 2026)
at python
python /opt/venv/bin/python
python-code 0
python-says T version 3.11.2
python-says T now 1796017644.063
python-says T executable /opt/venv/bin/python
at gpu
device crw-rw-rw- 1 root root 195,   0 Nov 30 03:10 /dev/nvidia0
device crw-rw-rw- 1 root root 195,   1 Nov 30 03:10 /dev/nvidia1
device crw-rw-rw- 1 root root 195, 255 Nov 30 03:10 /dev/nvidiactl
device crw-rw-rw- 1 root root 511,   0 Nov 30 03:10 /dev/nvidia-uvm
opens /dev/nvidia0
opens /dev/nvidia1
opens /dev/nvidiactl
opens /dev/nvidia-uvm
module NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build
at nvidia-smi
smi-code 0
smi 0, NVIDIA H200, 0, 3, 143771
smi 1, NVIDIA H200, 0, 3, 143771
at mounts
mount 1860 1783 252:7 / / rw,relatime shared:301 - ext4 /dev/mapper/pve-vm--200--disk--0 rw
mount 1868 1861 0:231 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw
mount 1869 1860 252:9 / /workspace rw,relatime shared:317 - ext4 /dev/mapper/pve-vm--200--disk--1 rw
at tmp
place tmp dw /tmp
blocks tmp /dev/mapper/pve-vm--200--disk--0 65536000 8100000 54000000 14% /
inodes tmp /dev/mapper/pve-vm--200--disk--0 4194304 60000 4134304 2% /
at shm
place shm dw /dev/shm
blocks shm tmpfs 33554432 0 33554432 0% /dev/shm
inodes shm tmpfs 8388608 1 8388607 1% /dev/shm
at workdir
workdir /workspace/specctl
nearest /workspace/specctl
nearest-is drwxr-xr-x 5 1000 1000 4096 Nov 30 05:44 /workspace/specctl
place workdir dw /workspace/specctl
blocks workdir /dev/mapper/pve-vm--200--disk--1 1048576000 204800000 843776000 20% /workspace
inodes workdir /dev/mapper/pve-vm--200--disk--1 65536000 90000 65446000 1% /workspace
at torch
torch-python /opt/venv/bin/python
torch-code 0
torch specctl-torch {"version": "2.9.0+cu128", "cuda": "12.8", "available": true, "count": 2, "seconds": 4.1}
end
""".strip()

NODE = """
at node
now 1796017643
login root
kernel Linux 6.8.12-4-pve x86_64
host pve1
version lxc-pve 6.0.0-1
version pve-container 5.2.2
version pve-manager 8.3.0
conf dev0: /dev/nvidia0,mode=0666
conf dev1: /dev/nvidia1,mode=0666
conf dev2: /dev/nvidiactl,mode=0666
conf dev3: /dev/nvidia-uvm,mode=0666
conf mp0: local-lvm:vm-200-disk-1,mp=/workspace,size=1000G
conf rootfs: local-lvm:vm-200-disk-0,size=64G
device /dev/nvidia0
device /dev/nvidia1
device /dev/nvidiactl
device /dev/nvidia-uvm
module NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build
at nvidia-smi
smi-code 0
smi 0, NVIDIA H200, 0, 3, 143771
smi 1, NVIDIA H200, 0, 3, 143771
end
""".strip()

KEYED = ("program", "opens", "place", "blocks", "inodes", "limits", "meminfo", "conf", "version")
"""Keys of which each names, in its first word or words, what it is about."""
TORCH = 'specctl-torch {"version": "2.9.0+cu128", "cuda": "12.8", "available": false, "count": 0, "seconds": 3.9'
NO_DEVICE = {f"device {name}": None for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")}


@dataclass(frozen=True, kw_only=True)
class Patient:
    """A target that lacks one thing."""

    check: str
    """Who is to notice."""
    told: dict[str, str | None] = field(default_factory=dict)
    """What the target says otherwise: lines that begin so are replaced by this one, or left out (None)."""
    node: dict[str, str | None] = field(default_factory=dict)
    target: Target = TARGET
    broken: Rung | None = None
    error: SpecctlError | None = None
    clock_s: tuple[float, float] = (-0.2, 0.1)
    python_hint: str | None = None
    until: str = ""
    """The script came to no end: the part that it was at."""

    def examined(self) -> Examined:
        text = edited(WELL, self.told, self.until)
        seen = None if self.broken else report.read(text, TOKEN, broke="it took too long")
        node = report.read(edited(NODE, self.node, ""), TOKEN) if self.target.vmid is not None else None
        login = (node or seen or report.Report()).one("login", "root")
        return Examined(
            target=self.target, node=node, report=seen, broken=self.broken, error=self.error, connected_s=0.2,
            clock_s=self.clock_s, python_hint=self.python_hint, quick=False,
            hands=Hands(
                target=self.target, ssh=["ssh", self.target.ssh] if self.target.ssh else [], login=login,
                manager=(seen and seen.one("manager")) or "apt-get",
            ),
        )  # fmt: skip

    def found(self) -> list[tuple[str, Outcome]]:
        return list(checks.examine(self.examined()))


def edited(text: str, changes: dict[str, str | None], until: str) -> str:
    lines = text.splitlines()
    for beginning, new in changes.items():
        key, _, more = beginning.partition(" ")
        at = [n for n, line in enumerate(lines) if re.match(rf"{re.escape(key)}( |$)", line) and more in line]
        place = at[0] if at else next(n for n, line in enumerate(lines) if line.startswith("end"))
        lines = [line for n, line in enumerate(lines) if n not in at]
        lines[place:place] = [] if new is None else [f"{key} {row}" for row in new.splitlines()]
    if until:
        last = lines.index(f"at {until}")
        lines = lines[: last + 1]
    return "".join(f"{TOKEN} {line}\n" for line in lines)


def alone(**keys: object) -> Target:
    return replace(ALONE, **keys)


OF_ALONE = {"login": "train", **NO_DEVICE, "opens": None, "smi": None, "smi-code": None, "module": None,
            "python": "/usr/bin/python3", "torch-python": None, "torch-code": None, "torch": None}  # fmt: skip

PATIENTS = [
    # --- the way there
    Patient(check="ssh", broken="ssh", error=ConfigError(
        "PreferredAuthentications gssapi-with-mic is set for this host, and keys are the only way in that specctl has",
        hint="allow publickey for this host in ssh_config")),
    Patient(check="reachable", broken="reachable", error=UnreachableError(
        "[pve1]:22 refused the connection", hint="check the port: ssh: in hosts.yaml, and Port in ssh_config")),
    Patient(check="host key", broken="host key", error=HostKeyError(
        "the host key of [pve1]:22 is not known: the server shows ssh-ed25519 SHA256:…",
        hint="accept it: ssh -o StrictHostKeyChecking=ask root@pve1 true")),
    Patient(check="login", broken="login", error=AuthError(
        "cannot log in as root@pve1 port 22: /home/me/.ssh/id_ed25519_sk is a security key "
        "(sk-ssh-ed25519@openssh.com): to use it somebody has to touch it, and specctl asks nobody",
        hint="make a key with ssh-keygen and take it there with ssh-copy-id")),
    Patient(check="shell", broken="shell", error=UnreachableError(
        "the login shell on root@pve1 does not run what it is given; it said: This account is not available.",
        hint="try by hand: ssh root@pve1 echo works")),
    Patient(check="pct", broken="pct", error=ContainerError(
        "root@pve1 has no pct, so it has no container 200",
        hint="a container needs a Proxmox node: check ssh: in hosts.yaml, or drop vmid: for a plain machine")),
    Patient(check="container", broken="container", node={"frozen": "yes"}, error=ContainerError(
        "container 200 is frozen: nothing in it can answer")),
    Patient(check="container", broken="container", error=ContainerError("container 200 is not running")),
    Patient(check="entry", broken="entry", node={"login": "train", "sudo": "sudo: a password is required"},
            error=ContainerError(
        "container 200 is entered as root of pve1, but the login is train, and sudo asks for a password",
        hint="as root there: visudo -f /etc/sudoers.d/specctl, and write this line: "
        "train ALL=(root) NOPASSWD: /usr/sbin/pct exec 200 -- *")),
    # --- the machine
    Patient(check="user", told={"user-missing": "train", "user": "root", "uid": "0"}),
    Patient(check="user", told={"user-other": "train", "login": "me", "user": "me"}, target=alone(user="train")),
    Patient(check="home", told={"home-is": ""}),
    Patient(check="home", told={"home-is": "directory"}),
    Patient(check="programs", told={"program grep": "grep"}),
    Patient(check="locale", told={"tmux": "/usr/bin/tmux 1 tmux: need UTF-8 locale (LC_CTYPE) but have ANSI_X3.4-1968",
                                  "utf8": ""}),
    Patient(check="tmux", told={"tmux": None, "program tmux": "tmux"}),
    Patient(check="tmux", told={"tmux": None, "program tmux": "tmux", "manager": "apk"}),
    Patient(check="tmux", told={"tmux": "/usr/bin/tmux 0 tmux 2.8"}),
    Patient(check="tmux socket", told={"socket-is": None, "socket-says": None, "server": "4711"}),
    Patient(check="tmux socket", told={
        "socket-is": "srw------- 1 root root 0 Nov 30 05:44 /workspace/specctl/tmux-1000",
        "socket-says": "error connecting to /workspace/specctl/tmux-1000 (Permission denied)"}),
    Patient(check="tmux socket", told={
        "socket-is": "-rw-r--r-- 1 train train 0 Nov 30 05:44 /workspace/specctl/tmux-1000"}),
    Patient(check="tmux socket", told={
        "socket-says": "error connecting to /workspace/specctl/tmux-1000 (Permission denied)"}),
    Patient(check="tmux socket", told={"socket-says": "protocol version mismatch (client 8, server 7)"}),
    Patient(check="python", told={"python-says": "sh: /opt/venv/bin/python: not found", "python-code": "127"},
            python_hint="there is Python 3.12 at /opt/conda/bin/python3: set `python: /opt/conda/bin/python3` of this "
            "target in hosts.yaml"),
    Patient(check="python", told={**OF_ALONE, "python": "python3", "python-says": None, "python-code": None},
            target=ALONE, python_hint="install a whole Python 3.10 or newer there: apt-get install python3"),
    Patient(check="python", told={"python-says": "T version 3.8.10"}),
    Patient(check="python", told={"python-says": "T version 3.11.2\nT lacks ctypes: No module named '_ctypes'"}),
    Patient(check="python", told={**OF_ALONE, "python-says": "T version 3.11.2\nT without ensurepip"}, target=ALONE),
    Patient(check="workdir", told={"place workdir": "workdir d /workspace/specctl",
                                   "nearest-is": "drwxr-xr-x 5 0 0 4096 Nov 30 05:44 /workspace/specctl"}),
    Patient(check="workdir", told={
        "mount /workspace": "1869 1860 252:9 / /workspace ro,relatime - ext4 /dev/mapper/pve-vm--200--disk--1 ro"}),
    Patient(check="workdir", told={"place workdir": "workdir - /workspace", "nearest": "/workspace",
                                   "nearest-is": "-rw-r--r-- 1 0 0 5 Nov 30 05:44 /workspace"}),
    Patient(check="workdir", told={"blocks workdir": "workdir /dev/x 1048576000 1048575000 1000 100% /workspace"}),
    Patient(check="workdir", told={"inodes workdir": "workdir /dev/x 65536000 65536000 0 100% /workspace"}),
    Patient(check="workdir", told={
        "mount /workspace": "1869 1860 252:9 / /workspace rw,noexec - ext4 /dev/mapper/pve-vm--200--disk--1 rw"}),
    Patient(check="workdir", told={"mount /workspace": "1869 1860 0:9 / /workspace rw - tmpfs disk rw"}),
    Patient(check="workdir", told={"mount /workspace": "1869 1860 0:9 / /workspace rw - nfs4 nas:/export rw"}),
    Patient(check="disk", told={"blocks workdir": "workdir /dev/x 1048576000 1047576000 1000000 99% /workspace"}),
    Patient(check="disk", told={"inodes workdir": "workdir /dev/x 65536000 65535000 1000 99% /workspace"}),
    Patient(check="tmp", told={"place tmp": "tmp d /tmp"}),
    Patient(check="tmp", told={"mount / /": "1860 1783 252:7 / / rw - ext4 /dev/x rw\n"
                               "1870 1860 0:40 / /tmp rw,noexec - tmpfs tmpfs rw"}),
    Patient(check="tmp", told={"blocks tmp": "tmp /dev/x 65536000 65500000 36000 100% /"}),
    # --- what it leaves a run
    Patient(check="memory", told={"cgroup /sys/fs/cgroup/ memory.max": "/sys/fs/cgroup/ memory.max 1073741824"}),
    Patient(check="memory", told={"meminfo MemAvailable": "MemAvailable:   201000 kB"}),
    Patient(check="shm", told={"place shm": None}),
    Patient(check="shm", told={"blocks shm": "shm tmpfs 65536 0 65536 0% /dev/shm"}),
    Patient(check="shm", told={"blocks shm": "shm tmpfs 33554432 33000000 554432 99% /dev/shm"}),
    Patient(check="limits", told={"limits Max open": "Max open files            256            256           files"}),
    Patient(check="limits", told={"limits Max proc": "Max processes             512            512            procs"}),
    Patient(check="limits", told={"limits Max lock": "Max locked memory         16384          16384         bytes"}),
    Patient(check="limits", told={"limits Max cpu": "Max cpu time              3600           3600          seconds"}),
    Patient(check="limits", told={"limits Max file": "Max file size             1048576000     1048576000    bytes"}),
    Patient(check="limits", target=ALONE, told={**OF_ALONE,
            "limits Max addr": "Max address space         34359738368    34359738368   bytes"}),
    Patient(check="processes", told={"cgroup /sys/fs/cgroup/ pids.max": "/sys/fs/cgroup/ pids.max 300"}),
    Patient(check="clock", clock_s=(3599.4, 3600.1)),
    # --- GPUs
    Patient(check="devices", told={"device nvidia-uvm": None, "opens /dev/nvidia-uvm": None}),
    Patient(check="devices", told={"device nvidia-uvm": None, "opens /dev/nvidia-uvm": None},
            node={"device nvidia-uvm": None, "conf dev3": None}),
    Patient(check="devices", told={"device nvidia-uvm": None, "opens /dev/nvidia-uvm": None},
            node={"version pve-container": "pve-container 4.4-7", "conf dev3": None}),
    Patient(check="devices", told={
        "device": "crw-rw---- 1 nobody nogroup 195,   0 Nov 30 03:10 /dev/nvidia0\n"
        "crw-rw---- 1 nobody nogroup 195,   1 Nov 30 03:10 /dev/nvidia1\n"
        "crw-rw-rw- 1 root root 195, 255 Nov 30 03:10 /dev/nvidiactl\n"
        "crw-rw-rw- 1 root root 511,   0 Nov 30 03:10 /dev/nvidia-uvm",
        "opens /dev/nvidia0": "/dev/nvidia0 Permission denied",
        "opens /dev/nvidia1": "/dev/nvidia1 Permission denied"}),
    Patient(check="devices", told={
        "device nvidia0": "crw-rw---- 1 root gpu 195,   0 Nov 30 03:10 /dev/nvidia0",
        "opens /dev/nvidia0": "/dev/nvidia0 Permission denied"}),
    Patient(check="devices", told={"opens /dev/nvidia-uvm": "/dev/nvidia-uvm Operation not permitted"}),
    Patient(check="devices", told={"device nvidia1": "-rw-r--r-- 1 root root 0 Nov 30 03:10 /dev/nvidia1",
                                   "opens /dev/nvidia1": None}),
    Patient(check="devices", told={"opens /dev/nvidia0": "/dev/nvidia0 Input/output error"}),
    Patient(check="driver", told={"smi": "Failed to initialize NVML: Unknown Error", "smi-code": "255"}),
    Patient(check="driver", told={
        "smi": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.195",
        "smi-code": "18"}),
    Patient(check="driver", told={
        "smi": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.195",
        "smi-code": "18"},
        node={"smi": "Failed to initialize NVML: Driver/library version mismatch", "smi-code": "18"}),
    Patient(check="driver", told={"smi": "Failed to initialize NVML: Driver Not Loaded", "smi-code": "9"},
            node={"smi": None, "smi-code": None}),
    Patient(check="driver", told={
        "smi": "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", "smi-code": "12"}),
    Patient(check="driver", told={
        "smi": "Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.", "smi-code": "15"},
        node={"smi": "Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.", "smi-code": "15"}),
    Patient(check="driver", told={"smi": "", "smi-code": "137"}),
    Patient(check="driver", told={"smi": None, "smi-code": None, "program nvidia-smi": "nvidia-smi"}),
    Patient(check="driver", told={"smi": "0, NVIDIA H200, 0, 3, 143771"}),
    Patient(check="torch", told={"device nvidia-uvm": None, "opens /dev/nvidia-uvm": None,
                                 "torch": TORCH + ', "why": "CUDA unknown error"}'}),
    Patient(check="torch", told={"torch": TORCH + ', "why": "Error 999: unknown error"}'}),
    Patient(check="torch", told={"torch": TORCH + ', "warned": "The NVIDIA driver on your system is too old"}'}),
    Patient(check="torch", told={"torch": TORCH.replace('"12.8"', "null").replace("+cu128", "+cpu") + "}"}),
    Patient(check="torch", told={"torch": TORCH.replace('"count": 0', '"count": 1').replace("false", "true") + "}"}),
    Patient(check="torch", told={
        "torch": 'specctl-torch {"error": "OSError: libcudart.so.12: cannot open shared object file"}'}),
    Patient(check="torch", told={
        "torch": 'specctl-torch {"error": "ModuleNotFoundError: No module named \'torch\'", "absent": true}'}),
    Patient(check="torch", told={"torch": "", "torch-code": "137"}),
    Patient(check="compiler", told={"program gcc": "gcc", "program cc": "cc"}),
    Patient(check="compiler", told={
        "python-says": "T version 3.11.2\nT headerless /usr/include/python3.11/Python.h"}),
]  # fmt: skip
