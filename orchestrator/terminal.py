"""The terminal that the user sits at, lent to somebody else for a while: raw, resized with its window, and given back
as it was, however the lending ends."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import termios
import tty
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from orchestrator.transport.terminal import Screen, Terminal

READ_BYTES = 4096
LOOK_S = 1.0
RESET = b"\x1b[?1049l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1l\x1b>\x1b[?25h\x1b[0m\r\n"
"""Ends what a program that was cut off has left behind: the other screen, the mouse, pasting, keys, no cursor."""
WHOLE_SCREEN = b"\x1b7\x1b[r\x1b8"
"""Lets all of the screen scroll, and the cursor stay: tmux goes without waiting for its last words to be taken; then
they are missing, or are of the size that its window had before."""
ENDS = (signal.SIGTERM, signal.SIGHUP)


def screen() -> Screen:
    """What this terminal is."""
    rows, columns = struct.unpack("HHHH", fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8)))[:2]
    return Screen(term=os.environ.get("TERM") or "xterm", columns=columns or 80, rows=rows or 24)


class Lent:
    """A context in which this terminal is raw. `carry` connects it to another one."""

    def __init__(self) -> None:
        self._saved: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._wake: tuple[int, int] = (-1, -1)
        self._resized = False

    def __enter__(self) -> Lent:
        self._saved = termios.tcgetattr(0)
        self._wake = os.pipe()
        for end in self._wake:
            os.set_blocking(end, False)
        self._handle(signal.SIGWINCH, self._on_resize)
        for number in ENDS:
            self._handle(number, _leave)
        tty.setraw(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(OSError):  # nobody may be there any more
            _write(WHOLE_SCREEN if error is None else RESET + WHOLE_SCREEN)
        termios.tcsetattr(0, termios.TCSADRAIN, self._saved)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for end in self._wake:
            os.close(end)

    def carry(self, other: Terminal, first: bytes) -> None:
        """Until `other` ends: its bytes here, the keys there. Raises `LinkLost`."""
        _write(first)
        while True:
            there = other.fileno()
            ready = select.select([0, there, self._wake[0]], [], [], LOOK_S)[0]
            if self._wake[0] in ready:
                os.read(self._wake[0], READ_BYTES)
            if self._resized:
                self._resized = False
                now = screen()
                other.resize(now.columns, now.rows)
            if there in ready:
                data = other.read()
                if data == b"":
                    return
                _write(data or b"")
            if 0 in ready:
                keys = os.read(0, READ_BYTES)
                if not keys:
                    return
                other.write(keys)

    def _handle(self, number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        self._resized = True
        try:
            os.write(self._wake[1], b"w")
        except BlockingIOError:
            pass  # the loop has been woken already


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
