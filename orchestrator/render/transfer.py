"""How a push and a pull look: a bar that moves on a terminal, a line now and then elsewhere, and what was done."""

from __future__ import annotations

import shlex
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from orchestrator.agent.tree import shown
from orchestrator.render.live import OnScreen
from orchestrator.render.text import count, line, size
from orchestrator.verbs import pull, push

NEWS_S = 5.0
LISTED = 10


class Moving(OnScreen):
    """A `push.Watcher` that prints. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._live: Progress | None = None
        if console.is_interactive:  # a dumb terminal gets lines, too
            columns = (
                TextColumn("[cyan]{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                TextColumn("{task.fields[rate]}"), TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[files]}"),
            )  # fmt: skip
            self._live = Progress(*columns, console=console, transient=True)
        super().__init__(console, self._live)
        self._task = self._live.add_task("", visible=False, files="", rate="") if self._live else None
        self._doing = ""
        self._files = self._size = 0
        self.done_files = self.done_size = 0
        self._began = self._told_at = time.monotonic()

    def note(self, text: str) -> None:
        line(self.console, text, first=0, style="dim")

    def begin(self, doing: str, files: int, size: int) -> None:
        self._doing, self._files, self._size = doing, files, size
        self.done_files = self.done_size = 0
        self._began = self._told_at = time.monotonic()
        if self._live and self._task is not None:
            self._live.reset(
                self._task, total=size, description=doing, visible=True, files=count(files, "file"), rate=""
            )

    def at(self, files: int | None, size: int) -> None:
        self.done_size = size
        if files is not None:
            self.done_files = files
        if self._live and self._task is not None:
            of = f"{self.done_files:,} of {count(self._files, 'file')}" if files is not None else ""
            self._live.update(self._task, completed=size, files=of, rate=self._rate())
        elif time.monotonic() - self._told_at >= NEWS_S:
            self._told_at = time.monotonic()
            self.note(self.far())

    def far(self) -> str:
        """How far it is, in words."""
        text = f"{self._doing}: {size(self.done_size)} of {size(self._size)}"
        if self.done_files:
            text += f", {self.done_files:,} of {count(self._files, 'file')}"
        if rate := self._rate():
            left_s = max(0.0, (self._size - self.done_size) / self.done_size * (time.monotonic() - self._began))
            text += f", {rate}, about {left_s:.0f} s left"
        return text

    def _rate(self) -> str:
        took_s = time.monotonic() - self._began
        return f"{size(int(self.done_size / took_s))}/s" if self.done_size and took_s > 1 else ""

    @property
    def begun(self) -> bool:
        return bool(self._doing)


def show_push(console: Console, result: push.Result) -> None:
    where = f"{result.target.name}:{shown(result.destination)}"
    _show(console, f"{where}: ", "sent", result.files, result.same, result.sent_bytes, result)


def about_to_pull(console: Console, result: pull.Result) -> None:
    """What comes, before it does."""
    total = f"{count(result.total_files, 'file')}, {size(result.total_bytes)}"
    line(console, f"{result.run_id} on {result.target.name} is {result.state}; pulling {total}:", first=0)
    if result.export is not None:
        _export(console, result.export)
    if result.chosen:
        width = max(len(shown(item.path)) for item in result.items)
        for item in result.items:
            text = f"{shown(item.path):<{width}}  {size(item.size):>9}"
            if item.path == f"checkpoints/step-{result.checkpoint}":
                text += f"  the newest of {count(result.checkpoints, 'whole checkpoint')}"
            line(console, text)
        if result.checkpoint is None:
            line(console, f"no whole checkpoint is in it; what else there is: specctl pull {result.run_id} PATH")
        for log in result.own_logs:
            line(console, f"not with it, a log of its own: specctl pull {result.run_id} {shlex.quote(log)}")
        if result.broken:
            steps = ", ".join(f"step-{step}" for step in result.broken)
            line(console, f"not whole, and left there: {steps}", style="yellow")
    else:
        line(console, shown(result.source))


def _export(console: Console, export: pull.Export) -> None:
    """What it is, as its own contract says."""
    known = {"ema": "moving average of the weights", "last": "last weights"}
    words = [export.format, export.dtype, known.get(export.weights or "", export.weights)]
    step = f"step {export.step}" if export.step is not None else "an unknown step"
    line(console, f"export of {step}: {', '.join(word for word in words if word)}")
    if export.step is not None and export.newest is not None and export.newest > export.step:
        line(console, f"made before the run's newest checkpoint, step-{export.newest}", style="yellow")
    if export.blocks is None or export.kept is None:
        line(console, "nobody has seen that it decodes as it was trained (its contract has no gate)", style="yellow")
    else:
        kept = " ".join(f"{number:,}" for number in export.kept)
        line(console, f"gate passed: of {count(export.blocks, 'block')} slots 1, 2, ... were kept in {kept}")


def show_pull(console: Console, result: pull.Result) -> None:
    _show(console, f"{shown(result.destination)}: ", "pulled", result.files, result.same, result.got_bytes, result)


def _show(
    console: Console, where: str, did: str, files: int, same: int, moved: int, result: push.Result | pull.Result
) -> None:  # fmt: skip
    text = f"{did} {count(files, 'file')}, {size(moved)} in {result.took_s:.1f} s" if files else f"nothing was {did}"
    if moved and result.took_s > 1:
        text += f" ({size(int(moved / result.took_s))}/s)"
    if same:
        text += f"; {count(same, 'file')} {'was' if same == 1 else 'were'} there already"
    if result.resumed_bytes:
        text += f"; went on after {size(result.resumed_bytes)}"
    hashes = [result.sha256] if isinstance(result.sha256, str) else list((result.sha256 or {}).values())
    if files or same:
        single = len(hashes) == 1 and result.total_files == 1
        text += f"; sha256 {hashes[0]} on both sides" if single else "; every sha256 agrees on both sides"
    word, style = ("NOT WHOLE", "bold red") if result.failed else ("ok", "green")
    line(console, Text.assemble((word, style), " ", where, text), first=0)
    for title, found in (("failed", result.failed), ("left out", result.left_out)):
        for path, why in found[:LISTED]:
            line(console, f"{title}: {shown(path) if path else 'the source itself'}: {why}", style="yellow")
        if len(found) > LISTED:
            line(console, f"{title}: {len(found) - LISTED:,} more; all of them with --json", style="yellow")
