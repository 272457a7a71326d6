"""What was typed wrong, in one line, and what to type instead: the parser's own complaints, said as all errors are."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any

from orchestrator.errors import ConfigError

REWORDED = (
    ("Value error, ", ""),
    ("Input should be a valid integer, unable to parse string as an integer", "needs a whole number"),
    ("Input should be", "must be"),
)


def explained(error: Any, commands: Iterable[str], argv: list[str] | None) -> ConfigError:
    """The parser's `error` about `argv` as one for people; `commands` are those that there are."""
    typed = sys.argv[1:] if argv is None else argv
    known = list(commands)
    text = sentence(error)
    if unknown := re.fullmatch(r"no such command '(.*?)'.*", text, re.DOTALL):
        near = difflib.get_close_matches(unknown[1].lower(), known, n=1, cutoff=0.5)
        said = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
        return ConfigError(f"no such command '{unknown[1]}'{said}", hint="specctl --help")
    command = next((word for word in typed if word in known), "")
    path = error.ctx.command_path if error.ctx else f"specctl {command}".strip()
    return ConfigError(text, hint=f"{path} --help")


def sentence(error: Any) -> str:
    """What the parser says, as the other errors here are said."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    if type(error).__name__ == "NoSuchOption":
        near = nearest(error)
        return f"no such option: {error.option_name}" + (f"; did you mean {near}?" if near else "")
    for old, new in REWORDED:
        text = text.replace(old, new)
    return text[:1].lower() + text[1:]


def nearest(error: Any) -> str | None:
    """The option that was meant by one that does not exist."""
    option = str(error.option_name) if type(error).__name__ == "NoSuchOption" else ""
    known = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
    near = difflib.get_close_matches(option, [name for name in known if name.startswith("--")], n=1)
    return near[0] if near and option.startswith("--") else None
