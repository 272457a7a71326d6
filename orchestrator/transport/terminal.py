"""A command with a terminal on the other side: what it shows comes as bytes, keys go there, a new size is passed on.

`Transport.terminal` opens one. Local commands get a pseudo-terminal of this machine, SSH hosts make one themselves.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from orchestrator.record import record

READ_BYTES = 64 << 10


@record
class Screen:
    """The terminal that somebody sits at."""

    term: str
    columns: int
    rows: int


class Terminal(ABC):
    """A running command and its terminal. To be closed; leaving it hangs up on the command."""

    @abstractmethod
    def fileno(self) -> int:
        """Readable when something came, or the end."""

    @abstractmethod
    def read(self) -> bytes | None:
        """What has come, b"" at the end, None for nothing yet; call it when `fileno` is readable. Raises `LinkLost`."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Raises `LinkLost`."""

    @abstractmethod
    def resize(self, columns: int, rows: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalTerminal(Terminal):
    """A child process with a pseudo-terminal of this machine as its controlling one."""

    def __init__(self, argv: list[str], screen: Screen, environ: Mapping[str, str]) -> None:
        self._ended = False
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            try:
                os.execvpe(argv[0], argv, {**environ, "TERM": screen.term})
            except OSError as error:
                os.write(2, f"specctl: {argv[0]}: {error.strerror}\n".encode())
            finally:
                os._exit(127)
        self.resize(screen.columns, screen.rows)

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bytes:
        try:
            return os.read(self._fd, READ_BYTES)
        except OSError:  # EIO: nobody has the other end any more
            return b""

    def write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            pass  # it has ended, which the next read tells

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        os.close(self._fd)  # hangs up
        until = time.monotonic() + 1.0
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return
            select.select([], [], [], 0.01)


class Between(Terminal):
    """Another terminal, whose output passed through one more that puts a carriage return before every line feed, as
    lxc-attach leaves the node's: without it again, since a bare line feed moves the cursor straight down."""

    def __init__(self, inner: Terminal) -> None:
        self._inner, self._held = inner, b""

    def undo(self, data: bytes) -> bytes:
        data = self._held + data
        self._held = b"\r" if data.endswith(b"\r") else b""  # what follows decides
        return data[: len(data) - len(self._held)].replace(b"\r\n", b"\n")

    def read(self) -> bytes | None:
        data = self._inner.read()
        return self.undo(data) or None if data else data

    def fileno(self) -> int:
        return self._inner.fileno()

    def write(self, data: bytes) -> None:
        self._inner.write(data)

    def resize(self, columns: int, rows: int) -> None:
        self._inner.resize(columns, rows)

    def close(self) -> None:
        self._inner.close()
