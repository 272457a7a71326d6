"""What a Python of the target can do, asked of itself; the commands that make an environment with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.agent import system
from orchestrator.agent.main import Refusal

Says = Callable[[dict[str, Any]], None]
TAIL_LINES = 15
ASK = """
import importlib.util as util, json, platform, sys, sysconfig
pip = [0]
if util.find_spec("pip"):
    try:
        import pip as found
        pip = [int(part) for part in found.__version__.split(".")[:2]]
    except Exception:
        pass
print("specctl-python", json.dumps({
    "version": "%d.%d" % sys.version_info[:2], "platform": sysconfig.get_platform(), "libc": platform.libc_ver(),
    "venv": bool(util.find_spec("venv")), "ensurepip": bool(util.find_spec("ensurepip")), "pip": pip,
    "implementation": sys.implementation.name,
}))
"""
MANYLINUX = ((2, 17), (2, 28), (2, 34))
"""The platforms that wheels are usually built for; an older one's run on a newer one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    path: str
    version: str
    """`3.11`"""
    platform: str
    """`linux-x86_64, glibc 2.36`"""
    tags: list[str]
    """Platform tags of the wheels that it can use, as `pip download` wants them."""
    has_ensurepip: bool
    pip_version: tuple[int, ...]
    """(0,): it has none of its own."""


def interpreter(path: str) -> Interpreter:
    """Raises `Refusal` when `path` is no Python that can make environments."""
    try:
        asked = subprocess.run(
            [path, "-c", ASK], stdin=subprocess.DEVNULL, capture_output=True, env=system.base_environ(scrub=False),
            cwd="/", check=False,
        )  # fmt: skip
    except OSError as error:
        raise Refusal("preflight", f"cannot run {path}: {os.strerror(error.errno or 0)}",
                      "check `python:` of this target in hosts.yaml") from error  # fmt: skip
    answer = re.search(r"^specctl-python (\{.*\})$", asked.stdout.decode("utf-8", "replace"), re.MULTILINE)
    if answer is None:
        said = asked.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Refusal("preflight", f"{path} is no Python that answers: {said[-1] if said else asked.returncode}",
                      "check `python:` of this target in hosts.yaml")  # fmt: skip
    told = json.loads(answer[1])
    if not told["venv"]:
        raise Refusal("preflight", f"{path} (Python {told['version']}) has no module venv: it makes no environments",
                      "install it there (Debian: apt-get install python3-venv), or name a whole Python as `python:` of "
                      "this target in hosts.yaml")  # fmt: skip
    libc, number = told["libc"]
    machine = str(told["platform"]).rpartition("-")[2]
    version = tuple(int(part) for part in re.findall(r"\d+", number)[:2])
    tags = [f"manylinux_{major}_{minor}_{machine}" for major, minor in MANYLINUX if (major, minor) <= version]
    return Interpreter(
        path=path, version=told["version"], platform=f"{told['platform']}, {libc or 'libc'} {number or 'unknown'}",
        tags=tags if libc == "glibc" else [f"musllinux_1_2_{machine}"], has_ensurepip=told["ensurepip"],
        pip_version=tuple(told["pip"]),
    )  # fmt: skip


def pip_download(found: Interpreter, requirements: list[str], folder: str) -> str:
    """The command that makes a wheelhouse for this interpreter, on any machine with a network."""
    argv = ["pip", "download", "-d", folder, "--only-binary=:all:", f"--python-version={found.version}"]
    argv += [f"--platform={tag}" for tag in found.tags]
    return shlex.join([*argv, "pip", *requirements])


def run_step(argv: list[str], emit: Says, lock_fd: int) -> None:
    """Runs one command and shows what it prints; raises `Refusal` with the end of that when it fails."""
    emit({"step": " ".join(argv)})
    environ = system.base_environ(scrub=False)
    if "--no-index" in argv:
        environ = {name: value for name, value in environ.items() if not name.startswith("PIP_")}
        environ["PIP_CONFIG_FILE"] = os.devnull
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ,
            pass_fds=[lock_fd],
        )  # fmt: skip
    except OSError as error:
        raise Refusal("preflight", f"cannot run {argv[0]}: {os.strerror(error.errno or 0)}") from error
    assert process.stdout is not None
    tail: list[str] = []
    for raw in process.stdout:
        line = raw.decode("utf-8", "replace").rstrip()
        tail = [*tail[-TAIL_LINES + 1 :], line]
        emit({"line": line})
    if process.wait() != 0:
        hint = None
        if "No space left on device" in "\n".join(tail):
            hint = "make room in the target's workdir (and in its TMPDIR), or choose another `workdir:` in hosts.yaml"
        frames = [number for number, line in enumerate(tail) if "/site-packages/pip/_" in line]
        if frames:  # what pip itself stumbled over is said by the last line of its traceback
            tail = [line for line in tail[frames[-1] :] if line and not line.startswith(" ")] or tail
            hint = hint or "is that one of the `requirements:` of the configuration?"
        raise Refusal("preflight", f"{' '.join(argv[:4])} ... failed:\n" + "\n".join(tail), hint)
