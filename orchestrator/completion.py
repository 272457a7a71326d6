"""What the shell offers when somebody presses TAB: commands, targets and runs, at once and without asking anybody.

Targets are read from hosts.yaml, runs from this user's index and from the workdirs of this machine. `answer` knows the
usual places and imports next to nothing; options, and whatever stands behind one, are left to typer, which gets the
same words from `offer`. What is offered is made of letters that no shell takes for its own.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orchestrator import index
from orchestrator.commands import ANSWERS, COMMANDS, EITHER, FILE, FILES, MORE, PLACE, RUN, TARGET

VARIABLE = "_SPECCTL_COMPLETE"
NEWEST = 100
"""So many runs are enough to choose from."""
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of targets, groups and runs: zsh evaluates what it is told."""


def answer(environ: Any) -> str | None:
    """What to print for the shell that asks; None: typer has to say."""
    shell = environ.get(VARIABLE)
    try:
        if shell == "complete_bash":
            words = shlex.split(environ["COMP_WORDS"])
            at = int(environ["COMP_CWORD"])
            before, word = words[1:at], words[at] if at < len(words) else ""
        elif shell == "complete_zsh":
            line = environ["_TYPER_COMPLETE_ARGS"]
            words = shlex.split(line)[1:]
            before, word = (words, "") if line.endswith(" ") else (words[:-1], words[-1])
        else:
            return None
    except (KeyError, ValueError, IndexError):
        return None  # an open quote, say
    if any(one.startswith("-") for one in (*before, word)):
        return None
    return _said(_offered(before, word), shell)


def _offered(before: list[str], word: str) -> list[str]:
    if not before:
        return [name for name in COMMANDS if name.startswith(word)]
    # bash takes the @ of @last for a word of its own.
    lead = before.pop() if before[-1] == "@" else ""
    places = COMMANDS.get(before[0], ()) if before else ()
    number = len(before) - 1
    kind = places[number] if number < len(places) else ""
    if kind == MORE or (not kind and places[-1:] == (MORE,)):
        kind = places[-2]
    words = WORDS[kind](word if not lead else "@" + word) if kind in WORDS else []
    return [one.removeprefix(lead) for one in words]


def _said(words: list[str], shell: str) -> str:
    if shell == "complete_bash":
        return "\n".join(words)
    quoted = "\n".join('"{}"'.format(one.replace(":", "\\\\:")) for one in words)
    return f"_arguments '*: :(({quoted}))'" if words else "_files"


def offer(kind: str) -> Callable[..., list[str]]:
    """A callback for typer."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        return WORDS[kind](incomplete, ctx.params.get("inventory") or ctx.find_root().params.get("inventory"))

    return complete


def _targets(word: str, inventory: str | None = None) -> list[str]:
    return _fitting(_names(_read(inventory), "targets"), word)


def _places(word: str, inventory: str | None = None) -> list[str]:
    hosts = _read(inventory)
    return _fitting([*_names(hosts, "targets"), *_names(hosts, "groups")], word)


def _runs(word: str, inventory: str | None = None) -> list[str]:
    """The newest runs first; a word from the middle of an id is enough if only one has it."""
    known = [launch.run_id for launch in index.launches() if not launch.refused][-NEWEST:]
    there = sorted(_on_this_machine(_read(inventory)))[-NEWEST:]
    found = sorted(filter(SAFE.fullmatch, {*known, *there}), reverse=True)
    fitting = _fitting(["@last", *found] if known else found, word)
    inside = [run_id for run_id in found if word in run_id]
    return fitting or (inside if len(inside) == 1 else [])


def _either(word: str, inventory: str | None = None) -> list[str]:
    """What `status` takes: targets and groups first, being few."""
    return [*_places(word, inventory), *_runs(word, inventory)]


def _files(word: str, inventory: str | None = None) -> list[str]:
    return _fitting((*FILES, *ANSWERS), word)


WORDS: dict[str, Callable[..., list[str]]] = {
    RUN: _runs, TARGET: _targets, PLACE: _places, EITHER: _either, FILE: _files,
}  # fmt: skip


def _fitting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _names(hosts: dict[str, Any], section: str) -> list[str]:
    found = hosts.get(section)
    return list(filter(SAFE.fullmatch, map(str, found))) if isinstance(found, dict) else []


def _read(inventory: str | None) -> dict[str, Any]:
    """hosts.yaml as it stands, found as `inventory.load_inventory` finds it; empty when it cannot be read, since TAB is
    no place for complaints."""
    explicit = inventory or os.environ.get("SPECCTL_INVENTORY")
    files = [Path(explicit)] if explicit else [Path("hosts.yaml"), Path.home() / ".config/specctl/hosts.yaml"]
    import yaml

    for path in files:
        try:
            text = path.expanduser().read_text(encoding="utf-8")
            read = yaml.load(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return read if isinstance(read, dict) else {}
    return {"targets": {"local": {}}}


def _on_this_machine(hosts: dict[str, Any]) -> list[str]:
    """The runs in the workdirs of targets that are this machine itself."""
    defaults, targets = (hosts.get(name) for name in ("defaults", "targets"))
    found: list[str] = []
    for target in targets.values() if isinstance(targets, dict) else ():
        entry = {**(defaults if isinstance(defaults, dict) else {}), **(target if isinstance(target, dict) else {})}
        if not entry.get("ssh") and not entry.get("vmid"):
            try:
                runs = Path(str(entry.get("workdir") or "~/.specctl")).expanduser() / "runs"
                found += [path.name for path in runs.iterdir()]
            except OSError:
                continue
    return found
