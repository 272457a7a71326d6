"""`preflight`: whether what a program reads is there, for the run's user, before anything is prepared or started.

Paths mean what they will mean to the program: `~` and `$VARS` in the run's own environment, relative ones in the
project that was shipped. What a model has to hold is asked of the trainer that was shipped; this knows files alone.
"""

from __future__ import annotations

import difflib
import json
import os
import pwd
import re
import subprocess
import sys
from typing import Any

from orchestrator.agent import start
from orchestrator.agent.main import Call, Refusal
from orchestrator.model import RunSpec, from_json

ASK = "import sys; sys.path.insert(0, sys.argv[1]); from trainer.inputs import main; main()"


def run(call: Call) -> None:
    spec = from_json(RunSpec, call.request["spec"])
    bundle = call.paths.bundle(spec.bundle)
    environ = start.environment(call, spec, call.paths.run(spec.run_id), bundle)
    os.environ.clear()
    os.environ.update(environ)
    inputs: dict[str, Any] = call.request["inputs"]
    problems: list[dict[str, str]] = []
    places: dict[str, dict[str, str]] = {}
    for kind in ("model", "files"):
        places[kind] = {}
        for key, text in inputs.get(kind, {}).items():
            path, why = resolve(text, os.path.join(bundle, "project"))
            if why := why or look(path, shipped=not text.startswith(("/", "~", "$"))):
                problems.append({"key": key, "path": text, "why": f"{shown(text, path)} {why}"})
            else:
                places[kind][key] = path
    if "wanted" in inputs and any(places.values()):
        problems += [
            {"key": key, "path": inputs["model"].get(key) or inputs["files"].get(key) or "", "why": why}
            for key, why in ask_trainer(bundle, {**places, "wanted": inputs["wanted"]})
        ]
    call.emit({"final": True, "problems": [without_secrets(problem, call) for problem in problems]})


def resolve(text: str, project: str) -> tuple[str, str | None]:
    """(the path that the program will open, why that cannot be known)"""
    expanded = os.path.expandvars(text)
    if left := re.search(r"\$\{?\w+\}?", expanded):
        return text, f"names {left.group()}, which is not set in the run's environment"
    return os.path.join(project, os.path.expanduser(expanded)), None


def shown(text: str, path: str) -> str:
    return text if text == path or not text.startswith(("~", "$")) else f"{text} ({path})"


def look(path: str, *, shipped: bool) -> str | None:
    """Why nothing can be read at `path`; None when something can. `shipped`: it is in the project."""
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except FileNotFoundError:
        return f"is not {'in the project that was shipped' if shipped else 'there'}{near(path, shipped=shipped)}"
    except PermissionError:
        return f"cannot be read by {user()}: Permission denied"
    except OSError as error:
        return f"cannot be read: {os.strerror(error.errno or 0)}"
    return None


def near(path: str, *, shipped: bool) -> str:
    """What is there of a missing path: the nearest name in its folder, or the last folder that exists."""
    folder, name = os.path.split(path.rstrip("/"))
    try:
        close = difflib.get_close_matches(name, os.listdir(folder), n=1, cutoff=0.7)
    except OSError:
        if shipped:
            return ""
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        return f" (of its path only {folder} is)"
    return f"; did you mean {close[0] if shipped else os.path.join(folder, close[0])}?" if close else ""


def user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def ask_trainer(bundle: str, question: dict[str, Any]) -> list[tuple[str, str]]:
    """(key, what is wrong) of each input that the shipped trainer would refuse."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", ASK, os.path.join(bundle, "trainer")],
        input=json.dumps(question).encode("ascii"), capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise Refusal("bug", f"the trainer's look at its inputs failed:\n{done.stderr.decode('utf-8', 'replace')}")
    return [(str(key), str(why)) for key, why in json.loads(done.stdout)]


def without_secrets(problem: dict[str, str], call: Call) -> dict[str, str]:
    """A path may be made of a secret's value, and what is wrong is recorded and shown."""
    for name, value in (call.request.get("secrets") or {}).items():
        if value:
            problem = {key: text.replace(value, f"${name}") for key, text in problem.items()}
    return problem
