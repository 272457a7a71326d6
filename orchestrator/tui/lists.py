"""Two widgets that draw lines themselves, only those that have changed: the list of runs, and lines of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from orchestrator.render import top as look
from orchestrator.render.text import one_line
from orchestrator.verbs.tail import LINES, Tail
from orchestrator.verbs.trend import Trends

Cells = list[tuple[str, str]]


@lru_cache(256)
def _style(words: str, selected: bool) -> Style:
    style = Style.parse(words or "none")
    return style + Style(reverse=True) if selected else style


class RunList(ScrollView, can_focus=True):
    """Runs and targets. The selected one stays selected wherever it moves to."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False), Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False), Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False), Binding("end,G", "move(1000000)", show=False),
    ]  # fmt: skip

    class Selected(Message):
        """Another row is selected."""

    class Opened(Message):
        """The selected row was clicked once more."""

    def __init__(self, trends: Trends, bars: str, *, id: str) -> None:
        super().__init__(id=id)
        self.rows: list[look.Row] = []
        self.columns: list[look.Column] = []
        self._trends, self._bars = trends, bars
        self._at = 0
        self._moved = False
        """Somebody has chosen a row; until then the first one is selected, whichever that is."""
        self._drawn: dict[int, tuple[Cells, bool]] = {}

    @property
    def selected(self) -> look.Row | None:
        return self.rows[self._at] if self.rows else None

    def hold(self) -> None:
        """The selected row is meant, and stays selected."""
        self._moved = True

    def show(self, rows: list[look.Row]) -> None:
        """Takes the place of what was shown; what looks the same is not drawn again."""
        before = self.selected
        self.rows = rows
        if before is not None and self._moved:
            self._at = next((at for at, row in enumerate(rows) if row.key == before.key), min(self._at, len(rows) - 1))
        else:
            self._at = 0
        self._at = max(0, self._at)
        self.columns = look.columns(self.size.width, rows)
        self.virtual_size = Size(self.size.width, len(rows))
        self._keep_in_view()
        top = self.scroll_offset.y
        for y in range(top, top + self.size.height):
            if self._drawn.get(y) != self._line(y):
                self.refresh_line(y)
        if before is None or self.selected is None or before.key != self.selected.key:
            self.post_message(self.Selected())

    def _line(self, y: int) -> tuple[Cells, bool] | None:
        if y >= len(self.rows):
            return None
        return look.cells(self.rows[y], self.columns, self._trends, self._bars), y == self._at

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        line = self._line(y)
        if line is None:
            self._drawn.pop(y, None)
            return Strip.blank(self.size.width, self.rich_style)
        self._drawn[y] = line
        cells, selected = line
        # The state keeps its colour when it is selected; a whole line of colours could not be read.
        segments = [
            Segment(text + " " * look.GAP, _style(style if not selected or at == 0 else "", selected))
            for at, (text, style) in enumerate(cells)
        ]
        return Strip(segments).adjust_cell_length(self.size.width, _style("", selected))

    def action_move(self, by: int) -> None:
        self._select(max(0, min(len(self.rows) - 1, self._at + by)))

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 1))

    def _select(self, at: int) -> None:
        self._moved = True
        if self.rows and at != self._at:
            self._at, old = at, self._at
            self.refresh_line(old)
            self.refresh_line(at)
            self._keep_in_view()
            self.post_message(self.Selected())

    def _keep_in_view(self) -> None:
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if self._at < top:
            self.scroll_to(y=self._at, animate=False, immediate=True)
        elif self._at >= top + height:
            self.scroll_to(y=self._at - height + 1, animate=False, immediate=True)

    def on_resize(self) -> None:
        self._drawn.clear()
        self.show(self.rows)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        at = event.y + self.scroll_offset.y
        if at >= len(self.rows):
            return
        if at == self._at:
            self.post_message(self.Opened())
        self._select(at)


class Lines(ScrollView, can_focus=True):
    """Lines of text, as many as are kept; at the end it stays at the end."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "scroll_home", show=False), Binding("G", "scroll_end", show=False),
        Binding("k", "scroll_up", show=False), Binding("j", "scroll_down", show=False),
    ]  # fmt: skip

    def __init__(self, *, id: str | None = None, style: Callable[[str], str] = lambda line: "") -> None:
        super().__init__(id=id)
        self._lines: deque[str] = deque(maxlen=LINES)
        self._widest = 0
        self._style_of = style

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def clear(self) -> None:
        self._lines.clear()
        self._widest = 0
        self.virtual_size = Size(0, 0)
        self.refresh()

    def add(self, lines: Iterable[str]) -> None:
        new = [one_line(line.expandtabs()) for line in lines]
        gone = max(0, len(self._lines) + len(new) - LINES)
        self._lines.extend(new)
        self._widest = max(self._widest, *(len(line) for line in new)) if new else self._widest
        self.virtual_size = Size(self._widest, len(self._lines))
        if gone and self._anchor_released:
            self.scroll_to(y=max(0, self.scroll_offset.y - gone), animate=False, immediate=True)
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value > old_value and new_value >= self.max_scroll_y:
            self.anchor()  # who goes up has released it

    def render_line(self, y: int) -> Strip:
        left, top = self.scroll_offset
        width = self.size.width
        if top + y >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        line = self._lines[top + y]
        strip = Strip([Segment(line, _style(self._style_of(line), False))])
        return strip.crop_extend(left, left + width, self.rich_style)


class Log(Lines):
    """What a `Tail` keeps."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, style=_of_log)
        self._tail: Tail | None = None
        self._taken = 0

    def on_mount(self) -> None:
        self.anchor()

    def follow(self, tail: Tail | None) -> None:
        """Shows the lines of `tail` from now on; None: nothing."""
        if tail is not self._tail:
            self._tail, self._taken = tail, 0
            self.clear()
            if self.is_attached:
                self.anchor()
        self.pull()

    def pull(self) -> None:
        if self._tail is not None:
            self._taken, new = self._tail.after(self._taken)
            if new:
                self.add(new)


def _of_log(line: str) -> str:
    return "dim" if line.startswith("==> ") else ""
