"""A process that has imported specctl and forks one child a command: a real process a verb, without the import.

Reads requests as JSON lines from stdin and answers on stdout: `{"id", "argv", "env", "cwd", "out", "err"}` begins one,
`{"kill": id}` ends it by SIGKILL; the answer is `{"id", "code"}`, negative for a signal.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys

from orchestrator import __main__ as entry
from orchestrator.commands import COMMANDS


def warm() -> None:
    """All that a command may import, so that each child has it."""
    for name in COMMANDS:
        importlib.import_module(f"orchestrator.cli.{name}")
    for name in ("transport.ssh", "transport.ssh_connect", "transport.pct", "transport.fanout", "transport.local"):
        importlib.import_module(f"orchestrator.{name}")
    gc.collect()
    gc.freeze()


def child(request: dict[str, object]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for fd, path in ((1, request["out"]), (2, request["err"])):
        file = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, fd)
        os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[call-overload]
    os.chdir(str(request["cwd"]))
    sys.argv = ["specctl", *request["argv"]]  # type: ignore[misc]
    code = 70
    try:
        code = entry.main()
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed by mistake is no answer
    running: dict[int, object] = {}
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    held = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            for pid in list(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    answer = {"id": running.pop(pid), "code": os.waitstatus_to_exitcode(status)}
                    os.write(answers, json.dumps(answer).encode() + b"\n")
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "kill" in request:
                    for pid, name in running.items():
                        if name == request["kill"]:
                            os.kill(pid, signal.SIGKILL)
                    continue
                if (pid := os.fork()) == 0:
                    for fd in (answers, wake, woken):
                        os.close(fd)
                    child(request)
                running[pid] = request["id"]
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    warm()
    serve()
