"""One command line out of an argv, for whatever shell the login user of a node has."""

from __future__ import annotations

import re

_PLAIN = re.compile(r"[A-Za-z0-9_./:-]+")
_SPECIAL = re.compile(r"['\\]")


def join(argv: list[str]) -> str:
    """Read back as `argv` by sh, dash, bash, ksh, zsh and fish.

    As `shlex.join`, but for the backslash: fish knows it inside single quotes too, and all of them alike inside double
    ones. (csh has no quotes that hold a line break; its users get an error that says so.)
    """
    return " ".join(word if _PLAIN.fullmatch(word) else f"'{_SPECIAL.sub(_apart, word)}'" for word in argv)


def _apart(match: re.Match[str]) -> str:
    return "'\"'\"'" if match[0] == "'" else "'\"\\\\\"'"
