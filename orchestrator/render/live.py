"""What moves on a terminal while something goes on: begun and ended with its `with` block, whatever it is."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, TypeVar

from rich.console import Console

T = TypeVar("T", bound="OnScreen")


class Shown(Protocol):
    """A `rich` Live, Status or Progress."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class OnScreen:
    """The base of the watchers that print. `_shown` is None where nothing can move: they say news in lines then."""

    def __init__(self, console: Console, shown: Shown | None) -> None:
        self.console, self._shown = console, shown

    def __enter__(self: T) -> T:
        if self._shown:
            self._shown.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._shown:
            self._shown.stop()

    def shortened(self, text: str) -> str:
        """The first line of `text`, as much of it as fits beside a spinner."""
        room = self.console.width - 4
        first = text.splitlines()[0] if text else ""
        return first if len(first) <= room else first[: max(0, room - 3)] + "..."
