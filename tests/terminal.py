"""A user's terminal: specctl in a real pseudo-terminal, with keys, a size that changes, and a screen to read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?>]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>78])")


class Typed:
    """A command that was typed into a terminal of its own."""

    def __init__(
        self, argv: list[str], *, cwd: Path, environ: Mapping[str, str], columns: int = 100, rows: int = 30
    ) -> None:
        self.seen = b""
        self._code: int | None = None
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(cwd)
                # The size is there before the program looks.
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.execve(argv[0], argv, dict(environ))
            finally:
                os._exit(127)  # else this copy would run the tests too

    @property
    def text(self) -> str:
        """All that was shown, without what only moves, colours or rings."""
        return ESCAPES.sub("", self.seen.decode("utf-8", "replace")).replace("\a", "")

    def until(self, text: str, *, timeout_s: float = 30.0) -> str:
        """Reads on until `text` has been shown."""
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            if not self._read(0.2) or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not shown:\n{self.text[-3000:]}")
        return self.text

    def until_bytes(self, data: bytes, *, timeout_s: float = 30.0) -> None:
        """The same for what only moves the cursor."""
        deadline = time.monotonic() + timeout_s
        while data not in self.seen:
            if not self._read(0.2) or time.monotonic() > deadline:
                raise AssertionError(f"{data!r} was not shown:\n{self.seen[-3000:]!r}")

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self.fd)

    @property
    def raw(self) -> bool:
        return not self.settings[3] & (termios.ECHO | termios.ICANON)

    def end(self, *, timeout_s: float = 60.0, keys: str = "", at: bytes = b"") -> int:
        """Reads to the end, and types `keys` as soon as it has shown `at`; the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(0.2):
            if keys and at in self.seen:
                self.type(keys)
                keys = ""
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not end:\n{self.text[-3000:]}")
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def close(self) -> None:
        if self._code is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        os.close(self.fd)

    def __enter__(self) -> Typed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, timeout_s: float) -> bool:
        """False at the end."""
        if not select.select([self.fd], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            return False
        self.seen += data
        return bool(data)


def typed(specctl: Any, *words: str, columns: int = 100, rows: int = 30, **environ: str) -> Typed:
    """specctl's driver's command in a terminal of its own: as `specctl(...)`, but somebody sits there."""
    kept = {name: value for name, value in specctl.environ.items() if name not in ("COLUMNS", "TMUX")}
    return Typed(
        [sys.executable, "-m", "orchestrator", *words], cwd=specctl.project, columns=columns, rows=rows,
        environ={**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environ},
    )  # fmt: skip
