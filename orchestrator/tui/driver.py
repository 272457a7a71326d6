"""The terminal that the screen is drawn on: stdout, in what characters it has, until it is closed."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size


class Terminal(LinuxDriver):
    """Textual draws on stderr, which may be a file, and expects a terminal that can print anything."""

    def __init__(
        self, app: App[int], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._file = sys.__stdout__
        encoding = getattr(sys.__stdout__, "encoding", None) or "ascii"
        self._plain: Callable[[str], str] | None = None
        if not encoding.lower().startswith("utf"):
            self._plain = lambda text: text.encode(encoding, "specctl").decode(encoding)

    def write(self, data: str) -> None:
        super().write(self._plain(data) if self._plain else data)

    def run_input_thread(self) -> None:
        try:
            super().run_input_thread()
        except OSError:
            if not closed():
                raise
            hang_up()


def closed() -> bool:
    """Whether nobody can look any more: the window is closed, or the link to it lost."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def size() -> Size | None:
    """Of the terminal's window; None when it has none to tell."""
    try:
        return Size(*os.get_terminal_size(1))
    except OSError:
        return None


def hang_up() -> NoReturn:
    """Ends the program at once, and as the kernel does whose terminal is gone, whoever of the two sees it first. Saying
    good-bye to such a terminal would wait for ever."""
    signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
    os._exit(128 + signal.SIGHUP)  # where hang-ups are ignored
