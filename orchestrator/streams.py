"""stdout and stderr as a command line needs them: they never raise for their encoding, and end it when nobody reads.

`prepare` replaces the two. A reader of stdout that has gone (`specctl status | head -1`) ends the command with 141, as
the shell would show it of any program; a disk that is full, or a stdout that is closed, is one line and exit code 1.
What is written to stderr only tells how things go, so that it can be lost without a word.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from typing import Any

PIPE_EXIT = 141
"""128 + SIGPIPE."""
ASCII = {
    "·": "-", "—": "-", "–": "-", "─": "-", "━": "-", "│": "|", "…": "...", "→": "->", "✓": "+", "✗": "x", "×": "x",
}  # fmt: skip
"""What stands for these where the terminal's encoding has them not; for any other character a question mark does."""


class Output(io.TextIOWrapper):
    """stdout: what cannot be written ends the program."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _gone(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _gone(error) from None


class Words(io.TextIOWrapper):
    """stderr: what cannot be written is let go."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            pass


def prepare() -> None:
    """Gives the program a stdin, stdout and stderr, whatever it was started with."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Else the next file or socket that is opened would get this number, and the output with it. Reading only:
            # whoever writes results to a stdout that is closed must hear of it.
            os.open(os.devnull, os.O_WRONLY if fd == 2 else os.O_RDONLY)
    sys.stdout = _stream(Output, 1, sys.stdout)
    sys.stderr = _stream(Words, 2, sys.stderr)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error("specctl", _in_ascii)


def write_text(text: str) -> None:
    """Somebody else's text on stdout: as UTF-8, whatever the locale says, since that is what it was."""
    write_bytes(text.encode("utf-8", "replace"))


def write_bytes(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
    except OSError as error:
        raise _gone(error) from None


def write_line(text: str) -> None:
    write_text(f"{text}\n")


def end_if_unread() -> None:
    """Ends the program if the reader of stdout has gone: who has nothing to write for a while hears of it only so."""
    poll = select.poll()
    poll.register(1, 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        raise _gone(BrokenPipeError())


def finish(code: int) -> int:
    """The exit code, once all that was printed has arrived."""
    try:
        sys.stdout.flush()
    except SystemExit as error:
        code = int(error.code or 0)
    sys.stderr.flush()
    return code


def _stream(kind: type[io.TextIOWrapper], fd: int, old: Any) -> io.TextIOWrapper:
    encoding = getattr(old, "encoding", None) or "utf-8"
    if old is not None:
        old.flush()
    buffer = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    terminal = os.isatty(fd)
    return kind(buffer, encoding=encoding, errors="specctl", line_buffering=terminal or fd == 2)


def _gone(error: OSError) -> SystemExit:
    """The end of the program, after which nothing more is tried on this stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):
        return SystemExit(PIPE_EXIT)
    sys.stderr.write(f"error: standard output cannot be written: {os.strerror(error.errno or 0)}\n")
    return SystemExit(1)
