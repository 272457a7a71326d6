"""`survey`: what a target has of what a launch needs; writes nothing, and runs before any agent is installed there."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import time
from typing import Any

from orchestrator import ailments
from orchestrator.agent import gpu, proc, space, system, tmux
from orchestrator.agent.main import Call, Refusal

ASK_S = 20.0


def run(call: Call) -> None:
    """Request: `agent` (the hash of the one that is asked about), `python` and `gpus` (hosts.yaml's, or None)."""
    workdir = call.paths.workdir
    seen, declared = gpu.ask(), [int(number) for number in call.request.get("gpus") or []]
    problem = _gpu_problem(declared) if declared else (seen.why, seen.hint)
    call.emit({
        "final": True, "now": time.time(), "host": os.uname().nodename, "user": system.account().pw_name,
        "system": _system(), "workdir": workdir, **_workdir(workdir),
        "agent": os.path.isdir(call.paths.agent(str(call.request["agent"]))),
        "python": {"path": sys.executable, "version": platform.python_version()},
        "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        "own_python": _own_python(call.request.get("python")), **_tmux(), "grep": system.which("grep"),
        "gpus": seen.rows, "gpus_why": problem[0], "gpus_hint": problem[1],
        "live": len(proc.marked_runs(call.paths.runs)), "runs": _runs(call.paths.runs),
    })  # fmt: skip


def _system() -> str:
    """`Debian GNU/Linux 12 (bookworm)`, or what the kernel says."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME") or platform.system()
    except OSError:
        return f"{platform.system()} {platform.release()}"


def _workdir(workdir: str) -> dict[str, Any]:
    """Whether it is there and can be written or made, and how much room there is."""
    nearest = workdir
    while not os.path.lexists(nearest) and nearest != "/":
        nearest = os.path.dirname(nearest)
    disk = space.disk_of(nearest)
    problem = ailments.unusable_folder(
        nearest, user=system.account().pw_name, is_directory=os.path.isdir(nearest),
        writable=os.access(nearest, os.W_OK | os.X_OK), disk=disk,
    )  # fmt: skip
    there = nearest == workdir
    return {"workdir_there": there, "workdir_problem": problem, "free_bytes": disk.free_bytes if disk else None,
            "total_bytes": disk.total_bytes if disk else None}  # fmt: skip


def _own_python(path: str | None) -> dict[str, Any] | None:
    """What `python:` of hosts.yaml is, which the program will run on."""
    if not path:
        return None
    try:
        asked = subprocess.run(
            [path, "-c", "import platform; print(platform.python_version())"], stdin=subprocess.DEVNULL,
            capture_output=True, timeout=ASK_S, env=system.base_environ(scrub=False), cwd="/", check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"path": path, "version": None, "why": getattr(error, "strerror", None) or "it does not answer"}
    version = asked.stdout.decode("utf-8", "replace").strip()
    if asked.returncode:
        said = asked.stderr.decode("utf-8", "replace").strip().splitlines()
        return {"path": path, "version": None, "why": said[-1] if said else f"exit code {asked.returncode}"}
    return {"path": path, "version": version, "why": None}


def _gpu_problem(declared: list[int]) -> tuple[str | None, str | None]:
    """Why a launch that wants these GPUs would be refused here, and what mends it."""
    try:
        gpu.check(declared, 0)
    except Refusal as refusal:
        return refusal.message, refusal.hint
    return None, None


def _tmux() -> dict[str, Any]:
    try:
        found = tmux.find()
    except Refusal as refusal:
        return {"tmux": None, "tmux_why": refusal.message, "tmux_hint": refusal.hint}
    return {"tmux": {"path": found.program, "version": found.version.removeprefix("tmux ")}}


def _runs(runs: str) -> int:
    try:
        return len(os.listdir(runs))
    except OSError:
        return 0
