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

MEANT = {
    "cancel": "stop", "check": "targets", "clean": "prune", "diagnose": "doctor", "download": "pull", "exec": "launch",
    "get": "pull", "history": "ls", "hosts": "targets", "info": "show", "inspect": "show", "kill": "stop", "list": "ls",
    "nodes": "targets", "ps": "status", "put": "push", "rm": "prune", "run": "launch", "start": "launch",
    "submit": "launch", "tail": "logs", "terminate": "stop", "top": "status", "train": "launch", "upload": "push",
}  # fmt: skip
"""What other programs call it."""


def explained(error: Any, commands: Iterable[str], argv: list[str] | None) -> ConfigError:
    """The parser's `error` about `argv` as one for people; `commands` are those that there are."""
    typed = sys.argv[1:] if argv is None else argv
    known = list(commands)
    text = sentence(error)
    if unknown := re.fullmatch(r"no such command '(.*?)'.*", text, re.DOTALL):
        word = unknown[1].lower()
        near = [MEANT[word]] if word in MEANT else difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        said = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
        about = next((f" {verb}" for verb in typed[typed.index(unknown[1]) :] if verb in known), "")
        about = about if word == "help" else ""
        return ConfigError(f"no such command '{unknown[1]}'{said}", hint=f"specctl{about} --help")
    command = next((word for word in typed if word in known), "")
    path = error.ctx.command_path if error.ctx else f"specctl {command}".strip()
    option = str(getattr(error, "option_name", ""))
    above = error.ctx.parent.command.params if error.ctx and error.ctx.parent else []
    if any(option in parameter.opts for parameter in above):
        return ConfigError(f"{option} stands before the verb", hint=path.replace(" ", f" {option} ", 1))
    if type(error).__name__ == "MissingParameter" and error.ctx:
        pieces = [piece.strip("{}") for piece in error.ctx.command.collect_usage_pieces(error.ctx)[1:]]
        return ConfigError(text, hint=f"{path} {' '.join(pieces)}; {path} --help")
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
