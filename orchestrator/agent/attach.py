"""`attach`: becomes the tmux client of a run's session, after one frame that says whose session it is.

The request came as an argument, since stdin is the terminal. What the frame says has been looked at, not looked up: the
session's pane is the supervisor that this very attempt has recorded.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from orchestrator.agent import proc, records, tmux
from orchestrator.agent.main import Call, Refusal
from orchestrator.model import Process, is_run_id

TERMINFO = ("/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo", "/usr/lib/terminfo")
LIKE = ("xterm-256color", "xterm", "screen-256color", "screen", "linux", "vt100")
"""What to be taken for where the terminal's own kind is not known: those that any Debian knows, the best first."""
SERVER_S = 2.0
SEEN_S = 20.0


def run(call: Call) -> None:
    """Request: `run_id`, `nonce`, `write`, `term`, `utf8`. Emits one frame, waits for a byte, and is then tmux."""
    request = call.request
    run_id = str(request["run_id"])
    paths = call.paths.run(run_id)
    known = records.spec(paths) if is_run_id(run_id) else None
    if known is None or known[0].nonce != request["nonce"]:
        raise Refusal("notfound", f"no run {run_id} of that identity in {call.paths.runs}", "specctl ls lists the runs")
    if records.exit_record(paths) is not None:
        raise Refusal("preflight", "it has just ended", f"specctl show {run_id}")
    supervisor = records.supervisor(paths)
    if supervisor is None and os.path.lexists(paths.supervisor):
        raise Refusal("preflight", "supervisor.json cannot be read: nobody can tell whether a session is the run's",
                      f"specctl stop {run_id} ends it; its log: {paths.log(1)}")  # fmt: skip
    if supervisor is None or proc.same(supervisor.pid, supervisor.start_ticks) is None:
        raise Refusal("preflight", "its session is gone: the supervisor that lived in it has died",
                      f"specctl logs {run_id} -f shows what the program still writes")  # fmt: skip
    found, socket = tmux.find(), tmux.socket_of(call.paths)
    client = _Client(found.program, socket, found.locale, run_id)
    line = _line(supervisor.pid)
    if not client.has_session() and not client.call_server(line):
        raise Refusal("preflight", "its tmux server does not answer, the run goes on without it",
                      f"specctl logs {run_id} -f shows the same")  # fmt: skip
    panes = client.ask("list-panes", "-s", "-F", "#{pane_pid}").split()
    if not any(str(process.pid) in panes for process in line):
        raise Refusal("preflight", "the session of its name is not the run's: no pane of it is the run's supervisor",
                      f"specctl logs {run_id} -f")  # fmt: skip
    client.dress(write=bool(request.get("write")))
    argv = [found.program, *(["-u"] if request.get("utf8") else []), "-S", socket, "attach-session"]
    argv += [*([] if request.get("write") else ["-r"]), "-t", client.session]
    environ = {**client.environ, "TERM": known_terminal(str(request.get("term") or ""))}
    with _quiet(0):
        call.emit({"final": True, "attached": True, "term": environ["TERM"]})
        # The first thing that tmux does is to throw away what nobody has read from the terminal yet.
        if not select.select([0], [], [], SEEN_S)[0] or not os.read(0, 1):
            raise SystemExit(f"specctl: nobody said within {SEEN_S:g} s that the answer had come; ask again")
    os.execve(found.program, argv, environ)


@contextlib.contextmanager
def _quiet(fd: int) -> Iterator[None]:
    """A terminal that gives each key at once and shows none."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSANOW)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def _line(pid: int) -> list[Process]:
    """The process and its ancestors. tmux may have put a shell between itself and the supervisor."""
    found: list[Process] = []
    while pid > 1 and (process := proc.stat(pid)) is not None:
        found.append(process[0])
        pid = process[1]
    return found


class _Client:
    """tmux, asked about one session by its exact name."""

    def __init__(self, program: str, socket: str, locale: str, run_id: str) -> None:
        self.program, self.socket, self.run_id = program, socket, run_id
        self.session = f"={run_id}:"
        self.environ = {"PATH": os.defpath, "LC_ALL": locale, "HOME": os.path.expanduser("~")}

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, "-S", self.socket, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env=self.environ, check=False,
        )  # fmt: skip

    def has_session(self) -> bool:
        return self._run("has-session", "-t", self.session).returncode == 0

    def ask(self, command: str, *words: str) -> str:
        return self._run(command, "-t", self.session, *words).stdout

    def call_server(self, line: list[Process]) -> bool:
        """Has a server whose socket was deleted make it anew: the supervisor descends from it, so it lives."""
        server = next((one for one in line if one.name.startswith("tmux: server")), None)
        if server is None:
            return False
        os.kill(server.pid, signal.SIGUSR1)
        until = time.monotonic() + SERVER_S
        while not self.has_session():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def dress(self, *, write: bool) -> None:
        """Says at the bottom of the screen whose session it is, and how to leave. Keys that come quickly, as over a
        slow link, are keys: tmux would take them for pasted text, and Ctrl-B d for two letters."""
        leave = "Ctrl-B d leaves "
        options: dict[str, Any] = {
            "status-left": f" {self.run_id} ", "status-left-length": 80, "status-right-length": 60,
            "status-right": leave if write else f"read-only: {leave}", "window-status-format": "",
            "window-status-current-format": "", "assume-paste-time": 0,
        }  # fmt: skip
        for name, value in options.items():
            self._run("set-option", "-t", self.session, name, str(value))


def known_terminal(term: str) -> str:
    """`term` if this machine has its description, else the first it has: tmux does not start on an unknown one."""
    folders = [*filter(None, [os.environ.get("TERMINFO"), os.path.expanduser("~/.terminfo")]), *TERMINFO]
    for name in (term, *LIKE):
        if name and "/" not in name and name != "dumb":
            places = (f"{folder}/{first}/{name}" for folder in folders for first in (name[0], f"{ord(name[0]):x}"))
            if any(os.path.exists(place) for place in places):
                return name
    return "screen"
