"""The screen itself: it shows the board, follows the selected run's log, and does what a key asks for.

Nothing here waits for a target: looks, logs, exceptions and stops run in threads, which only leave word.
"""

from __future__ import annotations

import asyncio
import io
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ClassVar

from rich.console import Console
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message
from textual.timer import Timer
from textual.widgets import Footer, Input, Static

from orchestrator import index, terminal
from orchestrator.crew import Crew
from orchestrator.errors import SpecctlError
from orchestrator.fleet import Fleet
from orchestrator.model import Process
from orchestrator.render import log_errors as show_errors
from orchestrator.render import stop as show_stop
from orchestrator.render import top as look
from orchestrator.render import top_details
from orchestrator.render.text import shorten
from orchestrator.resolve import Run
from orchestrator.tui import driver
from orchestrator.tui.lists import Log, RunList
from orchestrator.tui.screens import LogScreen, Question, TextScreen, help_text
from orchestrator.verbs import attach, log_errors
from orchestrator.verbs import stop as stopping
from orchestrator.verbs.tail import Tail
from orchestrator.verbs.top import Board

TICK_S = 1.0
SETTLE_S = 0.3
"""A row that is only passed by has no log opened."""
AGAIN_S = 5.0
AT_ONCE = 16
NOTE_S = 8.0
INTERRUPTED = 130


class Top(App[int]):
    """`run` returns the exit code."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #head, #columns { height: 1; }
    #runs { height: 1fr; min-height: 3; scrollbar-size-vertical: 1; overflow-x: hidden; }
    #details { height: auto; border-top: solid ansi_bright_black; }
    #log { height: 1fr; min-height: 2; border-top: solid ansi_bright_black; scrollbar-size: 1 1; }
    #word { height: 1; text-style: dim; display: none; }
    #note { height: auto; max-height: 4; display: none; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #whole-log, #text { height: 1fr; scrollbar-size: 1 1; }
    .title { height: 1; text-style: bold; }
    LogScreen, TextScreen { background: ansi_default; }
    Question { align: center middle; }
    #box { width: auto; max-width: 100%; height: auto; border: solid; padding: 0 1; }
    #question, #answers { width: auto; height: auto; }
    #answers { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "Help"),
        Binding("l,enter", "logs", "Logs", key_display="l"), Binding("e", "errors", "Errors"),
        Binding("a", "attach", "Attach"), Binding("s", "stop", "Stop"), Binding("slash", "filter", "Filter"),
        Binding("o", "sort", "Sort"), Binding("r", "refresh", "Refresh"),
        Binding("q", "leave(0)", "Quit"),
        Binding("ctrl+c", f"leave({INTERRUPTED})", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
        Binding("escape", "unfilter", show=False),
    ]  # fmt: skip

    class News(Message):
        """Some target has answered."""

    class LogNews(Message):
        """Lines have come."""

    class Told(Message):
        """What a job in a thread came to."""

        def __init__(self, then: Callable[[], None]) -> None:
            super().__init__()
            self.then = then

    def __init__(self, fleet: Fleet, board: Board, *, program: str, plain: bool) -> None:
        super().__init__(driver_class=driver.Terminal, ansi_color=True)
        self.theme = "ansi-dark"
        self.fleet, self.board, self.program = fleet, board, program
        self.stops: dict[str, str] = {}
        """What is to be said of the stops that go on, by run id."""
        self._note_timer: Timer | None = None
        self.bug: Exception | None = None
        self._plain = plain
        self._bars = look.ASCII_BARS if plain else look.BARS
        self._sort: look.Sort = look.SORTS[0]
        self._wanted = ""
        self._tail: Tail | None = None
        self._failed: Tail | None = None
        """The one that will be tried once more."""
        self._crew = Crew(AT_ONCE)
        self._news_is_out = self._log_news_is_out = False
        # News may still come when the screen has gone, and before it is there: these always are.
        self._head, self._columns, self._about, self._word, self._note = (
            Static("", id=name, markup=False) for name in ("head", "columns", "details", "word", "note")
        )
        self._runs, self._lines = RunList(board.trends, self._bars, id="runs"), Log(id="log")
        self._filter = Input(placeholder="words in run, target, state, note, owner", id="filter", compact=True)
        board.changed = self._changed

    def compose(self) -> ComposeResult:
        yield from (
            self._head, self._columns, self._runs, self._about, self._lines, self._word, self._note, self._filter,
            Footer(show_command_palette=False, compact=True),
        )  # fmt: skip

    def on_mount(self) -> None:
        self._runs.focus()
        self._lines.can_focus = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            code = INTERRUPTED if number == signal.SIGINT else 128 + number
            loop.add_signal_handler(number, partial(self.exit, code))
        self.set_interval(TICK_S, self._tick)
        self.board.start()
        self._show()

    def _handle_exception(self, error: Exception) -> None:
        """Textual would print the values of all variables, and what they hold is not for every eye."""
        self.bug = self.bug or error
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        self._close_messages_no_wait()

    # --- what is shown ----------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """From any thread; however much news there is, one message is under way."""
        if not self._news_is_out:
            self._news_is_out = True
            if not self.post_message(self.News()):
                self._news_is_out = False  # there is no screen yet

    def on_top_news(self) -> None:
        self._news_is_out = False
        if self.board.broken is not None:
            raise self.board.broken
        self._show()

    def _tick(self) -> None:
        if driver.closed() and not self.is_headless:
            driver.hang_up()
        self._fit()
        self._show()

    def _fit(self) -> None:
        """Draws for the window's size, should word of a change have been lost while the terminal was lent."""
        size = None if self.is_headless else driver.size()
        if size is None or size == self.screen.size:
            return
        # One that the app knows already it does not tell the screen again.
        (self.screen if size == self.size else self).post_message(Resize(size, size))

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        sightings = self.board.sightings()
        self._runs.show(look.rows(sightings, sort=self._sort, wanted=self._wanted))
        _put(self._columns, look.head(self._runs.columns))
        head = look.summary(sightings, every_s=self.board.every_s, sort=self._sort, wanted=self._wanted)
        _put(self._head, head)
        self._details()

    def _details(self) -> None:
        row = self.selected
        height = max(2, min(14, self.size.height // 4))
        lines = [Text("nothing is selected", style="dim")]
        if row is not None:
            lines = top_details.details(
                row, self.board.trends, width=self.size.width, height=height, bars=self._bars, program=self.program
            )
            if row.run is not None and row.run.run_id in self.stops:
                lines = [lines[0], Text(self.stops[row.run.run_id], style="bold yellow"), *lines[1 : height - 1]]
        for line in lines:
            line.truncate(max(1, self.size.width), overflow="ellipsis")
        # As high for one run as for another: the list above must not move under whoever walks through it.
        lines += [Text()] * (height - len(lines))
        _put(self._about, Text("\n").join(lines))

    # --- the selected run -------------------------------------------------------------------------------------------

    @property
    def selected(self) -> look.Row | None:
        return self._runs.selected

    def on_run_list_selected(self) -> None:
        self._details()
        if self._tail is not None and (self.selected is None or self.selected.run is None or
                                       self.selected.run.probe.nonce != self._tail.run.probe.nonce):  # fmt: skip
            self._tail.close()
            self._tail = None
            self._pull()
        row = self.selected
        if row is not None and row.run is not None:
            self.set_timer(SETTLE_S, partial(self._open, row.key))

    def _open(self, key: str) -> None:
        """Opens the log of the row that has stayed selected, and has its curve read."""
        row = self.selected
        if row is None or row.run is None or row.key != key or self._tail is not None:
            return
        if not row.fresh:
            # A target that does not answer is not asked twice: its log is opened when it is seen again.
            self.set_timer(TICK_S, partial(self._open, key))
            return
        self.board.trends.want(row.run)
        self._tail = Tail(self.fleet, row.run, changed=self._log_changed)
        self._pull()

    def _log_changed(self) -> None:
        if not self._log_news_is_out:
            self._log_news_is_out = True
            if not self.post_message(self.LogNews()):
                self._log_news_is_out = False

    def on_top_log_news(self) -> None:
        self._log_news_is_out = False
        self._pull()

    def _pull(self) -> None:
        row = self.selected
        word = self._tail.word if self._tail is not None else ""
        if self._tail is None and row is not None and row.run is not None and row.old:
            word = f"its log is not followed: {row.old}"
        self._lines.follow(self._tail)
        for place in (self._word, *(screen.word for screen in self._log_screens)):
            place.display = bool(word)
            _put(place, Text(word))
        for screen in self._log_screens:
            screen.lines.follow(self._tail)
        tail = self._tail
        if tail is not None and tail.failed is not None and self._failed is not tail:
            self._failed = tail
            self.set_timer(AGAIN_S, partial(self._again, tail))

    def _again(self, tail: Tail) -> None:
        """A log that could not be had, of a run that lives on: its target may be back, or the run has begun by now."""
        row = self.selected
        if self._tail is not tail or row is None or row.run is None or not row.run.verdict.live:
            return
        if not row.fresh:
            self.set_timer(AGAIN_S, partial(self._again, tail))
            return
        self._tail = None
        self._open(row.key)

    @property
    def _log_screens(self) -> list[LogScreen]:
        return [screen for screen in self.screen_stack if isinstance(screen, LogScreen)]

    # --- keys -------------------------------------------------------------------------------------------------------

    def note(self, text: str, *, bad: bool = False) -> None:
        """Says `text` above the keys, for a while."""
        _put(self._note, Text(text, style="bold red" if bad else "bold"))
        self._note.display = bool(text)
        if self._note_timer is not None:
            self._note_timer.stop()
        self._note_timer = self.set_timer(NOTE_S, partial(self.note, "")) if text else None

    def _run_or_say(self) -> Run | None:
        row = self.selected
        if row is None or row.run is None:
            self.note("select a run first")
            return None
        self._runs.hold()
        return row.run

    def on_run_list_opened(self) -> None:
        self.action_logs()

    def action_logs(self) -> None:
        if (run := self._run_or_say()) is not None:
            self._open(run.probe.nonce or run.run_id)
            self.push_screen(LogScreen(f"{run.run_id} on {run.target.name}"))
            self.call_after_refresh(self._pull)

    def action_errors(self) -> None:
        if (run := self._run_or_say()) is None:
            return
        screen = TextScreen(f"exceptions of {run.run_id} on {run.target.name}", "its logs are being searched ...")
        self.push_screen(screen)

        def job() -> Callable[[], None]:
            try:
                result = log_errors.of_run(self.fleet, run)
                said = [*show_errors.texts(result, time.time()), show_errors.of_what(result)]
            except SpecctlError as error:
                said = [_said(error)]
            return lambda: screen.say("\n".join(said))

        self._do(job)

    def action_stop(self) -> None:
        row = self.selected
        if (run := self._run_or_say()) is None or row is None:
            return
        if row.fresh and not run.verdict.live and not run.probe.tree:
            self.note(f"{run.run_id} has ended: {run.verdict.state}")
            return
        if run.run_id in self.stops:
            self.note(f"{run.run_id} is being stopped already")
            return
        lines = [f"Stop {run.run_id}", f"on {run.target.name} ({run.target.place})?", ""]
        lines += [f"{row.state}: {shorten(run.verdict.why, 60)}" if row.fresh else row.old]
        if run.probe.owner != index.owner():
            lines += [f"It belongs to {run.probe.owner}."]
        lines += [f"TERM, then KILL after {stopping.GRACE_S:.0f} s.", ""]
        self.push_screen(Question(lines), lambda yes: self._stop(run) if yes else None)

    def _stop(self, run: Run) -> None:
        self.stops[run.run_id] = "a stop is being asked for"
        self._details()

        def job() -> Callable[[], None]:
            watcher = _Watcher(lambda text: self._say_of_stop(run.run_id, text))
            try:
                result = stopping.of_run(self.fleet, run, grace_s=stopping.GRACE_S, now=False, watcher=watcher)
                text, bad = _printed(result), bool(result.remaining)
            except SpecctlError as error:
                text, bad = _said(error), True

            def then() -> None:
                self.stops.pop(run.run_id, None)
                self.note(text, bad=bad)
                self.board.refresh()

            return then

        self._do(job)

    def _say_of_stop(self, run_id: str, text: str) -> None:
        def then() -> None:
            self.stops[run_id] = f"stopping: {text}"
            self._details()

        self.post_message(self.Told(then))

    def action_attach(self) -> None:
        if (run := self._run_or_say()) is None:
            return
        self.note(f"entering the session of {run.run_id} ...")

        def job() -> Callable[[], None]:
            try:
                now = attach.look_again(self.fleet, run)
                attach.refuse_ended(now)
                session = attach.enter(self.fleet, now, terminal.screen(), write=False, utf8=not self._plain)
            except SpecctlError as error:
                text = _said(error)
                return lambda: self.note(text, bad=True)
            return lambda: self._attached(now, session)

        self._do(job)

    def _attached(self, run: Run, session: attach.Session) -> None:
        """The terminal is the session's until it is left."""
        self.board.pause(True)
        try:
            self.note("")
            with self.suspend(), session.terminal, terminal.Lent() as lent:
                lent.carry(session.terminal, session.first)
        except SpecctlError as error:
            self.note(_said(error), bad=True)
        finally:
            self.board.pause(False)
        self.board.refresh()
        self.refresh(layout=True)

    def _do(self, job: Callable[[], Callable[[], None]]) -> None:
        """Does `job` in a thread, and what it returns here."""

        def then(done: Future[Callable[[], None]]) -> None:
            try:
                done.result()()
            except EOFError:
                self.note("a connection ended in the middle; what was asked for may have been done", bad=True)

        self._crew.do(job).add_done_callback(lambda done: self.post_message(self.Told(partial(then, done))))

    def on_top_told(self, message: Told) -> None:
        message.then()

    def action_filter(self) -> None:
        self._filter.display = True
        self._filter.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._show()

    def on_input_submitted(self) -> None:
        self._filter.display = bool(self._filter.value)
        self._runs.focus()

    def action_unfilter(self) -> None:
        self._filter.value = ""
        self._filter.display = False
        self._runs.focus()

    def action_sort(self) -> None:
        self._sort = look.SORTS[(look.SORTS.index(self._sort) + 1) % len(look.SORTS)]
        self._show()

    def action_refresh(self) -> None:
        self.board.refresh()

    def action_help(self) -> None:
        self.push_screen(TextScreen("specctl top", help_text()))

    def action_leave(self, code: int) -> None:
        self.exit(code)


def _put(place: Static, text: Text) -> None:
    """Draws it only if it has changed, and everything else only if it needs another number of lines."""
    if place.content != text:
        resized = str(place.content).count("\n") != text.plain.count("\n")
        place.update(text, layout=resized)


class _Watcher:
    """A `stop.Watcher` that passes words on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def note(self, text: str) -> None:
        self._say(text)

    def waiting(self, doing: str, waited_s: float, grace_s: float, remaining: list[Process]) -> None:
        self._say(show_stop.words(doing, waited_s, grace_s, remaining))


def _said(error: SpecctlError) -> str:
    return f"{error}\n{error.hint}" if error.hint else str(error)


def _printed(result: stopping.Result) -> str:
    """What `specctl stop` prints."""
    page = Console(file=io.StringIO(), width=200, color_system=None, highlight=False)
    show_stop.show(page, result)
    return page.file.getvalue().strip()  # type: ignore[attr-defined, no-any-return]
