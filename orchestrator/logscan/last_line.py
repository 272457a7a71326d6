"""The last line of a log that says something: evidence of how a program ended that has raised no exception.

It is what a terminal would have left: frames that a progress bar has drawn over are gone, and so are a bar's own frame,
colours and control characters. Nobody claims that the line is the cause.
"""

from __future__ import annotations

import re

from orchestrator.logscan import launchers
from orchestrator.logscan.clean import scrub

MOST_CHARS, END_CHARS = 200, 75
"""Of a longer line the beginning is shown, and so much of its end."""
GAP = " ... "
REDRAWN = re.compile(rb"\x1b\[(?:[12]K|\d*[AFG])")
"""A bar goes back to the start of its line, or to one above, and draws again."""
BLOCKS = "\u2580-\u259f"
BAR = re.compile(
    rf"[^|]{{0,200}}?\d{{1,3}}%\|[ #0-9{BLOCKS}]*\|(?: *[^\s\[\]]+/[^\s\[\]]+ \[[^\[\]]*\])?"
    r"|(?:[^|:]{0,80}: )?\d+[A-Za-z]{1,8} ?\[\d\d:\d\d[^\[\]]*\]"
)
"""tqdm's, with a total and without. What stands behind it was written by somebody else."""
OTHER_BAR = re.compile(
    rf"(?=.*\d)(?:.*[{BLOCKS}\u2501\u2578\u257a]{{4}}|.*\[[=#>. -]{{4,}}\](?=.*(?:\d%|\d/\d|ETA|eta))"
    r"|.*(?:\d%|\d/\d).*\[[=#>. -]{4,}\])"
)
BAR_CHARS = 500
"""What is longer is no bar."""
EDGES = " \t|\u2502\u2503\u2551"
"""What a box puts on both sides of a text."""
GARBLED = 8
"""A line is no text if more than one in so many of its characters cannot be read."""
WORD = re.compile(r"[^\W\d_]{2}")


def last_line(data: bytes, *, begun: bool = True) -> str | None:
    """Of `data`, the end of a log, the last line that says something, as `one_line` shows it; None where no line does.

    `begun`: `data` begins where a line does, or the log itself.
    """
    lines = scrub(REDRAWN.sub(b"\r", data).replace(b"\r\n", b"\n")).split(b"\n")
    for at in range(len(lines) - 1, -1, -1):
        if said := _said(lines[at].decode("utf-8", "replace")):
            return one_line(said, begun=begun or at > 0)
    return None


def one_line(text: str, *, begun: bool = True) -> str:
    """`text` on one line, in at most `MOST_CHARS` characters, each of which can be printed."""
    plain = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    if begun and len(plain) <= MOST_CHARS:
        return plain
    # The words at the cut go, since half a number would be read as another; unless they are none.
    tail = re.sub(r"^\S{,20} ", "", plain[-END_CHARS:])
    if not begun:
        return GAP.lstrip() + tail
    return re.sub(r" \S{,20}$", "", plain[: MOST_CHARS - END_CHARS - len(GAP)]) + GAP + tail


def _said(line: str) -> str | None:
    """What is left of a line on a terminal, if that is text."""
    unread = sum(character == "\ufffd" or not (character.isprintable() or character in "\t\r") for character in line)
    if unread * GARBLED > len(line):
        return None
    *drawn, left = [part for part in line.split("\r") if part.strip()] or [""]
    same = _letters(left)
    if any(_letters(one) == same for one in drawn):
        return None
    if bar := BAR.match(left[:BAR_CHARS]):
        left = left[bar.end() :]
    elif len(left) <= BAR_CHARS and OTHER_BAR.match(left):
        return None
    text = left.strip(EDGES)
    return text if WORD.search(text) and not launchers.OWN_LINE.match(text) else None


def _letters(text: str) -> str:
    """What stays the same from one frame of a bar to the next."""
    return "".join(filter(str.isalpha, text))
