"""`wheels`: a wheelhouse arrives file by file, each kept under the hash of its content, so that none is sent twice.

With `ask` it answers which files are missing. What was cut off in the middle of a file loses only that file: the others
stand, whole and verified, and the next launch goes on with the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import time
from collections.abc import Callable
from typing import BinaryIO

from orchestrator.agent import lease, place
from orchestrator.agent.main import Call, Refusal
from orchestrator.model import WorkPaths

BLOCK_BYTES = 1 << 20
TELL_S = 0.5


def run(call: Call) -> None:
    """Request: `wheels` ([name, sha256, size] each) and `ask`; or a tar of `SHA256/NAME` members as the payload."""
    wanted = [(str(name), str(sha256), int(size)) for name, sha256, size in call.request["wheels"]]
    if call.request.get("ask"):
        missing = [(name, size) for name, sha256, size in wanted if not _is_whole(call, name, sha256, size)]
        place.room(call.paths.workdir, sum(size for _, size in missing))
        call.emit({"final": True, "missing_wheels": [name for name, _ in missing]})
        return
    announced = {f"{sha256}/{name}": (name, sha256) for name, sha256, _ in wanted}
    done = 0
    with tarfile.open(fileobj=call.payload, mode="r|") as tar:
        try:
            for member in tar:
                found, source = announced.get(member.name), tar.extractfile(member)
                if found is None or source is None:
                    raise Refusal("bundle", f"a file that was not announced arrived: {member.name}")
                _keep(call, *found, source, done)
                done += member.size
        except tarfile.TarError as error:
            raise Refusal(
                "bundle", f"the wheelhouse arrived damaged: {error}", "launch again: what arrived whole is kept"
            ) from error  # fmt: skip
    call.emit({"final": True, "received": done})


def path_of(paths: WorkPaths, name: str, sha256: str) -> str:
    return os.path.join(paths.wheels, sha256[:16], os.path.basename(name))


def _is_whole(call: Call, name: str, sha256: str, size: int) -> bool:
    """Whether the file is there with its own content; a damaged one is removed. Tells that it is at it."""
    path = path_of(call.paths, name, sha256)
    try:
        if os.stat(path).st_size == size and _digest(path, lambda: call.emit({"checking": name})) == sha256:
            return lease.found(os.path.dirname(path))
        os.unlink(path)
    except OSError:
        pass
    return False


def _digest(path: str, tell: Callable[[], None]) -> str:
    total, told_at = hashlib.sha256(), time.monotonic()
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            total.update(block)
            if time.monotonic() - told_at > TELL_S:
                told_at = time.monotonic()
                tell()
    return total.hexdigest()


def _keep(call: Call, name: str, sha256: str, source: BinaryIO | object, before: int) -> None:
    path = path_of(call.paths, name, sha256)
    aside = f"{os.path.dirname(path)}.{os.getpid()}.tmp"
    os.makedirs(call.paths.wheels, exist_ok=True)
    total, size, told_at = hashlib.sha256(), 0, 0.0
    try:
        with open(aside, "wb") as file:
            while block := source.read(BLOCK_BYTES):  # type: ignore[union-attr]
                total.update(block)
                file.write(block)
                size += len(block)
                if time.monotonic() - told_at > TELL_S:
                    told_at = time.monotonic()
                    call.emit({"receiving": name, "received": before + size})
            file.flush()
            os.fsync(file.fileno())
        if total.hexdigest() != sha256:
            raise Refusal("bundle", f"{name} arrived damaged: its sha256 is {total.hexdigest()}, not {sha256}",
                          "launch again: it is sent anew")  # fmt: skip
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(aside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
