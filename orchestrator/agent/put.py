"""`put`: a bundle arrives as a tar on stdin, and stands under its hash only if that is its hash.

With `ask` it looks whether a launch can live here at all (`place.py`), and what is there already, so that nothing
travels twice. Once the bundle stands it says what the program would read and not find (`preflight.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from typing import Any

from orchestrator import whole
from orchestrator.agent import lease, place, prepare
from orchestrator.agent.main import Call, Refusal
from orchestrator.manifest import Entry, bundle_hash

COMPLETE = ".complete"


def run(call: Call) -> None:
    wanted = str(call.request["bundle"])
    home = call.paths.bundle(wanted)
    if call.request.get("ask"):
        present = lease.found(home, COMPLETE)
        env = call.request.get("env_hash")
        made = env is None or prepare.is_made(call.paths.env(str(env)))
        gpus, claims = place.check(call, present=present, prepares=not made)
        call.emit({
            "final": True, "present": present, "env": made, "gpus": gpus, "claims": claims,
            "problems": _problems(call) if present else [],
        })  # fmt: skip
        return
    aside = f"{home}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    os.makedirs(os.path.dirname(aside), exist_ok=True)
    os.mkdir(aside, 0o700)
    try:
        with tarfile.open(fileobj=call.payload, mode="r|") as tar:
            tar.extractall(aside, filter="fully_trusted") if hasattr(tarfile, "data_filter") else tar.extractall(aside)
        found = bundle_hash(scan(aside))
        if found != wanted:
            raise Refusal("bundle", f"the bundle arrived damaged: its content hash is {found}, not {wanted}")
        with open(os.path.join(aside, COMPLETE), "wb") as marker:
            os.fsync(marker.fileno())
        if os.path.exists(home) and not os.path.exists(os.path.join(home, COMPLETE)):
            shutil.rmtree(home)
        try:
            os.rename(aside, home)
        except OSError:
            if not os.path.exists(os.path.join(home, COMPLETE)):  # else somebody has put the same bundle meanwhile
                raise
    except tarfile.TarError as error:
        raise Refusal("bundle", f"the bundle arrived damaged: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    call.emit({"final": True, "present": True, "problems": _problems(call)})


def _problems(call: Call) -> list[dict[str, Any]]:
    if not call.request.get("inputs"):
        return []
    from orchestrator.agent import preflight  # which reads what `start` sets up, which verifies what this has put

    return preflight.problems(call)


def verify(home: str, wanted: str) -> None:
    """Raises `Refusal` unless the files under `home` are exactly the bundle `wanted`."""
    if not lease.found(home, COMPLETE):
        raise Refusal("bundle", f"bundle {wanted} is not on the target", "launch again: it is sent when it is missing")
    found = bundle_hash(scan(home))
    if found != wanted:
        raise Refusal(
            "bundle",
            f"the files of bundle {wanted} have been changed on the target (their hash is now {found})",
            f"remove {home} there and launch again",
        )


def scan(root: str) -> list[Entry]:
    """What stands under `root`, as a bundle's entries; bytecode and the marker are not content."""
    entries = []
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in links and name != "__pycache__"]
        for name in names + links:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, root)
            if relative == COMPLETE:
                continue
            if os.path.islink(path):
                content = os.fsencode(os.readlink(path))
                entries.append(Entry(path=relative, kind="link", sha256=hashlib.sha256(content).hexdigest()))
                continue
            with open(path, "rb") as file:
                digest = whole.sha256_of(file)
            program = os.stat(path).st_mode & 0o100
            entries.append(Entry(path=relative, kind="program" if program else "file", sha256=digest))
    return entries
