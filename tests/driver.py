"""Types specctl's commands as a user would: a real process, its own home, its own inventory."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import answers

PROGRAMS = Path(__file__).parent / "programs"
KERNEL_TELLS_ENDS = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 15)
"""Whether the kernel tells how a process has ended that its parent has collected."""


def poll_until(check: Callable[[], Any], *, timeout_s: float = 30.0, what: str = "it") -> Any:
    """The first true value of `check`, asked for again and again."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := check():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {timeout_s} s")
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """A process that is ending may vanish while it is being read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def objects(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Specctl:
    """specctl with a home and a project of its own."""

    def __init__(self, inventory: str | None = None, **environ: str) -> None:
        # A short path: a tmux socket below it must fit into 107 bytes.
        self.home = Path(tempfile.mkdtemp(prefix="sc-", dir="/tmp"))
        self.workdir = self.home / "w"
        self.project = self.home / "project"
        self.project.mkdir()
        self.inventory = self.home / "hosts.yaml"
        self.inventory.write_text(inventory or f"targets:\n  local: {{workdir: {self.workdir}}}\n")
        keep = {n: v for n, v in os.environ.items() if not n.startswith("SPECCTL") and n != "PYTHONUNBUFFERED"}
        self.environ = {
            **keep, "HOME": str(self.home), "XDG_STATE_HOME": str(self.home / "state"),
            "SPECCTL_INVENTORY": str(self.inventory), "NO_COLOR": "1", "COLUMNS": "160", **environ,
        }  # fmt: skip

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *words], cwd=self.project, env={**self.environ, **environ},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=as_from_a_terminal,
        )  # fmt: skip

    def __call__(self, *words: str, timeout_s: float = 120.0, **environ: str) -> Done:
        process = self.start(*words, **environ)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"specctl {' '.join(words)} hung\n{out}\n{err}") from None
        assert "Traceback (most recent call last)" not in err, err
        answers.check(words, out)
        return Done(code=process.returncode, out=out, err=err)

    def launch(self, *words: str, target: str = "local", **environ: str) -> Done:
        """`launch --json`; words up to `--` are options."""
        return self("launch", target, "--json", *words, **environ)

    def program(self, name: str) -> str:
        """The path of a test program, copied into the project so that it is shipped."""
        shutil.copy(PROGRAMS / name, self.project / name)
        return name

    def status(self, *words: str) -> dict[str, Any]:
        """The first run's row of `status --json`."""
        runs = self("status", "--json", *words).json["runs"]
        assert runs, "no run is listed"
        return dict(runs[0])

    def run_dir(self, run_id: str) -> Path:
        return self.workdir / "runs" / run_id

    def processes(self, run_id: str) -> list[int]:
        """Pids whose environment carries the run, read behind specctl's back."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"SPECCTL_RUN_ID={run_id}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                        found += [int(entry.name)] if state not in "ZX" else []
                except OSError:
                    continue
        return found

    def kill(self, run_id: str) -> None:
        """Ends the run's processes as the kernel would, with no word to specctl."""
        while pids := self.processes(run_id):
            for pid in pids:
                _kill(pid)

    def close(self) -> None:
        """Ends whatever was started and removes the home."""
        groups: list[str | None] = []
        for run in (self.workdir / "runs").glob("*"):
            self.kill(run.name)
            try:
                supervisor = json.loads((run / "supervisor.json").read_text())
                groups.append(supervisor.get("cgroup"))
                command = Path(f"/proc/{supervisor['pid']}/cmdline").read_bytes()
                if run.name.encode() in command:
                    _kill(supervisor["pid"])
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                pass  # gone, or a test has damaged it; without a process to watch it ends by itself
        for socket in self.workdir.glob("tmux-*"):
            subprocess.run(["tmux", "-S", str(socket), "kill-server"], capture_output=True, check=False)
        shutil.rmtree(self.home, ignore_errors=True)
        for group in filter(None, groups):  # its supervisor removes it, unless it was killed
            with contextlib.suppress(OSError):
                Path(group).rmdir()


def as_from_a_terminal() -> None:
    """A shell's background jobs, and whatever they start, ignore Ctrl-C; a user's command does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def over_ssh(driver: Specctl, **keys: object) -> None:
    """Gives it one target, `box`: the loopback sshd's `node1`, with the tests' own Python. Empty keys are left out."""
    wanted = {"ssh": "node1", "workdir": str(driver.workdir), "python": sys.executable, **keys}
    inside = ", ".join(f"{key}: {json.dumps(value)}" for key, value in wanted.items() if value)
    driver.inventory.write_text(f"targets:\n  box: {{{inside}}}\n")
