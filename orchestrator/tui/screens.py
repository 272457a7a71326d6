"""What lies over the list for a while: a log, exceptions, the question before a stop, and what the keys do."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from orchestrator.render import top as look
from orchestrator.tui.lists import Lines, Log

CLOSE = Binding("escape,q,backspace", "dismiss", "Back", key_display="Esc")


class LogScreen(ModalScreen[None]):
    """The log of one run, as much of it as is kept, growing."""

    BINDINGS: ClassVar[list[BindingType]] = [CLOSE, Binding("G,end", "end", "End", key_display="G")]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self.lines, self.word = Log(id="whole-log"), Static("", id="word", markup=False)

    def compose(self) -> ComposeResult:
        yield Static(self._title, classes="title", markup=False)
        yield self.lines
        yield self.word
        yield Footer(show_command_palette=False, compact=True)

    def action_end(self) -> None:
        self.lines.scroll_end(animate=False)


class TextScreen(ModalScreen[None]):
    """A text that may have to be waited for."""

    BINDINGS: ClassVar[list[BindingType]] = [CLOSE]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        yield Static(self._title, classes="title", markup=False)
        yield Lines(id="text")
        yield Footer(show_command_palette=False, compact=True)

    def say(self, text: str) -> None:
        self._text = text
        if self.is_mounted:
            self.on_resize()

    def on_resize(self) -> None:
        lines = self.query_one(Lines)
        lines.clear()
        lines.add(row for line in self._text.split("\n") for row in _wrapped(line, self.size.width - 2))
        lines.scroll_home(animate=False, immediate=True)


def _wrapped(line: str, width: int) -> list[str]:
    """Rows of at most `width`; those after the first are indented like it."""
    lead = " " * min(len(line) - len(line.lstrip()), width // 2)
    return textwrap.wrap(line, max(20, width), subsequent_indent=lead) or [""]


class Question(ModalScreen[bool]):
    """Yes or no; nothing but `y` is a yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"), Binding("n,escape,q", "answer(False)", "No", key_display="n"),
    ]  # fmt: skip

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield Static("\n".join(self._lines), id="question", markup=False)
            yield Static("[y] yes, stop it   [n] no", id="answers", markup=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


HELP = """\
The upper list has the runs, live ones first, and then the targets. Below are
the selected one and the end of its log.

  up down k j   another row; also Home End PgUp PgDn, or click it
  l  Enter      its log on the whole screen: scroll, G its end, Esc back
  e             every exception in its logs, with tracebacks
  a             its live tmux session, read-only: Ctrl-B d comes back here
  s             stop it: asks first
  /             only rows with these words in run, target, state, note, owner;
                Esc shows all again
  o             sort by: {sorts}
  r             ask every target now
  q  Ctrl-C     leave; runs go on, and so does a stop that was asked for

state      what a target has just said of the run. Where it has not said so
           again since, the row is grey and in the past tense, "was RUNNING":
           what the run does now is not known.
seen       how old that is: the time since the look began that was answered.
curves     beside tok/s and loss: the later half of the run's steps; below:
           all of them. Blank: nothing was written down there.
last step  how long ago the step advanced.
GPU        "open in": the runs of specctl whose processes hold the device
           open. Others cannot be told from here.
"""


def help_text() -> str:
    return HELP.format(sorts=", ".join(look.SORTS))
