"""Whether what a program reads is there, for the run's user, before anything is prepared or started.

Paths mean what they will mean to the program: `~` and `$VARS` in the run's own environment, relative ones in the
project that was shipped. What a model has to hold is asked of the trainer that was shipped; this knows files alone.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import pwd
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from orchestrator.agent import start
from orchestrator.agent.main import Call, Refusal
from orchestrator.model import RunSpec, from_json

ASK = "import sys; sys.path.insert(0, sys.argv[1]); from trainer.inputs import main; main()"
KINDS = ("model", "files", "drafter")
VARIABLE = re.compile(r"\$\{?(\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One path that the program reads: by the key that names it, as it is written there, and where that is."""

    key: str
    kind: str
    """model, files or drafter"""
    text: str
    path: str
    private: bool
    """Made of a secret: where it is must not be told."""

    @property
    def shipped(self) -> bool:
        """A relative path: of the project."""
        return not self.text.startswith(("/", "~", "$"))

    def __str__(self) -> str:
        known = self.text.startswith(("~", "$")) and "$" not in self.path and not self.private
        return f"{self.text} ({self.path})" if known else self.text


def problems(call: Call) -> list[dict[str, Any]]:
    """What is amiss with the `inputs` of the request. The code must be here; to look takes on the run's environment."""
    spec = from_json(RunSpec, call.request["spec"])
    bundle = call.paths.bundle(spec.bundle)
    environ = start.environment(call, spec, call.paths.run(spec.run_id), bundle)
    os.environ.clear()
    os.environ.update(environ)
    asked: dict[str, Any] = call.request["inputs"]
    secrets = set(call.request.get("secrets") or {})
    inputs = [
        Input(key=key, kind=kind, text=text, path=os.path.join(bundle, "project", expanded(text)),
              private=bool(secrets & set(VARIABLE.findall(text))))
        for kind in KINDS for key, text in asked.get(kind, {}).items()
    ]  # fmt: skip
    found = {item.key: f"{item} {why}" for item in inputs if (why := unset(item) or look(item))}
    if "wanted" in asked:
        there: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        for item in inputs:
            if item.key not in found:
                there[item.kind][item.key] = item.path
        found.update(ask_trainer(bundle, {**there, "wanted": asked["wanted"]}))
    places = {item.key: item.path for item in inputs if not (item.shipped or item.private or unset(item))}
    return [
        {"key": key, "why": untold(why, inputs), "place": places.get(key), "bring": "cannot be read" not in why}
        for key, why in found.items()
    ]


def expanded(text: str) -> str:
    return os.path.expanduser(os.path.expandvars(text))


def unset(item: Input) -> str | None:
    left = re.search(r"\$\{?\w+\}?", os.path.expandvars(item.text))
    return f"names {left.group()}, which is not set in the run's environment" if left else None


def look(item: Input) -> str | None:
    """Why nothing can be read there; None when something can. Data may be named by a glob."""
    if glob.has_magic(item.path) and glob.glob(item.path, recursive=True):
        return None
    try:
        if os.path.isdir(item.path):
            os.listdir(item.path)
        else:
            with open(item.path, "rb") as file:
                file.read(1)
    except FileNotFoundError:
        return f"is not {'in the project that was shipped' if item.shipped else 'there'}{near(item)}"
    except PermissionError:
        return f"cannot be read by {user()}: Permission denied"
    except OSError as error:
        return f"cannot be read: {os.strerror(error.errno or 0)}"
    return None


def near(item: Input) -> str:
    """What is there of a missing path: the nearest name in its folder, or the last folder that exists."""
    if item.private:
        return ""
    folder, name = os.path.split(item.path.rstrip("/"))
    try:
        close = difflib.get_close_matches(name, os.listdir(folder), n=1, cutoff=0.7)
    except OSError:
        if item.shipped:
            return ""
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        return f" (of its path only {folder} is)"
    return f"; did you mean {close[0] if item.shipped else os.path.join(folder, close[0])}?" if close else ""


def untold(why: str, inputs: list[Input]) -> str:
    """What is recorded and shown: without a path that is made of a secret's value."""
    for item in inputs:
        if item.private:
            why = why.replace(item.path, item.text)
    return why


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
