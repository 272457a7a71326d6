"""What /proc says: which processes are a run's, whether one still lives, which boot this is.

A pid alone proves nothing (it repeats after a reboot, and a zombie keeps it): a process is a pid *and* its start time.
A process is a run's when its environment carries the run's mark, or when it descends from one that does, or from the
run's supervisor (which, as subreaper, inherits every orphan).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from orchestrator.model import Process

MARK_NAME = "SPECCTL_NONCE"


def mark(nonce: str) -> bytes:
    """The bytes that a run's processes carry in their environment."""
    return f"{MARK_NAME}={nonce}".encode()


def read(path: str) -> bytes:
    """The file's bytes, or none: processes vanish while one looks at them."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def stat(pid: int) -> tuple[Process, int] | None:
    """The process and its parent's pid; None when there is no such process."""
    raw = read(f"/proc/{pid}/stat")
    head, _, tail = raw.rpartition(b")")  # the name may hold spaces and parentheses
    fields = tail.split()
    if len(fields) < 20:
        return None
    name = head.partition(b"(")[2].decode("utf-8", "replace")
    process = Process(pid=pid, start_ticks=int(fields[19]), name=name, state=fields[0].decode("ascii"))
    return process, int(fields[1])


def same(pid: int, start_ticks: int) -> Process | None:
    """The process that had this pid and start time, if it still exists and is not a zombie."""
    found = stat(pid)
    if found is None or found[0].start_ticks != start_ticks or not found[0].alive:
        return None
    return found[0]


def boot_identity() -> str:
    """Differs after a restart of the container: boot_id is the node's, so PID 1's start time goes with it."""
    first = stat(1)
    boot_id = read("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()
    return f"{boot_id}:{first[0].start_ticks if first else 0}"


def is_marked(pid: int, nonce: str) -> bool:
    return mark(nonce) in read(f"/proc/{pid}/environ").split(b"\0")


def pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def trees(nonces: dict[str, int | None]) -> dict[str, list[Process]]:
    """The living processes of several runs, in one walk over /proc.

    `nonces` maps a run's nonce to its supervisor's pid (None: gone). The supervisor itself is not part of its run.
    """
    table: dict[int, tuple[Process, int]] = {}
    marks = {mark(nonce): nonce for nonce in nonces}
    owner: dict[int, str] = {}
    for pid in pids():
        found = stat(pid)
        if found is None or not found[0].alive:
            continue
        table[pid] = found
        for item in read(f"/proc/{pid}/environ").split(b"\0"):
            if item in marks:
                owner[pid] = marks[item]
                break
    marked = set(owner)
    supervisors = {pid: nonce for nonce, pid in nonces.items() if pid is not None}

    def find(pid: int) -> str | None:
        chain: list[int] = []
        result: str | None = None
        while pid in table and pid not in chain:
            if pid in owner:
                result = owner[pid]
                break
            if pid in supervisors:
                # Reached over its children: an orphan the supervisor inherited. Itself it belongs to no run.
                result = supervisors[pid] if chain else None
                break
            if table[pid][0].name.startswith("tmux: server"):
                break  # an unmarked tmux server below a run is another run's house (specctl called by a run)
            chain.append(pid)
            pid = table[pid][1]
        if result is not None:
            for step in chain:
                owner[step] = result
        return result

    result: dict[str, list[Process]] = {nonce: [] for nonce in nonces}
    for pid, (process, _) in sorted(table.items()):
        if pid not in supervisors and (nonce := find(pid)) is not None:
            result[nonce].append(
                Process(pid=pid, start_ticks=process.start_ticks, name=process.name, state=process.state,
                        marked=pid in marked)
            )  # fmt: skip
    return result


def tree(nonce: str, supervisor_pid: int | None) -> list[Process]:
    """The living processes of one run."""
    return trees({nonce: supervisor_pid})[nonce]


def descendants(root: int, nonce: str) -> list[Process]:
    """The living processes below `root`, by the kernel's own lists of children: cheap enough to ask often.

    Empty where the kernel keeps no such lists; `tree` is the thorough answer.
    """
    result: list[Process] = []
    waiting = [root]
    while waiting:
        parent = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            for word in read(f"/proc/{parent}/task/{thread}/children").split():
                found = stat(int(word))
                if found is None or not found[0].alive:
                    continue
                if found[0].name.startswith("tmux: server") and not is_marked(found[0].pid, nonce):
                    continue
                waiting.append(found[0].pid)
                result.append(found[0])
    return result


def open_paths(pid: int) -> Iterator[tuple[int, str]]:
    """(fd, path) of every file the process holds open."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            yield int(name), os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue


def gpu_devices(processes: list[Process]) -> list[str]:
    """/dev/nvidiaN that these processes hold open."""
    held = set()
    for process in processes:
        for _, path in open_paths(process.pid):
            if path.startswith("/dev/nvidia") and path[len("/dev/nvidia") :].isdigit():
                held.add(path)
    return sorted(held)


def oom_kills() -> int:
    """How many kills for memory this container's cgroup has counted; 0 where it cannot be seen."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        for line in read(path).decode("ascii", "replace").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
