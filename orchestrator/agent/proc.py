"""What /proc says: which processes are a run's, whether one still lives, which boot this is.

A pid alone proves nothing (it repeats after a reboot, and a zombie keeps it): a process is a pid *and* its start time.
A process is a run's when its environment carries the run's mark, or when it descends from one that does, or from the
run's supervisor (which, as subreaper, inherits every orphan), or when nothing else is said of it and it is in the run's
cgroup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from orchestrator.agent import cgroup
from orchestrator.model import Process, SupervisorRecord, is_run_id
from orchestrator.record import record

MARK_NAME = "SPECCTL_NONCE"
RUN_NAME = "SPECCTL_RUN_ID"


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


def marked_with(pid: int) -> str | None:
    """The nonce of the run whose mark the process carries; None without one, or where it cannot be read."""
    return _variable(pid, MARK_NAME)


def run_of(pid: int) -> str | None:
    """The id of the run whose mark the process carries."""
    return _variable(pid, RUN_NAME)


def _variable(pid: int, name: str) -> str | None:
    start = f"{name}=".encode()
    for item in read(f"/proc/{pid}/environ").split(b"\0"):
        if item.startswith(start):
            return item[len(start) :].decode("ascii", "replace")
    return None


def marked_runs(runs: str) -> dict[str, str]:
    """Run id -> nonce of every run in the directory `runs` whose mark some living process carries.

    What a run directory says is not needed for it: it may be damaged, or gone.
    """
    found = {}
    start = f"SPECCTL_RUN_DIR={runs}/".encode()
    for pid in pids():
        environ = read(f"/proc/{pid}/environ")  # empty for a zombie
        if start not in environ:
            continue
        items = dict(item.partition(b"=")[::2] for item in environ.split(b"\0"))
        run_id, nonce = (items.get(name.encode(), b"").decode("ascii", "replace") for name in (RUN_NAME, MARK_NAME))
        if nonce and items.get(b"SPECCTL_RUN_DIR") == f"{runs}/{run_id}".encode() and is_run_id(run_id):
            found[run_id] = nonce
    return found


def pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


@record
class Roots:
    """By what a run's processes are known, beside the mark. All of it may be gone or missing."""

    supervisor: int | None = None
    """Pid of the living supervisor."""
    program: tuple[int, int] | None = None
    """(pid, start time) of the spawned program: it may have emptied its environment, or overwritten it."""
    log: tuple[int, int] | None = None
    """(device, inode) of the run's log: whoever has it as stdout or stderr got it from the run."""
    cgroup: str | None = None


def roots_of(record: SupervisorRecord | None) -> Roots:
    """What a supervisor's record says of where its run's processes hang; nothing once the container has restarted,
    since pids and the numbers of files are given anew then."""
    if record is None or record.boot != boot_identity():
        return Roots()
    program = None
    if record.program_pid is not None and record.program_start_ticks is not None:
        program = (record.program_pid, record.program_start_ticks)
    alive = same(record.pid, record.start_ticks) is not None
    return Roots(
        supervisor=record.pid if alive else None, program=program, log=(record.log_device, record.log_inode),
        cgroup=record.cgroup,
    )


def trees(runs: dict[str, Roots]) -> dict[str, list[Process]]:
    """The living processes of several runs (by nonce), in one walk over /proc. No supervisor is part of its run.

    A process is a run's by its mark, by being the recorded program, by having the run's log as its output, or by
    descent. Another run's mark ends the line: a run may launch runs, and they are not its own. Last, and only of what
    has no such line, the run's cgroup tells.
    """
    table: dict[int, tuple[Process, int]] = {}
    owner: dict[int, str | None] = {}
    marked = set()
    supervisors = {roots.supervisor: nonce for nonce, roots in runs.items() if roots.supervisor is not None}
    programs = {roots.program: nonce for nonce, roots in runs.items() if roots.program is not None}
    logs = {roots.log: nonce for nonce, roots in runs.items() if roots.log is not None}
    for pid in pids():
        found = stat(pid)
        if found is None or not found[0].alive:
            continue
        table[pid] = found
        if pid in supervisors:
            continue
        if (nonce := marked_with(pid)) is not None:
            owner[pid] = nonce if nonce in runs else None
            marked.add(pid)
        elif (key := (pid, found[0].start_ticks)) in programs:
            owner[pid] = programs[key]
        elif logs and (output := next((logs[file] for file in outputs(pid) if file in logs), None)):
            owner[pid] = output

    def find(pid: int) -> str | None:
        """Whose descendant it is, by the nearest ancestor that says so."""
        chain: list[int] = []
        result: str | None = None
        while pid in table and pid not in chain:
            if pid in supervisors:
                # Reached over its children: an orphan the supervisor inherited. Itself it belongs to no run.
                result = supervisors[pid] if chain else None
                break
            if pid in owner:
                result = owner[pid]
                break
            if table[pid][0].name.startswith("tmux: server"):
                break  # an unmarked tmux server below a run is another run's house (specctl called by a run)
            chain.append(pid)
            pid = table[pid][1]
        for step in chain:
            owner[step] = result
        return result

    def has_line(pid: int) -> bool:
        """Whether the process or an ancestor says whose it is, or is another run's house."""
        for _ in range(len(table)):
            if pid not in table:
                return False
            if pid in owner or pid in supervisors or table[pid][0].name.startswith("tmux: server"):
                return True
            pid = table[pid][1]
        return True

    for nonce, roots in runs.items():
        for pid in list(cgroup.members(roots.cgroup)) if roots.cgroup else []:
            if pid in table and not has_line(pid):
                owner[pid] = nonce
    result: dict[str, list[Process]] = {nonce: [] for nonce in runs}
    for pid, (process, _) in sorted(table.items()):
        if (nonce := find(pid)) is not None:
            result[nonce].append(
                Process(pid=pid, start_ticks=process.start_ticks, name=process.name, state=process.state,
                        marked=pid in marked)
            )  # fmt: skip
    return result


def tree(nonce: str, roots: Roots) -> list[Process]:
    """The living processes of one run."""
    return trees({nonce: roots})[nonce]


def outputs(pid: int) -> Iterator[tuple[int, int]]:
    """(device, inode) of what the process has as stdout and stderr."""
    for fd in (1, 2):
        try:
            found = os.stat(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        yield found.st_dev, found.st_ino


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
                if found[0].name.startswith("tmux: server") and marked_with(found[0].pid) != nonce:
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
