"""One request in, frames out: the verbs the agent knows, and how their errors travel.

`boot.py` calls `main` in the process it started in. Each verb is a module with `run(call)`; a module is imported only
when it is asked for, so that a probe never pays for libtmux.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from orchestrator import frames
from orchestrator.model import WorkPaths
from orchestrator.record import record

VERBS = (
    "probe", "show", "survey", "attach", "put", "wheels", "prepare", "start", "logs", "errors", "stop",
    "history", "texts", "curves", "events", "receive", "send", "prune",
)  # fmt: skip


OURS = ("orchestrator", "libtmux")


class Refusal(Exception):
    """The verb cannot be done here, and why. `kind` names the laptop's error class: preflight, notfound, bundle."""

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint


@record
class Call:
    """One request, and how to answer it."""

    request: dict[str, Any]
    payload: BinaryIO
    """What follows the request's line on stdin."""
    paths: WorkPaths
    emit: Callable[..., None]
    """Sends one frame, and the bytes that belong to it. The last frame of a call carries `final: true`."""


def main(request: dict[str, Any], payload: BinaryIO, workdir: str) -> int:
    # An agent whose laptop has gone must not stay for ever: closing the channel stops nothing in a container.
    if deadline_s := request.get("deadline_s"):
        signal.alarm(max(1, int(deadline_s)))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    token = str(request["token"])

    def emit(frame: dict[str, Any], raw: bytes | None = None) -> None:
        sys.stdout.buffer.write(frames.encode(token, frame, raw))
        sys.stdout.buffer.flush()

    verb = str(request["verb"])
    try:
        if verb not in VERBS:
            raise Refusal("bug", f"the agent has no verb {verb!r}")
        module = importlib.import_module(f"orchestrator.agent.{verb}")
        module.run(Call(request=request, payload=payload, paths=WorkPaths(workdir=workdir), emit=emit))
    except Refusal as refusal:
        emit({"final": True, "error": {"kind": refusal.kind, "message": refusal.message, "hint": refusal.hint}})
    except OSError as error:
        message = describe(error, workdir)
        emit({"final": True, "error": {"kind": "preflight", "message": message, "hint": hint_of(error)}})
    except Exception as error:
        if isinstance(error, ImportError) and (error.name or "orchestrator").split(".")[0] not in OURS:
            message = f"{sys.executable} there has no module {error.name}: it is not a whole Python"
            emit({"final": True, "error": {"kind": "python", "message": message, "hint": None}})
            return 0
        if not _is_whole(error):
            raise
        emit({"final": True, "error": {"kind": "bug", "message": _traceback(), "hint": None}})
    return 0


def _is_whole(error: Exception) -> bool:
    """Whether the agent is what was sent. Asked after an error only: whoever cleans up a disk, or a crash of the
    machine, may have taken files of it, or their ends."""
    import hashlib

    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.isfile(home):
        return True  # `survey` came with its own, as an archive
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is not None and at.tb_frame.f_code.co_filename.startswith("<frozen importlib"):
        return False  # also of bytecode, which no hash speaks for
    total = hashlib.sha256()
    found = {}
    for folder, _, names in os.walk(home):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                found[os.path.relpath(path, home)] = path
    for name, path in sorted(found.items()):
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            return False
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()[:16] == os.path.basename(home)


def _traceback() -> str:
    import traceback  # slow, and of use here only

    return traceback.format_exc()


def describe(error: OSError, workdir: str | None = None) -> str:
    """Where, and the system's own words; of the many that `shutil` collects, the first. Of a disk that has no room, or
    may not be written, which it is and how much room it has; `workdir` is where it was, if the error does not say."""
    from orchestrator.agent import space

    where = error.filename if isinstance(error.filename, str) else None
    why = os.strerror(error.errno) if error.errno else str(error)
    if error.errno is None and error.args and isinstance(error.args[0], list) and error.args[0]:
        source, destination, why = error.args[0][0]
        where = str(destination or source)
    text = f"{where}: {why}" if where else why
    disk = space.problem(where or workdir, error)
    return f"{text} ({disk})" if disk else text


MAKE_ROOM = "make room there (specctl prune shows what can go)"


def hint_of(error: OSError) -> str | None:
    text = describe(error)
    hints = {
        errno.ENOSPC: MAKE_ROOM,
        errno.EDQUOT: f"{MAKE_ROOM}, or have the quota raised",
        errno.EROFS: "have it mounted for writing again (an error of the disk may have closed it: dmesg there), or "
        "choose another `workdir:` in hosts.yaml",
        errno.EACCES: "check who owns the workdir there, and `user:` in hosts.yaml",
    }
    return next((hint for number, hint in hints.items() if error.errno == number or os.strerror(number) in text), None)
