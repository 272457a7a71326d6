"""What is amiss with a machine, in plain words, from facts that others have gathered.

The agent's preflight (`agent/place.py`, `agent/gpu.py`, `agent/tmux.py`) asks before a launch, and `doctor` when
somebody wants to know: both have the same facts judged here, so that they cannot disagree. Pure.
"""

from __future__ import annotations

import re

from orchestrator.model import Disk
from orchestrator.record import record

TMUX_OLDEST = (3, 2, "a")
"""What libtmux can drive."""
LOCALE = re.compile(r"UTF-8 locale|LC_CTYPE")
"""What tmux says when its locale is not UTF-8, or is not installed."""
SPARE_BYTES = 4 << 20
"""Room for the records of a run."""
LITTLE_SHM_BYTES, LITTLE_TMP_BYTES = 1 << 30, 256 << 20
LITTLE_MEMORY_BYTES = 2 << 30
SPARE_PIDS = 512
SMI_QUERY = "index,name,utilization.gpu,memory.used,memory.total"
UVM_MEND = (
    "on the node load it (nvidia-modprobe -c 0 -u, or modprobe nvidia-uvm), then pass /dev/nvidia-uvm on to the "
    "container and restart it"
)
PASS_ON = "pass it on to the container (a dev entry of its configuration on the node), and restart it"
COMMON_DEVICES = ("nvidiactl", "nvidia-uvm")
"""What CUDA opens beside a /dev/nvidiaN for each GPU; nvidia-smi does without nvidia-uvm."""


@record
class Ailment:
    """Something that keeps runs from working, and what to do about it."""

    kind: str
    """A word for programs."""
    what: str
    hint: str


# --- GPUs -----------------------------------------------------------------------------------------------------------


@record
class Gpu:
    """A row of nvidia-smi's; None is what the driver does not tell."""

    index: int | None
    name: str
    utilization_percent: int | None
    memory_used_mib: int | None
    memory_total_mib: int | None


def gpus(text: str) -> list[Gpu]:
    """The rows that nvidia-smi printed when it was asked for `SMI_QUERY`."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5:
            continue
        index, use, used, total = (int(cell) if cell.isdigit() else None for cell in (cells[0], *cells[2:]))
        found.append(
            Gpu(index=index, name=cells[1], utilization_percent=use, memory_used_mib=used, memory_total_mib=total)
        )
    return found


def kernel_module(text: str) -> str | None:
    """The version of the node's driver, as /proc/driver/nvidia/version has it."""
    match = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)\b", text)
    return match[1] if match else None


def nvidia_smi(text: str, code: int, module: str | None) -> Ailment:
    """What it means that nvidia-smi printed `text`, ended with `code` and listed no GPU."""
    said = re.sub(r"\s+", " ", text).strip()[:300]
    quoted = f"(nvidia-smi: {said})" if said else f"(nvidia-smi says nothing, exit code {code})"
    library = re.search(r"library version:?\s*([0-9.]+[0-9])", text)
    if "version mismatch" in text.lower():
        kernel = f"the node's kernel module is {module}" if module else "the kernel module's version cannot be read"
        other = f"the library here is {library[1]}" if library else "the library here is another version"
        return Ailment(
            kind="mismatch",
            what=f"driver/library version mismatch: {kernel}, {other}; nothing new can use the GPUs {quoted}",
            hint="install the library of the module's version, or, if the node was upgraded, reboot the node; runs "
            "that have their GPUs go on until then",
        )
    kinds = (
        ("lost", "NVML: Unknown Error", "the container has lost its access to the GPUs",
         "restart the container, if the node's own nvidia-smi works; its runs that still compute end by that"),
        ("permissions", "Insufficient Permissions", "this user may not use the GPUs",
         "let the user open /dev/nvidia*: their mode on the node, or the mapping of ids"),
        ("unreachable", "communicate with the NVIDIA driver", "the NVIDIA driver cannot be reached from here",
         "look whether the node's own nvidia-smi works (is its module loaded?) and /dev/nvidiactl is passed on"),
        ("unloaded", "Driver Not Loaded", "the NVIDIA driver is not loaded on the node",
         "on the node: modprobe nvidia"),
        ("libraries", "libnvidia-ml", "the driver's libraries are not installed here",
         f"install those of the node's version{f', {module}' if module else ''}, without the kernel module"),
        ("none", "No devices were found", "nvidia-smi finds no GPU here",
         "look whether the node's own nvidia-smi finds them"),
        ("fallen", "GPU is lost", "a GPU has fallen off the bus", "reboot the node; dmesg there says more (NVRM: Xid)"),
        ("fallen", "Unable to determine the device handle", "a GPU does not answer the driver",
         "dmesg on the node says more (NVRM: Xid); it may need a reboot"),
    )  # fmt: skip
    for kind, mark, what, hint in kinds:
        if mark.lower() in text.lower():
            return Ailment(kind=kind, what=f"{what} {quoted}", hint=hint)
    return Ailment(
        kind="fails", what=f"nvidia-smi fails {quoted}", hint="look whether the node's own nvidia-smi works"
    )


def nvidia_smi_hangs(limit_s: float) -> Ailment:
    return Ailment(
        kind="hangs", what=f"nvidia-smi did not answer within {limit_s:g} s: the driver hangs",
        hint="look at the node: dmesg | grep -i nvrm, and its own nvidia-smi",
    )  # fmt: skip


@record
class Device:
    """A device file as one user met it."""

    path: str
    there: bool = True
    character: bool = True
    """A device, and no file of that name."""
    owner: str = ""
    group: str = ""
    mode: int = 0
    refusal: str | None = None
    """The system's words for why it did not open."""


def device(seen: Device, who: str, groups: list[str]) -> Ailment | None:
    """Why `who`, a member of `groups`, cannot use it."""
    path = seen.path
    if not seen.there:
        uvm = path.endswith("/nvidia-uvm")
        return Ailment(kind="missing", what=f"{path} is not there", hint=UVM_MEND if uvm else PASS_ON)
    if not seen.character:
        what = f"{path} is no device, but a file of that name"
        return Ailment(kind="file", what=what, hint=f"remove it, and {PASS_ON}")
    if seen.refusal is None:
        return None
    if "not permitted" in seen.refusal:
        return Ailment(
            kind="rules",
            what=f"{path} may not be opened by anybody here: the container's device rules do not allow it",
            hint="restart the container: a reload of the node's service manager, or an update, can take the rules away",
        )
    if "ermission denied" not in seen.refusal:
        return Ailment(
            kind="closed", what=f"{path} cannot be opened: {seen.refusal}",
            hint="look at the node: its own nvidia-smi, and dmesg",
        )  # fmt: skip
    mapped = " (nobody is an id that the container does not map)" if seen.owner == "nobody" else ""
    what = f"{who} cannot open {path}: it belongs to {seen.owner}:{seen.group}, mode {seen.mode:04o}{mapped}"
    if _lets_its_group_in(seen, groups):
        hint = f"device permissions: as root there, usermod -aG {seen.group} {who}"
        return Ailment(kind="group", what=what, hint=hint)
    return Ailment(
        kind="mode", what=what,
        hint=f"device permissions or id mapping: let {who} in by mode 0666 for the device on the node (its gid= or "
        "mode= in the container's dev entry), or in an unprivileged container by a mapping of its group",
    )  # fmt: skip


def _lets_its_group_in(seen: Device, groups: list[str]) -> bool:
    """Whether membership in the file's group would do, and is to be had."""
    named = bool(re.fullmatch(r"[a-z_][a-z0-9_-]*", seen.group)) and seen.group not in ("root", "nogroup", "nobody")
    return named and seen.mode & 0o060 == 0o060 and seen.group not in groups


def unknown_gpus(declared: list[int], listed: list[int | None]) -> Ailment | None:
    """Which of the declared ones nvidia-smi does not list, if it lists any."""
    known = {index for index in listed if index is not None}
    absent = [number for number in declared if listed and number not in known]
    if not absent:
        return None
    return Ailment(
        kind="unknown",
        what=f"nvidia-smi knows no GPU {', '.join(map(str, absent))} (it lists {', '.join(map(str, sorted(known)))})",
        hint="pass it on to the container, or change `gpus:`",
    )


# --- tmux -----------------------------------------------------------------------------------------------------------


@record
class Tmux:
    """What one tmux said to -V; one that does not start says why."""

    program: str
    said: str
    starts: bool


def tmux(found: list[Tmux], searched: str) -> Tmux | Ailment:
    """The first that can be used; else what there is instead of one. `searched` are the folders, as in PATH."""
    problems = []
    for one in found:
        number = re.search(r"(\d+)\.(\d+)([a-z]?)", one.said) if one.starts else None
        if not one.starts:
            problems.append(f"{one.program} does not start: {one.said}")
        elif number and (int(number[1]), int(number[2]), number[3]) < TMUX_OLDEST:
            problems.append(f"{one.program} is {one.said}, and 3.2a or newer is needed")
        else:
            return one
    if not problems:
        what = f"tmux not found (searched {searched})"
        return Ailment(kind="missing", what=what, hint="install it there: apt-get install tmux")
    what = "no tmux works there: " + "; ".join(problems)
    if any(map(LOCALE.search, problems)):
        hint = "give it a UTF-8 locale: apt-get install libc-bin, or locale-gen en_US.UTF-8"
        return Ailment(kind="locale", what=what, hint=hint)
    hint = "install a newer one there: in /usr/local/bin, or with conda install -c conda-forge tmux"
    return Ailment(kind="unfit", what=what, hint=hint)


# --- what a machine leaves a run ------------------------------------------------------------------------------------


@record
class Limit:
    """A limit that a process has."""

    name: str
    """As `ulimit` and limits.conf know it."""
    least: int | None
    """The least that is not worth a word; None: there should be none at all."""
    consequence: str


LIMITS = {
    "Max open files": Limit(
        name="nofile", least=1024, consequence="data loaders and many checkpoint files run into `Too many open files`"
    ),
    "Max processes": Limit(
        name="nproc", least=2048, consequence="threads count, and a training has hundreds: `can't start new thread`"
    ),
    "Max locked memory": Limit(
        name="memlock", least=64 << 10, consequence="memory cannot be pinned for InfiniBand or GPUDirect"
    ),
    "Max cpu time": Limit(
        name="cpu", least=None, consequence="a run is killed after so many seconds of computing"
    ),
    "Max file size": Limit(
        name="fsize", least=None, consequence="a run is killed when its log or a checkpoint grows beyond it"
    ),
    "Max address space": Limit(
        name="as", least=None, consequence="CUDA does not start, which reserves far more than it uses"
    ),
}  # fmt: skip
"""By their names in /proc/PID/limits."""


def soft_limit(text: str, title: str) -> int | None:
    """A soft limit of a /proc/PID/limits; None: unlimited, or not told."""
    match = re.search(rf"^{re.escape(title)}\s+(\d+|unlimited)\s", text, re.MULTILINE)
    return int(match[1]) if match and match[1] != "unlimited" else None


def limits(text: str) -> list[Ailment]:
    """The limits of a /proc/PID/limits that a training runs into; the `kind` of each is the limit's name."""
    found = []
    for title, limit in LIMITS.items():
        value = soft_limit(text, title)
        if value is not None and (limit.least is None or value < limit.least):
            what = f"the limit of {title.removeprefix('Max ')} is {value:,}: {limit.consequence}"
            hint = f"raise it: lxc.prlimit.{limit.name} of the container, or {limit.name} in /etc/security/limits.d"
            found.append(Ailment(kind=limit.name, what=what, hint=hint))
    return found


def shm(*, there: bool, writable: bool, disk: Disk | None) -> Ailment | None:
    """Why data loaders that hand over batches in shared memory do not get far."""
    why = "data loaders hand over batches through it"
    if not there:
        return Ailment(kind="missing", what=f"/dev/shm is not there: {why}", hint="mount a tmpfs there")
    if not writable:
        return Ailment(kind="closed", what=f"/dev/shm cannot be written: {why}", hint="chmod 1777 /dev/shm")
    killed = "data loaders that share memory are killed by bus errors"
    if disk is not None and disk.total_bytes < LITTLE_SHM_BYTES:
        return Ailment(
            kind="small", what=f"/dev/shm is small: {killed}", hint="as root there: mount -o remount,size=8g /dev/shm"
        )
    if disk is not None and disk.free_bytes < LITTLE_SHM_BYTES:
        return Ailment(kind="full", what=f"/dev/shm is nearly full: {killed}", hint="look what fills it there")
    return None


NO_GREP = Ailment(kind="grep", what="grep not found: logs cannot be searched", hint="install it there")


def memory(allowed_bytes: int) -> Ailment | None:
    """What the machine has, or its cgroup allows, if that is less."""
    if allowed_bytes >= LITTLE_MEMORY_BYTES:
        return None
    what = f"only {allowed_bytes / 2**30:.1f} GiB of memory are allowed there: a run that needs more is killed"
    return Ailment(kind="small", what=what, hint="give the machine more, or the container: pct set VMID -memory MIB")


def processes(limit: int, used: int) -> Ailment | None:
    """Of a cgroup's pids."""
    if limit - used >= SPARE_PIDS:
        return None
    what = f"only {max(0, limit - used):,} more processes and threads are allowed there"
    return Ailment(kind="pids", what=what, hint="raise pids.max: lxc.cgroup2.pids.max of the container")


def tmp(path: str, *, user: str, usable: bool, mount: Mount, disk: Disk | None) -> Ailment | None:
    """Why programs fail that take a folder for temporary files for granted; `usable`: a directory that can be
    written."""
    if not usable:
        what = f"{user} cannot write in {path}, which programs take for granted"
        return Ailment(kind="closed", what=what, hint=f"as root there: mkdir -p {path} && chmod 1777 {path}")
    if "noexec" in mount.options:
        what = f"{path} runs no programs: what torch compiles there cannot be loaded"
        hint = "name a folder of a disk: env: {TMPDIR: ...} of the target in hosts.yaml"
        return Ailment(kind="noexec", what=what, hint=hint)
    if disk is not None and disk.free_bytes < LITTLE_TMP_BYTES:
        return Ailment(kind="full", what=f"little room is left in {path}", hint="look what fills it there")
    return None


# --- disks ----------------------------------------------------------------------------------------------------------


def lacks_room(disk: Disk | None, wanted_bytes: int) -> str | None:
    """What a disk has too little of for so many bytes and a run's records."""
    if disk is None:
        return None
    if disk.free_bytes < wanted_bytes + SPARE_BYTES:
        return f"has too little room for {(wanted_bytes + SPARE_BYTES) / (1 << 20):.1f} MiB: {disk.words}"
    return f"has no room: {disk.words}" if disk.free_inodes == 0 else None


def unusable_folder(
    nearest: str, *, user: str, is_directory: bool, writable: bool, disk: Disk | None
) -> str | None:
    """Why nothing can be made in a workdir of which `nearest` is what exists."""
    if disk is not None and disk.read_only:
        return disk.words
    if not is_directory:
        return f"{nearest} is not a directory"
    if not writable:
        return f"{user} cannot write in {nearest}"
    lacks = lacks_room(disk, 0)
    return f"it {lacks}" if lacks else None


@record
class Mount:
    at: str
    kind: str
    """ext4, tmpfs, nfs4 ..."""
    options: set[str]

    @property
    def read_only(self) -> bool:
        """`emergency_ro`: an error has made it so, and statvfs does not know."""
        return not {"ro", "emergency_ro"}.isdisjoint(self.options)


def runs_no_programs(mount: Mount, workdir: str) -> Ailment | None:
    if "noexec" not in mount.options:
        return None
    what = f"{mount.at}, where the workdir {workdir} lies, is mounted noexec: environments there load no libraries"
    hint = "choose a `workdir:` that may hold programs, or a ready `python:`, in hosts.yaml"
    return Ailment(kind="noexec", what=what, hint=hint)


def mount_of(mountinfo: str, path: str) -> Mount:
    """Where the file system of `path` (real and absolute) is mounted, and how; of mounts over each other, the last."""
    found = Mount(at="/", kind="", options=set())
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) < 10:
            continue
        at = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if len(at) >= len(found.at) and (path == at or path.startswith(at.rstrip("/") + "/")):
            kind = fields[fields.index("-", 6) + 1] if "-" in fields[6:-1] else ""
            found = Mount(at=at, kind=kind, options={*fields[5].split(","), *fields[-1].split(",")})
    return found
