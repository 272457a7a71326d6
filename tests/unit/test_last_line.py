"""The last line that says something: what a terminal would have left of a log's end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.logscan.last_line import MOST_CHARS, last_line

TQDM = "\r 10%|█         | 1/10 [00:00<00:01,  9.9it/s]\r100%|██████████| 10/10 [00:01<00:00,  9.9it/s]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", None),
        ("\n \n\t\n", None),
        ("first\ntool: error: no such option: --foo\n", "tool: error: no such option: --foo"),
        ("first\nwithout its end", "without its end"),
        ("it failed\n\n}\n)\n-----\n42\n", "it failed"),
        ("windows\r\nerror: of it\r\n", "error: of it"),
        ("\x1b[1;31merror:\x1b[0m in\tred\x07\x00 and loud\n", "error: in red and loud"),
        ("\x1b[01m\x1b[Kmain.c:3:\x1b[m\x1b[K error: no such type\n", "main.c:3: error: no such type"),
        ("╭─ Error ──────╮\n│ No such option │\n╰──────────────╯\n", "No such option"),
        ("错误：没有文件\n", "错误：没有文件"),
        ("{'loss': 50%| of | it}\n", "{'loss': 50%| of | it}"),
        # Bars, whole, broken off, drawn over, drawn otherwise.
        ("start\n" + TQDM + "\n", "start"),
        ("start\n" + TQDM + "error: no room\n", "error: no room"),
        ("start\nloading: 12it [00:01,  9.9it/s]", "start"),
        ("start\n\rread 10\rread 20\rread 30", "start"),
        ("start\n\rread 10\rread 20\rfailed: no room\n", "failed: no room"),
        ("start\nfetching [=====>    ] 45%\n", "start"),
        ("start\n   ━━━━━━━━━━╸ 1.2/1.4 MB 5 MB/s eta 0:00:01\n", "start"),
        ("start\n\x1b[2K\x1b[1Gstep one\x1b[2K\x1b[1Gfailed: no room\n", "failed: no room"),
    ],
)  # fmt: skip
def test_it_is_what_a_terminal_would_have_left(text: str, said: str | None) -> None:
    assert last_line(text.encode()) == said


def test_a_long_line_keeps_how_it_begins_and_how_it_ends() -> None:
    said = last_line(b"error: of " + b"many words " * 1000 + b"comes the end\n")
    assert said is not None and said.startswith("error: of many words") and said.endswith("words comes the end")
    assert " ... " in said and len(said) <= MOST_CHARS
    assert len(last_line(b"x" * 10_000) or "") == MOST_CHARS


def test_a_line_whose_beginning_was_not_read_does_not_pretend_to_one() -> None:
    assert last_line(b"alf of it, and the rest\n", begun=False) == "... of it, and the rest"
    assert last_line(b"alf of it\nthe rest\n", begun=False) == "the rest"


def test_bytes_that_are_no_text_are_no_line() -> None:
    garbage = bytes(range(0x80, 0x100)) * 40
    assert last_line(b"start\n" + garbage + b"\nab" + garbage) == "start"


@given(st.binary(max_size=400), st.booleans())
def test_whatever_was_printed_it_is_short_and_moves_no_cursor(data: bytes, begun: bool) -> None:
    said = last_line(data, begun=begun)
    assert said is None or (0 < len(said) <= MOST_CHARS and said.isprintable())
