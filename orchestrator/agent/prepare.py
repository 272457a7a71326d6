"""`prepare`: a virtual environment named by the hash of the requirements it is made from.

Made once, under a lock, in its final place (a venv cannot be moved); a marker says that it is whole. Each command is a
frame (`step`) and so is each line of its output (`line`), so that the laptop sees progress and never confuses a slow
download with a dead link.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from orchestrator.agent import system
from orchestrator.agent.main import Call, Refusal

COMPLETE = "specctl-complete"


def run(call: Call) -> None:
    home = call.paths.env(str(call.request["env_hash"]))
    marker = os.path.join(home, COMPLETE)
    if os.path.exists(marker):
        call.emit({"final": True, "env": home, "made": False})
        return
    os.makedirs(os.path.dirname(home), exist_ok=True)
    with open(f"{home}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            call.emit({"step": "another launch is making this environment; waiting for it"})
            fcntl.flock(lock, fcntl.LOCK_EX)
        made = not os.path.exists(marker)
        if made:
            make(home, list(call.request["requirements"]), call.request.get("python"), call.emit)
            with open(marker, "w") as file:
                file.write("\n".join(call.request["requirements"]) + "\n")
    call.emit({"final": True, "env": home, "made": made})


def make(home: str, requirements: list[str], python: str | None, emit: Callable[[dict[str, str]], None]) -> None:
    """Makes the environment at `home`; raises `Refusal` with the last lines of what failed."""
    shutil.rmtree(home, ignore_errors=True)
    environ = system.base_environ(scrub=False)
    steps = [[python or sys.executable, "-m", "venv", home]]
    if requirements:
        pip = [f"{home}/bin/python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        steps.append([*pip, *requirements])
    for argv in steps:
        emit({"step": " ".join(argv)})
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ
            )
        except OSError as error:
            raise Refusal("preflight", f"cannot run {argv[0]}: {os.strerror(error.errno or 0)}") from error
        assert process.stdout is not None
        tail: list[str] = []
        for raw in process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            tail = [*tail[-14:], line]
            emit({"line": line})
        if process.wait() != 0:
            hint = None
            if "ensurepip" in "\n".join(tail):
                hint = "install python3-venv there, or name a ready interpreter as `python:` of this target"
            raise Refusal("preflight", f"{' '.join(argv[:4])} ... failed:\n" + "\n".join(tail), hint)
