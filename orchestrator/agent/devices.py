"""Which devices a run could claim here, by UUID, and which of them somebody uses who has no claim.

A number is nvidia-smi's of this moment: it can be another GPU's after a reboot, and is another one to CUDA, which may
count the fastest first. A UUID stays, so that the program is told its GPUs by UUID.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from orchestrator.agent import gpu, proc, system
from orchestrator.agent.main import Refusal
from orchestrator.model import Process
from orchestrator.model.gpus import UNSEEN, Device, GpuWish

VISIBLE = "CUDA_VISIBLE_DEVICES"
IN_USE_MIB = 1024
"""A desktop has so much of a GPU, or a driver; who trains has more."""
LINE = re.compile(
    r"GPU (\d+): (.*?) \(UUID: (GPU-[\w-]+)\)\s*|\s+MIG (.*?)\s*Device\s+(\d+): \(UUID: (MIG-[\w/-]+)\)\s*"
)


def there() -> list[Device]:
    """All that nvidia-smi lists; of a GPU that is divided (MIG), its parts. None where it says nothing."""
    program = system.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "-L"], stdin=subprocess.DEVNULL, capture_output=True, timeout=gpu.ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parsed(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else []


def parsed(text: str) -> list[Device]:
    """What `nvidia-smi -L` has printed."""
    found: list[Device] = []
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        if match and match[3]:
            found.append(Device(number=match[1], uuid=match[3], name=match[2]))
        elif match and found:
            card = found[-1].card
            if found[-1].number == str(card):
                found.pop()
            found.append(Device(number=f"{card}:{match[5]}", uuid=match[6], name=f"MIG {match[4]}"))
    return found


def pool(wish: GpuWish, environ: Mapping[str, str], known: Sequence[Device]) -> list[Device]:
    """The devices that the wish is about, of those that are `known`: those it names, or else those that a program with
    this environment would see. Raises `Refusal` for what is not there, and for too few."""
    if wish.among:
        found = []
        for name in wish.among:
            if not (meant := named(name, known)):
                raise Refusal(
                    "preflight", f"{name} is asked for, and nvidia-smi -L {_told(known)}",
                    "name another one with --gpus, or in `gpus:` of hosts.yaml",
                )  # fmt: skip
            found += [one for one in meant if one not in found]
    else:
        found = _seen(environ.get(VISIBLE), known)
    if wish.count is not None and wish.count > len(found):
        raise Refusal(
            "preflight", f"{wish.count} GPUs are asked for, and there are {len(found)} to choose from "
            f"({', '.join(one.number for one in found) or 'nvidia-smi -L lists none'})", "ask for fewer",
        )  # fmt: skip
    return found


def named(name: str, known: Sequence[Device]) -> list[Device]:
    """What a number or the beginning of a UUID stands for: one device, or all parts of a divided GPU."""
    if name.isdigit():
        return [one for one in known if one.card == int(name)]
    exact = [one for one in known if one.number == name]
    fitting = [one for one in known if one.uuid.startswith(name)]
    return exact or (fitting if len(fitting) == 1 else [])


def _seen(visible: str | None, known: Sequence[Device]) -> list[Device]:
    """What CUDA would make of the variable: it stops at the first name that it does not know."""
    if visible is None:
        return list(known)
    found: list[Device] = []
    for name in filter(None, (word.strip() for word in visible.split(","))):
        if not (meant := named(name, known)):
            break
        found += [one for one in meant if one not in found]
    return found


def _told(known: Sequence[Device]) -> str:
    return f"lists {', '.join(one.number for one in known)}" if known else "lists none"


def used(among: Sequence[Device]) -> dict[str, str]:
    """UUID -> who has the GPU's memory, of those that are in use. Of a part of a GPU nvidia-smi does not say it."""
    whole = {one.card: one for one in among if ":" not in one.number}
    found: dict[str, str] = {}
    rows = gpu.ask().rows if whole else []
    for row in rows:
        one, memory = whole.get(row["index"]), row["memory_used_mib"]
        if one is None or memory is None or memory <= IN_USE_MIB:
            continue
        who = ", ".join(_names(gpu.holders(gpu.file_of(one.card, rows)))[:3]) or UNSEEN
        found[one.uuid] = f"used by {who} ({memory:,} of {row['memory_total_mib'] or 0:,} MiB), which has no claim"
    return found


def _names(processes: Sequence[Process]) -> list[str]:
    """Runs by their ids, each once, and other processes by theirs."""
    runs = {one.pid: proc.run_of(one.pid) for one in processes}
    return list(dict.fromkeys(
        f"run {run}" if (run := runs[one.pid]) is not None else f"{one.name} (pid {one.pid})" for one in processes
    ))  # fmt: skip


def visible(held: Sequence[Device]) -> str:
    """The value of CUDA_VISIBLE_DEVICES for these."""
    return ",".join(one.uuid for one in held)
