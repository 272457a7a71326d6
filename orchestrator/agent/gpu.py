"""GPUs as the run's user meets them: what nvidia-smi says, in plain words, and whether the device files open.

No CUDA program is run for it: importing torch takes seconds, and its environment may not exist yet. CUDA needs
`/dev/nvidiactl`, `/dev/nvidia-uvm` and a `/dev/nvidiaN` for each GPU, opened by the very user who will run, and that is
tried here; nvidia-smi does without `nvidia-uvm`, and root's success says nothing of another user's.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from typing import Any

from orchestrator.agent import proc, system
from orchestrator.agent.main import Refusal
from orchestrator.record import record

DEV = "/dev"
MODULE = "/proc/driver/nvidia/version"
ASK_S = 10
KEPT_S = 3.0
POLL_S = 0.2
COMMON = ("nvidiactl", "nvidia-uvm")
LOADS = {
    "nvidia-uvm": "on the node load it (nvidia-modprobe -c 0 -u, or modprobe nvidia-uvm), then pass /dev/nvidia-uvm on "
    "to the container and restart it",
}
PASS_ON = "pass it on to the container (a dev entry of its configuration on the node), and restart it"


@record
class Seen:
    """What nvidia-smi answered."""

    rows: list[dict[str, Any]]
    why: str | None = None
    """Why there is none to see."""
    hint: str | None = None
    program: bool = True
    """There is an nvidia-smi."""


def rows() -> tuple[list[dict[str, Any]], str | None]:
    """(one row a GPU, why there is none to see). A machine without nvidia-smi has no rows and no complaint."""
    seen = ask()
    return seen.rows, seen.why


def ask(*, module: str = MODULE) -> Seen:
    program = system.which("nvidia-smi")
    if program is None:
        return Seen(rows=[], program=False)
    import subprocess  # where there is no driver, a probe need not wait for it

    query = "index,name,utilization.gpu,memory.used,memory.total"
    try:
        done = subprocess.run(
            [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Seen(
            rows=[], why=f"nvidia-smi did not answer within {ASK_S} s: the driver hangs",
            hint="look at the node: dmesg | grep -i nvrm, and its own nvidia-smi",
        )  # fmt: skip
    except OSError as error:
        return Seen(rows=[], why=f"{program} cannot run: {error.strerror}", hint="install the driver's programs again")
    text = "\n".join(filter(None, (part.decode("utf-8", "replace").strip() for part in (done.stdout, done.stderr))))
    found = list(_parsed(done.stdout.decode("utf-8", "replace"))) if done.returncode == 0 else []
    if found:
        return Seen(rows=found)
    why, hint = explain(text, done.returncode, kernel_module(module))
    return Seen(rows=[], why=why, hint=hint)


def _parsed(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5:
            continue
        index, name, use, used, total = cells
        found.append({
            "index": _number(index), "name": name, "utilization_percent": _number(use),
            "memory_used_mib": _number(used), "memory_total_mib": _number(total),
        })  # fmt: skip
    return found


def _number(cell: str) -> int | None:
    """None for what the driver does not tell (`[N/A]`), which is not zero."""
    return int(cell) if cell.isdigit() else None


def kernel_module(path: str = MODULE) -> str | None:
    """The version of the node's driver, as the kernel says it."""
    match = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)\b", proc.read(path).decode("utf-8", "replace"))
    return match[1] if match else None


def explain(text: str, code: int, module: str | None) -> tuple[str, str]:
    """(what nvidia-smi's failure means, what to do)"""
    said = re.sub(r"\s+", " ", text)[:300]
    quoted = f"(nvidia-smi: {said})" if said else f"(nvidia-smi says nothing, exit code {code})"
    library = re.search(r"library version:?\s*([0-9.]+[0-9])", text)
    if "version mismatch" in text.lower():
        kernel = f"the node's kernel module is {module}" if module else "the kernel module's version cannot be read"
        other = f"the library here is {library[1]}" if library else "the library here is another version"
        return (
            f"driver/library version mismatch: {kernel}, {other}; nothing new can use the GPUs {quoted}",
            "install the library of the module's version, or, if the node was upgraded, reboot the node; runs that "
            "have their GPUs go on until then",
        )  # fmt: skip
    kinds = (
        ("NVML: Unknown Error", "the container has lost its access to the GPUs",
         "restart the container, if the node's own nvidia-smi works; its runs that still compute end by that"),
        ("Insufficient Permissions", "this user may not use the GPUs",
         "let the user open /dev/nvidia*: their mode on the node, or the mapping of ids"),
        ("communicate with the NVIDIA driver", "the NVIDIA driver cannot be reached from here",
         "look whether the node's own nvidia-smi works (is its module loaded?) and /dev/nvidiactl is passed on"),
        ("Driver Not Loaded", "the NVIDIA driver is not loaded on the node", "on the node: modprobe nvidia"),
        ("libnvidia-ml", "the driver's libraries are not installed here",
         f"install those of the node's version{f', {module}' if module else ''}, without the kernel module"),
        ("No devices were found", "nvidia-smi finds no GPU here", "look whether the node's own nvidia-smi finds them"),
        ("GPU is lost", "a GPU has fallen off the bus", "reboot the node; dmesg there says more (NVRM: Xid)"),
        ("Unable to determine the device handle", "a GPU does not answer the driver",
         "dmesg on the node says more (NVRM: Xid); it may need a reboot"),
    )  # fmt: skip
    for mark, what, hint in kinds:
        if mark.lower() in text.lower():
            return f"{what} {quoted}", hint
    return f"nvidia-smi fails {quoted}", "look whether the node's own nvidia-smi works"


def check(declared: list[int], cuda: int, *, dev: str = DEV, module: str = MODULE) -> list[str]:
    """What can be said of the GPUs a launch wants: those that are `declared`, or as many as its configuration names as
    `cuda` devices. Raises `Refusal` when CUDA cannot work for this user."""
    if not declared and not cuda:
        return []
    seen = ask(module=module)
    numbers = declared or _first(cuda, dev)
    problems = [] if os.path.exists(f"{dev}/dxg") else list(filter(None, (
        _problem(f"{dev}/{name}") for name in (*(f"nvidia{number}" for number in numbers), *COMMON)
    )))  # fmt: skip
    wanted = _wanted(declared, cuda)
    if seen.why is not None:
        more = f"; {problems[0][0]}" if problems else ""
        raise Refusal("preflight", f"{wanted}, and {seen.why}{more}", seen.hint)
    if problems:
        several = "s" if len(seen.rows) > 1 else ""
        listed = f"; nvidia-smi lists {len(seen.rows)} GPU{several}" if seen.rows else ""
        said = "; ".join(what for what, _ in problems)
        raise Refusal("preflight", f"{wanted}{listed}, but {said}", problems[0][1])
    known = {row["index"] for row in seen.rows}
    if absent := [number for number in numbers if seen.rows and number not in known]:
        raise Refusal(
            "preflight", f"{wanted}, and nvidia-smi knows no GPU {', '.join(map(str, absent))} "
            f"(it lists {', '.join(map(str, sorted(known)))})", "pass it on to the container, or change `gpus:`",
        )  # fmt: skip
    if not seen.program:
        return [f"GPU {', '.join(map(str, numbers))}: the device files open; no nvidia-smi is here to ask more"]
    return [_described(row) for row in seen.rows if row["index"] in numbers]


def _wanted(declared: list[int], cuda: int) -> str:
    if declared:
        return f"GPU {', '.join(map(str, declared))} is declared in `gpus:`"
    return f"the configuration asks for {cuda} CUDA device{'s' if cuda > 1 else ''}"


def _first(count: int, dev: str) -> list[int]:
    """As many as there are of the first `count` GPUs; if too few are there, the next ones are missing by name."""
    there = sorted(int(name[6:]) for name in os.listdir(dev) if re.fullmatch(r"nvidia[0-9]+", name))
    return (there + [number for number in range(64) if number not in there])[:count]


def _problem(path: str) -> tuple[str, str] | None:
    """Why this user cannot use a device file, and what to do."""
    name = os.path.basename(path)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return f"{path} is not there", LOADS.get(name, PASS_ON)
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}", PASS_ON
    if not stat.S_ISCHR(found.st_mode):
        return f"{path} is no device, but a file of that name", f"remove it, and {PASS_ON}"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        who = system.name_of(os.geteuid())
        owner, group = system.name_of(found.st_uid), system.group_of(found.st_gid)
        if error.errno == errno.EPERM:
            return (
                f"{path} may not be opened by anybody here: the container's device rules do not allow it",
                "restart the container: a reload of the node's service manager, or an update, can take the rules away",
            )
        if error.errno == errno.EACCES:
            mapped = " (nobody is an id that the container does not map)" if owner == "nobody" else ""
            return (
                f"{who} cannot open {path}: it belongs to {owner}:{group}, "
                f"mode {stat.S_IMODE(found.st_mode):04o}{mapped}",
                f"device permissions or id mapping: let {who} in by mode 0666 for the device on the node (its gid= or "
                "mode= in the container's dev entry), or in an unprivileged container by a mapping of its group",
            )
        return f"{path} cannot be opened: {error.strerror}", "look at the node: its own nvidia-smi, and dmesg"
    return None


def kept(devices: set[str], *, within_s: float = KEPT_S) -> list[str]:
    """What of the memory of these GPUs is still in use when nobody here has them open any more."""
    give_up_at = time.monotonic() + within_s
    while devices:
        full = [row for row in ask().rows if f"{DEV}/nvidia{row['index']}" in devices and _in_use(row)]
        said = [
            f"GPU {row['index']}: {row['memory_used_mib']:,} of {row['memory_total_mib']:,} MiB are still in use, and "
            "no process that can be seen there has it open"
            for row in full if not _holders(f"{DEV}/nvidia{row['index']}")
        ]  # fmt: skip
        if not said or time.monotonic() > give_up_at:
            return said
        time.sleep(POLL_S)  # a driver may take a moment to give back what a killed process had
    return []


def _in_use(row: dict[str, Any]) -> bool:
    used, total = row["memory_used_mib"], row["memory_total_mib"]
    return bool(used and total and used > total // 20)


def _described(row: dict[str, Any]) -> str:
    text = f"GPU {row['index']} {row['name']}"
    used, total = row["memory_used_mib"], row["memory_total_mib"]
    if used is not None and total is not None:
        text += f": {total - used:,} of {total:,} MiB free"
    holders = _holders(f"{DEV}/nvidia{row['index']}")
    if holders:
        text += f", open in {', '.join(holders[:3])}" + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")
    elif _in_use(row):
        text += ", and who uses the rest cannot be seen from here"
    return text


def _holders(path: str) -> list[str]:
    """The processes of this container that have a GPU open."""
    found = []
    for pid in proc.pids():
        if any(target == path for _, target in proc.open_paths(pid)) and (process := proc.stat(pid)):
            found.append(f"{process[0].name} (pid {pid})")
    return found
