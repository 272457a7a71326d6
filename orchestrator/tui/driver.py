"""The terminal that the screen is drawn on: stdout, in what characters it has, until it is closed."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

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


def leave(code: int) -> None:
    """Ends the program at once: on a terminal that is gone, saying good-bye would wait for ever."""
    os._exit(code)
