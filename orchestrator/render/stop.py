"""How a stop looks: one line that moves on a terminal, news only elsewhere, and what is left at the end."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from orchestrator.model import Process
from orchestrator.render.live import OnScreen
from orchestrator.render.text import colour, count, line, plain
from orchestrator.verbs.stop import Result

NEWS_S = 10.0
WHY = {"D": ": it hangs in the kernel, over a disk, a network or a GPU that does not answer, and ends when that does"}


class Waiting(OnScreen):
    """A `stop.Watcher` that prints. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        spinner = "line" if plain(console) else "dots"
        self._live = Status("stopping", console=console, spinner=spinner) if console.is_interactive else None
        super().__init__(console, self._live)
        self._doing = ""
        self._told_at = 0.0

    def note(self, text: str) -> None:
        line(self.console, text, indent=0, style="dim")

    def waiting(self, doing: str, waited_s: float, grace_s: float, remaining: list[Process]) -> None:
        text = words(doing, waited_s, grace_s, remaining)
        if self._live:
            self._live.update(f"[cyan]{escape(self.shortened(text))}[/]")
        elif doing != self._doing or time.monotonic() - self._told_at >= NEWS_S:
            self._doing, self._told_at = doing, time.monotonic()
            self.note(text)


def words(doing: str, waited_s: float, grace_s: float, remaining: list[Process]) -> str:
    """What a stop is waiting for."""
    names = ", ".join(f"{process.name} ({process.pid})" for process in remaining[:4])
    names += f" and {len(remaining) - 4} more" if len(remaining) > 4 else ""
    names = names or "its supervisor, which records the end"
    if doing == "checkpoint":
        return f"it is writing a checkpoint, waiting {waited_s:.0f} s: {names}"
    if doing in ("kill", "done"):
        return f"killed, looking again: {names}"
    return f"waiting {waited_s:.0f} of {grace_s:.0f} s, then KILL: {names}"


def show(console: Console, result: Result) -> None:
    verdict = result.verdict
    lead = Text.assemble((verdict.state, colour(verdict.state)), f" {result.probe.run_id}: ")
    if result.remaining:
        left = f"{count(len(result.remaining), 'process')} {'is' if len(result.remaining) == 1 else 'are'} left"
        line(console, lead + Text(f"not stopped, {left}:"), first=0)
        for one in result.remaining:
            line(console, f"pid {one.pid}  {one.name}  state {one.state}{WHY.get(one.state, '')}")
        return
    said = "no process of it is left" if result.was_live else "it had ended before; no process of it is left"
    line(console, lead + Text(f"{said} ({verdict.why})"), first=0)
    for text in result.kept:
        line(console, f"{text}: it may be another container's; the node's own nvidia-smi says whose", style="yellow")
