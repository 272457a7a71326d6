"""GPUs as the run's user meets them: what nvidia-smi says, in plain words, and whether the device files open.

No CUDA program is run for it: importing torch takes seconds, and its environment may not exist yet. CUDA needs
`/dev/nvidiactl`, `/dev/nvidia-uvm` and a `/dev/nvidiaN` for each GPU, opened by the very user who will run, and that is
tried here; nvidia-smi does without `nvidia-uvm`, and root's success says nothing of another user's.
"""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import asdict
from typing import Any

from orchestrator import ailments
from orchestrator.agent import proc, system
from orchestrator.agent.main import Refusal
from orchestrator.ailments import COMMON_DEVICES, SMI_QUERY, Device
from orchestrator.model import Process
from orchestrator.record import record

DEV = "/dev"
MODULE = "/proc/driver/nvidia/version"
ASK_S = 10
KEPT_S = 3.0
POLL_S = 0.2


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

    try:
        done = subprocess.run(
            [program, f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        hung = ailments.nvidia_smi_hangs(ASK_S)
        return Seen(rows=[], why=hung.what, hint=hung.hint)
    except OSError as error:
        return Seen(rows=[], why=f"{program} cannot run: {error.strerror}", hint="install the driver's programs again")
    text = "\n".join(filter(None, (part.decode("utf-8", "replace").strip() for part in (done.stdout, done.stderr))))
    found = ailments.gpus(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else []
    if found:
        return Seen(rows=[asdict(row) for row in found])
    failure = ailments.nvidia_smi(text, done.returncode, kernel_module(module))
    return Seen(rows=[], why=failure.what, hint=failure.hint)


def kernel_module(path: str = MODULE) -> str | None:
    return ailments.kernel_module(proc.read(path).decode("utf-8", "replace"))


def check(
    declared: list[int], cuda: int, *, asked: bool = False, dev: str = DEV, module: str = MODULE
) -> list[str]:
    """What can be said of the GPUs a launch wants: those that are `declared`, or as many as its configuration names as
    `cuda` devices; `asked`: whoever launches has named them. Raises `Refusal` when CUDA cannot work for this user."""
    if not declared and not cuda:
        return []
    seen = ask(module=module)
    numbers = declared or _first(cuda, [row["index"] for row in seen.rows] or _minors(dev))
    paths = [*(file_of(number, seen.rows, dev) for number in numbers), *(f"{dev}/{name}" for name in COMMON_DEVICES)]
    who, groups = system.name_of(os.geteuid()), [system.group_of(gid) for gid in os.getgroups()]
    judged = [] if os.path.exists(f"{dev}/dxg") else [ailments.device(_seen(path), who, groups) for path in paths]
    problems = [problem for problem in judged if problem is not None]
    wanted = _wanted(declared, cuda, asked=asked)
    if seen.why is not None:
        more = f"; {problems[0].what}" if problems else ""
        raise Refusal("preflight", f"{wanted}, and {seen.why}{more}", seen.hint)
    if problems:
        several = "s" if len(seen.rows) > 1 else ""
        listed = f"; nvidia-smi lists {len(seen.rows)} GPU{several}" if seen.rows else ""
        said = "; ".join(problem.what for problem in problems)
        raise Refusal("preflight", f"{wanted}{listed}, but {said}", problems[0].hint)
    if unknown := ailments.unknown_gpus(numbers, [row["index"] for row in seen.rows]):
        raise Refusal("preflight", f"{wanted}, and {unknown.what}", unknown.hint)
    if not seen.program:
        return [f"GPU {', '.join(map(str, numbers))}: the device files open; no nvidia-smi is here to ask more"]
    return [_described(row, seen.rows) for row in seen.rows if row["index"] in numbers]


def file_of(number: int, rows: list[dict[str, Any]], dev: str = DEV) -> str:
    """The device file of the GPU that nvidia-smi, which has given these rows, numbers so. It counts what it finds from
    0 on, so that in a container which has only /dev/nvidia2 that one is number 0."""
    minors = _minors(dev)
    place = next((at for at, row in enumerate(rows) if row["index"] == number), None)
    return f"{dev}/nvidia{number if place is None or len(minors) != len(rows) else minors[place]}"


def _minors(dev: str) -> list[int]:
    return sorted(int(name[6:]) for name in os.listdir(dev) if re.fullmatch(r"nvidia[0-9]+", name))


def _wanted(declared: list[int], cuda: int, *, asked: bool) -> str:
    if declared:
        return f"GPU {', '.join(map(str, declared))} is {'asked for' if asked else 'declared in `gpus:`'}"
    return f"the configuration asks for {cuda} CUDA device{'s' if cuda > 1 else ''}"


def _first(count: int, there: list[int]) -> list[int]:
    """As many as are `there` of the first `count` GPUs; if too few are, the next ones are missing by name."""
    return (there + [number for number in range(64) if number not in there])[:count]


def _seen(path: str) -> Device:
    """A device file as this user meets it."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return Device(path=path, there=False)
    except OSError as error:
        return Device(path=path, refusal=error.strerror)
    refusal = None
    if character := stat.S_ISCHR(found.st_mode):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            refusal = error.strerror
    return Device(
        path=path, character=character, owner=system.name_of(found.st_uid), group=system.group_of(found.st_gid),
        mode=stat.S_IMODE(found.st_mode), refusal=refusal,
    )  # fmt: skip


def kept(devices: set[str], numbers: list[int], *, within_s: float = KEPT_S) -> list[str]:
    """What of the memory of these GPUs is still in use when nobody here has them open any more: those with these
    device files, and those that nvidia-smi numbers so."""
    give_up_at = time.monotonic() + within_s
    while devices or numbers:
        rows = ask().rows
        files = {row["index"]: file_of(row["index"], rows) for row in rows}
        full = [row for row in rows if (files[row["index"]] in devices or row["index"] in numbers) and _in_use(row)]
        said = [
            f"GPU {row['index']}: {row['memory_used_mib']:,} of {row['memory_total_mib']:,} MiB are still in use, and "
            "no process that can be seen there has it open"
            for row in full if not holders(files[row["index"]])
        ]  # fmt: skip
        if not said or time.monotonic() > give_up_at:
            return said
        time.sleep(POLL_S)  # a driver may take a moment to give back what a killed process had
    return []


def _in_use(row: dict[str, Any]) -> bool:
    used, total = row["memory_used_mib"], row["memory_total_mib"]
    return bool(used and total and used > total // 20)


def _described(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    text = f"GPU {row['index']} {row['name']}"
    used, total = row["memory_used_mib"], row["memory_total_mib"]
    if used is not None and total is not None:
        text += f": {total - used:,} of {total:,} MiB free"
    if found := holders(file_of(row["index"], rows)):
        names = [f"{one.name} (pid {one.pid})" for one in found]
        text += f", open in {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    elif _in_use(row):
        text += ", and who uses the rest cannot be seen from here"
    return text


def holders(path: str) -> list[Process]:
    """The processes of this container that have a GPU open."""
    open_in = (pid for pid in proc.pids() if any(target == path for _, target in proc.open_paths(pid)))
    return [found[0] for pid in open_in if (found := proc.stat(pid)) is not None]
