"""Words that wrap, and reasons that are shortened."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from orchestrator.render import transfer
from orchestrator.render.text import count, line, one_line, shorten, table


def printed(text: str, *, width: int, terminal: bool = True, first: int = 2, indent: int = 4) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    line(console, text, first=first, indent=indent)
    return out.getvalue().splitlines()


def test_a_terminal_gets_rows_cut_between_words_with_a_hanging_indent() -> None:
    assert printed("one two three four", width=13) == ["  one two", "    three", "    four"]
    assert printed("", width=13) == ["  "]
    assert printed("漢漢漢 漢漢漢", width=13) == ["  漢漢漢", "    漢漢漢"], "wide characters take two columns"


def test_a_word_wider_than_a_row_stays_whole() -> None:
    path = "/a/very/long/path/indeed"
    assert printed(f'File "{path}", line 3', width=16) == [f'  File "{path}",', "    line 3"]


def test_what_is_no_terminal_gets_one_line() -> None:
    text = "one two three four " * 20
    assert printed(text.strip(), width=20, terminal=False) == ["  " + text.strip()]


def test_a_traceback_keeps_its_own_indentation() -> None:
    assert printed('  File "x.py", line 1', width=80, first=4) == ['      File "x.py", line 1']


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("exit code 3", "exit code 3"),
        ("exit code 3; " + "and more " * 10, "exit code 3; and more and more and more and more and more…"),
        ("the record of its end says neither; " + "and more " * 10, "the record of its end says neither…"),
        ("no-such: not found (searched /a:/b:" + "x" * 100 + ")", "no-such: not found (searched…"),
        ("first line\nsecond line", "first line…"),
        ("x" * 100, "x" * 59 + "…"),
    ],
)
def test_a_reason_is_cut_at_a_clause_or_a_word_and_says_that_it_is(text: str, short: str) -> None:
    assert shorten(text) == short and len(short) <= 60


def test_things_are_counted_as_people_do() -> None:
    assert [count(n, "file") for n in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert count(2, "process") == "2 processes"


def tabled(rows: list[list[str]], *, width: int, terminal: bool = True) -> list[str] | None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    shown = table(console, ("name", ">size", "words"), rows)
    return out.getvalue().splitlines() if shown else None


def test_a_table_aligns_its_columns_and_wraps_the_last_one_under_itself() -> None:
    words = "one two three four five six seven"
    assert tabled([["a", "7", words], ["漢字", "1,000", ""]], width=40) == [
        "name   size  words",
        "─" * 39,
        "a         7  one two three four five",
        "             six seven",
        "漢字  1,000",
    ]


def test_a_table_that_has_no_room_is_not_shown_at_all() -> None:
    assert tabled([["a", "7", "x" * 30]], width=30) is None
    assert tabled([["a", "7", "short"]], width=30) is not None, "a short last column needs little"


def test_a_table_that_is_no_terminals_has_a_line_a_row_without_blanks_at_its_end() -> None:
    rows = [["a", "7", "word " * 100], ["b", "8", ""]]
    shown = tabled(rows, width=100_000, terminal=False)
    assert shown is not None and [len(line) == len(line.rstrip()) for line in shown] == [True] * 4
    assert shown[2].endswith("word") and shown[3] == "b        8"


def test_what_would_move_the_cursor_is_shown_as_it_is_written() -> None:
    assert one_line("a\nb\x1b[2J\tgrößer 漢") == "a\\nb\\x1b[2J\\tgrößer 漢"


def test_a_transfer_has_a_bar_on_a_terminal_and_words_now_and_then_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "NEWS_S", 0.0)
    for terminal, said in ((True, "50.0/100.0 MiB"), (False, "sending: 50.0 MiB of 100 MiB, 1 of 3 files")):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, force_interactive=terminal, width=80)
        with transfer.Moving(console) as moving:
            moving.begin("sending", 3, 100 << 20)
            moving.at(1, 50 << 20)
        assert said in out.getvalue() and ("\u2501" in out.getvalue()) == terminal
