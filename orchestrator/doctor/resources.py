"""Checks of what a machine, its cgroup and its limits leave a run: memory, /dev/shm, processes, files, time. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from orchestrator.doctor.check import Check, Examined, Outcome, ok

CLOCK_S = 5.0
"""How far a clock may be off before it is worth a word."""
LITTLE_MEMORY_BYTES, LITTLE_AVAILABLE_BYTES, LITTLE_SHM_BYTES = 2 << 30, 512 << 20, 1 << 30
SPARE_PIDS = 512
LOW = {
    "Max open files": ("nofile", 1024, "data loaders and many checkpoint files run into `Too many open files`"),
    "Max processes": ("nproc", 2048, "threads count, and a training has hundreds: `can't start new thread`"),
    "Max locked memory": ("memlock", 64 << 10, "memory cannot be pinned for InfiniBand or GPUDirect"),
}
"""Limit -> (its name for ulimit, the least that is not worth a word, what it leads to)."""
BINDING = {
    "Max cpu time": ("cpu", "a run is killed after so many seconds of computing"),
    "Max file size": ("fsize", "a run is killed when its log or a checkpoint grows beyond it"),
    "Max address space": ("as", "CUDA does not start, which reserves far more than it uses"),
}
"""Limits that should not be there at all."""


def memory(examined: Examined) -> Iterator[Outcome]:
    seen, target = examined.seen, examined.target
    total, available = seen.memory_bytes("MemTotal"), seen.memory_bytes("MemAvailable")
    if total is None or available is None:
        yield Outcome(status="unknown", what="/proc/meminfo tells nothing of memory")
        return
    limit = seen.cgroup("memory.max", "memory.limit_in_bytes")
    said = f"/proc/meminfo: {_gib(available)} of {_gib(total)} available"
    whole = total
    if limit is not None and limit[0] < total:
        used = seen.in_cgroup(limit[1], "memory.current", "memory.usage_in_bytes")
        whole = limit[0]
        said += f"; {limit[1]} allows {_gib(whole)}" + (f", {_gib(used)} of it in use with its caches" if used else "")
    raise_it = "give the machine more"
    if target.vmid is not None:
        raise_it = examined.hands.on_node(f"pct set {target.vmid} -memory 16384")
    if whole < LITTLE_MEMORY_BYTES:
        yield Outcome(
            status="warn", what=f"only {_gib(whole)} of memory are allowed there: a run that needs more is killed",
            evidence=said, mend=raise_it,
        )  # fmt: skip
    elif available < LITTLE_AVAILABLE_BYTES:
        yield Outcome(
            status="warn", what=f"only {_gib(available)} of memory are available at the moment", evidence=said,
            mend=examined.hands.inside("ps axo rss,pid,user,args | sort -rn | head"),
        )  # fmt: skip
    else:
        yield ok(said)


def shm(examined: Examined) -> Iterator[Outcome]:
    seen, place = examined.seen, examined.seen.place("shm")
    mend = examined.hands.inside("mkdir -p /dev/shm && mount -t tmpfs -o mode=1777,size=8g tmpfs /dev/shm")
    if place is None or not place.is_directory or not place.writable:
        what = "is not there" if place is None or not place.is_directory else f"cannot be written by {seen.user}"
        yield Outcome(
            status="warn", what=f"/dev/shm {what}: data loaders hand over batches through it",
            evidence="test -d, -w /dev/shm", mend=mend,
        )  # fmt: skip
        return
    room = place.disk
    if room is not None and min(room.total_bytes, room.free_bytes) < LITTLE_SHM_BYTES:
        small = room.total_bytes < LITTLE_SHM_BYTES
        yield Outcome(
            status="warn", what="/dev/shm is small: data loaders that share memory are killed by bus errors"
            if small else "/dev/shm is nearly full: data loaders that share memory are killed by bus errors",
            evidence=room.words,
            mend=examined.hands.inside("mount -o remount,size=8g /dev/shm" if small else "ls -laS /dev/shm"),
        )  # fmt: skip
        return
    yield ok(f"/dev/shm: {room.words}" if room else "/dev/shm is there")


def limits(examined: Examined) -> Iterator[Outcome]:
    seen, fine = examined.seen, True
    if not seen.all("limits"):
        yield Outcome(status="unknown", what="/proc/self/limits tells nothing")
        return
    for title, (name, least, consequence) in LOW.items():
        value = seen.limit(title)
        if value is not None and value < least:
            fine = False
            yield Outcome(
                status="warn", what=f"the limit of {title.lower().removeprefix('max ')} is {value:,}: {consequence}",
                evidence=f"/proc/self/limits: {title} {value}",
                mend=_raise(examined, name, "unlimited" if name == "memlock" else "1048576"),
            )  # fmt: skip
    for title, (name, consequence) in BINDING.items():
        value = seen.limit(title)
        if value is not None:
            fine = False
            yield Outcome(
                status="warn",
                what=f"there is a limit of {title.lower().removeprefix('max ')}, {value:,}: {consequence}",
                evidence=f"/proc/self/limits: {title} {value}", mend=_raise(examined, name, "unlimited"),
            )  # fmt: skip
    if fine:
        files, processes = seen.limit("Max open files"), seen.limit("Max processes")
        yield ok(f"open files {files or 'unlimited'}, processes {processes or 'unlimited'}")


def _raise(examined: Examined, name: str, value: str) -> str:
    """Where the limit comes from: the container's configuration, or the login's."""
    vmid = examined.target.vmid
    if vmid is not None:
        # At the top: what stands at the end of that file may belong to a snapshot.
        line = f"lxc.prlimit.{name}: {value}"
        return examined.hands.on_node(f"sed -i '1i {line}' /etc/pve/lxc/{vmid}.conf && pct reboot {vmid}")
    rows = f"{examined.seen.user} - {name} {value}"
    return examined.hands.inside(f"echo {shlex.quote(rows)} >/etc/security/limits.d/specctl-{name}.conf")


def processes(examined: Examined) -> Iterator[Outcome]:
    seen, limit = examined.seen, examined.seen.cgroup("pids.max")
    if limit is None:
        yield ok("its cgroup does not limit how many processes and threads there are")
        return
    used = seen.in_cgroup(limit[1], "pids.current") or 0
    said = f"{limit[1]}: pids.max {limit[0]}, pids.current {used}"
    if limit[0] - used < SPARE_PIDS:
        vmid = examined.target.vmid
        mend = examined.hands.inside(f"echo max >{limit[1]}/pids.max")
        if vmid is not None:
            line = "lxc.cgroup2.pids.max: max"
            mend = examined.hands.on_node(f"sed -i '1i {line}' /etc/pve/lxc/{vmid}.conf && pct reboot {vmid}")
        yield Outcome(
            status="warn", what=f"only {max(0, limit[0] - used):,} more processes and threads are allowed there",
            evidence=said, mend=mend,
        )  # fmt: skip
        return
    yield ok(said)


def clock(examined: Examined) -> Iterator[Outcome]:
    if examined.clock_s is None:
        yield Outcome(status="unknown", what="it did not tell the time")
        return
    least, most = examined.clock_s
    offset_s, within_s = (least + most) / 2, (most - least) / 2
    if least <= CLOCK_S and most >= -CLOCK_S:
        yield ok(f"{offset_s:+.1f} s, within {within_s:.1f} s: no more than a look takes")
        return
    ahead = "ahead of" if offset_s > 0 else "behind"
    mend = examined.hands.on_node("timedatectl set-ntp true")
    yield Outcome(
        status="warn",
        what=f"its clock is {abs(offset_s):,.0f} s {ahead} this machine's: the times of its runs are its own",
        evidence=f"seen to within {within_s:.1f} s, half of what the look took", mend=mend,
    )  # fmt: skip


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


CHECKS = [
    Check(name="memory", asks="memory that is allowed, by the machine and by its cgroup, and available now",
          look=memory, part="limits"),
    Check(name="shm", asks="/dev/shm is there, can be written, and is not small", look=shm, part="workdir"),
    Check(name="limits", asks="ulimits: files, processes, locked memory; and none on time, file size, addresses",
          look=limits, part="limits"),
    Check(name="processes", asks="how many processes and threads its cgroup allows", look=processes, part="limits"),
    Check(name="clock", asks="its clock agrees with this machine's, as far as the round trip lets one see", look=clock,
          part="who"),
]  # fmt: skip
