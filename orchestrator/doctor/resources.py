"""Checks of what a machine, its cgroup and its limits leave a run: memory, /dev/shm, processes, files, time. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from orchestrator import ailments
from orchestrator.doctor.check import Check, Examined, Outcome, ok

CLOCK_S = 5.0
"""How far a clock may be off before it is worth a word."""
LITTLE_AVAILABLE_BYTES = 512 << 20


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
    if small := ailments.memory(whole):
        yield Outcome(status="warn", what=small.what, evidence=said, mend=raise_it)
    elif available < LITTLE_AVAILABLE_BYTES:
        yield Outcome(
            status="warn", what=f"only {_gib(available)} of memory are available at the moment", evidence=said,
            mend=examined.hands.inside("ps axo rss,pid,user,args | sort -rn | head"),
        )  # fmt: skip
    else:
        yield ok(said)


def shm(examined: Examined) -> Iterator[Outcome]:
    seen, place = examined.seen, examined.seen.place("shm")
    there, room = place is not None and place.is_directory, place.disk if place is not None else None
    trouble = ailments.shm(there=there, writable=place is not None and place.writable, disk=room)
    if trouble is None:
        yield ok(f"/dev/shm: {room.words}" if room else "/dev/shm is there")
        return
    command = {
        "small": "mount -o remount,size=8g /dev/shm", "full": "ls -laS /dev/shm", "closed": "chmod 1777 /dev/shm",
    }.get(trouble.kind, "mkdir -p /dev/shm && mount -t tmpfs -o mode=1777,size=8g tmpfs /dev/shm")  # fmt: skip
    evidence = room.words if room and there else f"test -d and test -w /dev/shm, as {seen.user}"
    yield Outcome(status="warn", what=trouble.what, evidence=evidence, mend=examined.hands.inside(command))


def limits(examined: Examined) -> Iterator[Outcome]:
    seen, text = examined.seen, examined.seen.text("limits")
    if not text:
        yield Outcome(status="unknown", what="/proc/self/limits tells nothing")
        return
    troubles = ailments.limits(text)
    for trouble in troubles:
        title = next(title for title, limit in ailments.LIMITS.items() if limit.name == trouble.kind)
        value = "1048576" if trouble.kind in ("nofile", "nproc") else "unlimited"
        yield Outcome(
            status="warn", what=trouble.what, evidence=f"/proc/self/limits: {title} {seen.limit(title)}",
            mend=_raise(examined, trouble.kind, value),
        )  # fmt: skip
    if not troubles:
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
    if few := ailments.processes(limit[0], used):
        vmid = examined.target.vmid
        mend = examined.hands.inside(f"echo max >{limit[1]}/pids.max")
        if vmid is not None:
            line = "lxc.cgroup2.pids.max: max"
            mend = examined.hands.on_node(f"sed -i '1i {line}' /etc/pve/lxc/{vmid}.conf && pct reboot {vmid}")
        yield Outcome(status="warn", what=few.what, evidence=said, mend=mend)
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
          look=memory, part="limits", launch=True),
    Check(name="shm", asks="/dev/shm is there, can be written, and is not small", look=shm, part="workdir",
          launch=True),
    Check(name="limits", asks="ulimits: files, processes, locked memory; and none on time, file size, addresses",
          look=limits, part="limits", launch=True),
    Check(name="processes", asks="how many processes and threads its cgroup allows", look=processes, part="limits",
          launch=True),
    Check(name="clock", asks="its clock agrees with this machine's, as far as the round trip lets one see", look=clock,
          part="who"),
]  # fmt: skip
