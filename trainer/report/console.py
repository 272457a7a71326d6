"""What a run prints: plain lines where it is read later, a live display above which they scroll in a terminal.

Whoever parses the log gets plain lines: `key=value`, one line per worker (the target's without a step: it takes none)
and then one for the run; specctl, whose run directory is set then, even in a terminal.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainer.report.reporter import RunStep

REFRESH_HZ = 2.0
TYPED = 5
"""Columns that the last line leaves free."""
LOG_COLUMNS = 120
"""Of tables, where there is no terminal to say."""
SHOW_CURSOR = b"\x1b[?25h\n"


def complain(line: str) -> None:
    """One plain line on stderr."""
    print(f"trainer: {line}", file=sys.stderr, flush=True)


def terminal() -> Any:
    """Where tables are printed."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)


class Console(Protocol):
    """Called from any thread."""

    def open(self) -> None:
        """Somebody has something to say from now on."""

    def say(self, line: str) -> None:
        """A line, or several, on stdout."""

    def complain(self, line: str) -> None:
        """The same on stderr, with the program's name."""

    def write_error(self, text: str) -> None:
        """On stderr as it is; a stderr that is gone stops nobody."""

    def phase(self, name: str, line: str) -> None:
        """A phase begins; `line` says so."""

    def step(self, done: RunStep) -> None:
        """A step that is logged."""

    def close(self) -> None:
        """Nothing but plain lines comes after this."""

    def last_words(self, line: bytes) -> None:
        """From a signal handler, right before the process is gone: takes no lock."""


def console_for(environ: Mapping[str, str]) -> Console:
    """Live where stdout is a terminal that can be redrawn and nobody reads the log along; and where rich is there."""
    if environ.get("SPECCTL_RUN_DIR") or environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty():
        return PlainConsole()
    try:
        return LiveConsole()
    except ImportError:
        return PlainConsole()


class PlainConsole:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def open(self) -> None:
        pass

    def say(self, line: str) -> None:
        with self._lock:
            try:
                print(line, flush=True)
            except BrokenPipeError:
                # Who read along has gone, and the run goes on; what is left in the buffer must not spoil its end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                with contextlib.suppress(OSError):
                    complain("nobody reads any more what the run says; it goes on, and its records have it all")

    def complain(self, line: str) -> None:
        with self._lock:
            complain(line)

    def write_error(self, text: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def phase(self, name: str, line: str) -> None:
        self.say(line)

    def step(self, done: RunStep) -> None:
        self.say(step_lines(done))

    def close(self) -> None:
        pass

    def last_words(self, line: bytes) -> None:
        os.write(1, line)


def worker_lines(done: RunStep) -> list[str]:
    """One per worker; the loader has none."""
    step = f"step={done.step}"
    return [
        f"worker={one.name} tok/s={one.tok_s:.1f}" if one.loss is None
        else f"{step} worker={one.name}{_figure('loss', one.loss, '.4f')} tok/s={one.tok_s:.1f}"
        for one in done.workers if one.tok_s is not None
    ]  # fmt: skip


def step_lines(done: RunStep) -> str:
    """A line per worker, then one for the run."""
    lines, step = worker_lines(done), f"step={done.step}"
    tau = "" if done.tau is None else f" tau={done.tau:.2f}"
    mfu = "" if done.mfu is None else f" mfu={done.mfu:.1%}"
    lines.append(
        f"{step}{_figure('loss', done.loss, '.4f')}{tau} tok/s={done.tok_s:.1f}{mfu} lr={done.lr:.2e}"
        f"{_figure('grad_norm', done.grad_norm, '.2f')}"
        f" queue={done.queued}/{done.queue_size}"
        f" wait_target={done.mean('drafter', 'wait_input'):.0%} wait_drafter={done.mean('target', 'wait_room'):.0%}"
        f" bottleneck={done.bottleneck}"
        + (f" skipped={done.skipped}" if done.skipped else "")
        + (f" lost={','.join(done.lost)}" if done.lost else "")
    )
    return "\n".join(lines)


def _figure(name: str, value: float, form: str) -> str:
    """Of a step line; of a step that was skipped there is none, which is no nan to take for a broken run."""
    return f" {name}={value:{form}}" if math.isfinite(value) else ""


class LiveConsole:
    """Two lines at the foot of the terminal: how far the run is, and its latest figures. Raises `ImportError` without
    rich."""

    def __init__(self) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._console = RichConsole(highlight=False)
        self._phase, self._since = "", time.monotonic()
        self._step: RunStep | None = None
        self._tau: float | None = None
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=REFRESH_HZ,
            redirect_stderr=sys.stderr.isatty(),
        )  # fmt: skip

    def open(self) -> None:
        self._live.start()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def complain(self, line: str) -> None:
        complain(line)

    def write_error(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def phase(self, name: str, line: str) -> None:
        self._phase, self._since = name, time.monotonic()
        # Training and saving take turns for as long as the run lasts; what was saved is said anyway.
        if self._step is None or name not in ("train", "checkpoint", "evaluate"):
            self._console.print(line, markup=False, soft_wrap=True, style="dim")

    def step(self, done: RunStep) -> None:
        self._step, self._since = done, time.monotonic()
        self._tau = self._tau if done.tau is None else done.tau

    def close(self) -> None:
        self._live.stop()

    def last_words(self, line: bytes) -> None:
        os.write(1, SHOW_CURSOR + line)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done, quiet_s = self._step, int(time.monotonic() - self._since)
        phase = Text(f"{self._phase or 'starts'} ", style="bold")
        if done is None or quiet_s >= 10:
            phase.append(f"{datetime.timedelta(seconds=quiet_s)} ", style="yellow")
        if done is None:
            return phase
        first = Table.grid(expand=True, padding=(0, 1))
        for width in (None, 1, None, None):
            first.add_column(ratio=width, no_wrap=True)
        left = "" if done.left_s is None else f"{datetime.timedelta(seconds=round(done.left_s))} left"
        first.add_row(phase, ProgressBar(total=done.steps, completed=done.step), f"{done.step}/{done.steps}", left)
        figures = [
            f"loss {done.loss:.4f}", *([] if self._tau is None else [f"τ {self._tau:.2f}"]),
            f"{done.tok_s:,.0f} tok/s", f"{done.positions_s:,.0f} positions/s",
            *([] if done.mfu is None else [f"MFU {done.mfu:.1%}"]),
            f"queue {done.queued}/{done.queue_size}", f"bottleneck {done.bottleneck}", f"lr {done.lr:.1e}",
            f"grad norm {done.grad_norm:.2f}", *([f"skipped {done.skipped}"] if done.skipped else []),
            *([f"lost {', '.join(done.lost)}"] if done.lost else []),
        ]  # fmt: skip
        last = Text("  ".join(figures), no_wrap=True)
        # Behind it the terminal itself writes what is typed, such as ^C: that must not begin a line of its own.
        last.truncate(max(1, self._console.width - TYPED), overflow="ellipsis")
        return Group(first, last)
