"""`prepare`: a virtual environment named by the hash of what it is made from.

Made once, under a lock, in its final place (a venv cannot be moved); a marker says that it is whole, and what failed is
removed. Each command is a frame (`step`) and so is each line of its output (`line`), so that the laptop sees progress
and never confuses a slow download with a dead link. With a wheelhouse nothing else is asked: no index, no pip.conf.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from dataclasses import dataclass

from orchestrator.agent import lease, wheels
from orchestrator.agent.interpreter import Interpreter, Says, interpreter, pip_download, run_step
from orchestrator.agent.main import Call, Refusal

COMPLETE = "specctl-complete"
NO_NETWORK = (
    "name resolution", "Name or service not known", "Failed to establish a new connection", "Network is unreachable",
    "NewConnectionError", "ConnectTimeoutError", "Connection refused", "Could not fetch URL", "No route to host",
    "nodename nor servname",
)  # fmt: skip
NOT_FOUND = ("No matching distribution found", "Could not find a version that satisfies", "is not a supported wheel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What an environment is made of."""

    requirements: list[str]
    wheels: list[str] | None
    """Paths of the wheels it is made of, and of nothing else; None: of what the index has."""
    shown: str
    """The wheelhouse as the laptop's user typed it."""


def run(call: Call) -> None:
    home = call.paths.env(str(call.request["env_hash"]))
    if is_made(home):
        call.emit({"final": True, "env": home, "made": False})
        return
    os.makedirs(os.path.dirname(home), exist_ok=True)
    with open(f"{home}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            call.emit({"step": "another launch is making this environment; waiting for it"})
            fcntl.flock(lock, fcntl.LOCK_EX)
        made = not is_made(home)
        if made:
            try:
                make(home, str(call.request.get("python") or sys.executable), _wanted(call), call.emit, lock.fileno())
                with open(os.path.join(home, COMPLETE), "w") as file:
                    file.write("\n".join(call.request["requirements"]) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                shutil.rmtree(home, ignore_errors=True)
                raise
    call.emit({"final": True, "env": home, "made": made})


def is_made(home: str) -> bool:
    return lease.found(home, COMPLETE)


def _wanted(call: Call) -> Wanted:
    listed = call.request.get("wheels")
    paths = None
    if listed is not None:
        paths = [wheels.path_of(call.paths, str(name), str(sha256)) for name, sha256, _ in listed]
        lost = [os.path.basename(path) for path in paths if not os.path.exists(path)]
        if lost:
            raise Refusal("bundle", f"wheels went missing there: {', '.join(lost)}", "launch again")
    return Wanted(
        requirements=[str(one) for one in call.request["requirements"]], wheels=paths,
        shown=str(call.request.get("wheelhouse") or "wheels"),
    )  # fmt: skip


def make(home: str, python: str, wanted: Wanted, emit: Says, lock_fd: int) -> None:
    """Makes the environment at `home`; raises `Refusal` with the last lines of what failed.

    The commands inherit the lock: one that outlives this agent must not work where another launch begins anew.
    """
    shutil.rmtree(home, ignore_errors=True)
    found = interpreter(python)
    run_step([found.path, "-m", "venv", *([] if found.has_ensurepip else ["--without-pip"]), home], emit, lock_fd)
    if not wanted.requirements:
        return
    own, folder = f"{home}/bin/python", f"{home}.wheels"
    options = ["install", "--no-input", "--disable-pip-version-check"]
    if wanted.wheels is not None:
        options += ["--isolated", "--no-index", "--find-links", folder]
    try:
        _gather(folder, wanted.wheels or [])
        run_step([*_pip(found, own, folder, wanted), *options, *wanted.requirements], emit, lock_fd)
    except Refusal as refusal:
        refusal.hint = _hint(refusal, found, wanted) or refusal.hint
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _gather(folder: str, paths: list[str]) -> None:
    """One folder with exactly these wheels."""
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder)
    for path in paths:
        os.symlink(path, os.path.join(folder, os.path.basename(path)))


def _pip(found: Interpreter, own: str, folder: str, wanted: Wanted) -> list[str]:
    """How to run a pip that installs into the environment: its own, a wheel of pip, or that of the base Python."""
    if found.has_ensurepip:
        return [own, "-m", "pip"]
    shipped = sorted(name for name in os.listdir(folder) if name.startswith("pip-"))
    if shipped:
        return [own, f"{folder}/{shipped[-1]}/pip"]
    if found.pip_version >= (22, 3):
        return [found.path, "-m", "pip", "--python", own]
    why = f"{found.path} (Python {found.version}) has no ensurepip, which makes pip"
    if wanted.wheels is None:
        raise Refusal(
            "preflight", why,
            f"install it there (Debian: apt-get install python3-venv), or bring everything from here: "
            f"{pip_download(found, wanted.requirements, wanted.shown)}, and launch with --wheelhouse {wanted.shown}",
        )  # fmt: skip
    raise Refusal(
        "preflight", f"{why}, and the wheelhouse has no wheel of pip",
        f"add it: {pip_download(found, [], wanted.shown)}, and launch again",
    )  # fmt: skip


def _hint(refusal: Refusal, found: Interpreter, wanted: Wanted) -> str | None:
    said = refusal.message
    missing = any(text in said for text in NOT_FOUND)
    if wanted.wheels is not None and missing:
        make = pip_download(found, wanted.requirements, wanted.shown)
        return f"a wheelhouse for this place (Python {found.version}, {found.platform}): {make}; then launch again"
    if wanted.wheels is None and any(text in said for text in NO_NETWORK):
        make = pip_download(found, wanted.requirements, wanted.shown)
        return f"no package index can be reached from there: {make}; then launch with --wheelhouse {wanted.shown}"
    return None
