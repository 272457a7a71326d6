"""In what the code of two runs differs: first by hash, file by file; then, of what differs, line by line.

Only the texts that differ are asked for, so that nothing travels for two runs of the same code.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from orchestrator.manifest import Entry
from orchestrator.record import record

TEXTS_LIMIT = 200
"""Files whose text is compared; of more, only the names."""
PROJECT = "project/"
"""Where a bundle holds what a person has written; beside it, specctl's own trainer."""


@record
class Text:
    """What stands in a file, or why it cannot be shown."""

    text: str | None
    why: str | None = None


@record
class Code:
    """The files of a bundle, and how to get the texts of some of them."""

    entries: Sequence[Entry]
    texts: Callable[[Sequence[str]], Mapping[str, Text]]


@record
class FileChange:
    """One file. `diff` is a unified diff, empty where there is none to show, for the reason `why`."""

    path: str
    how: Literal["added", "removed", "changed"]
    diff: str = ""
    why: str | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """(lines added, lines removed)."""
        lines = self.diff.splitlines()[2:]
        return sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines)


def changes(a: Code, b: Code) -> list[FileChange]:
    """From `a` to `b`: what a person has changed first, and then specctl's own, where another version was used."""
    of_a, of_b = ({entry.path: entry for entry in code.entries} for code in (a, b))
    paths = [path for path in {**of_a, **of_b} if of_a.get(path) != of_b.get(path)]
    paths.sort(key=lambda path: (not path.startswith(PROJECT), path))
    wanted = paths[:TEXTS_LIMIT]
    texts_a, texts_b = (
        code.texts(there) if (there := [path for path in wanted if path in of]) else {}
        for code, of in ((a, of_a), (b, of_b))
    )
    return [_change(path, of_a.get(path), of_b.get(path), texts_a.get(path), texts_b.get(path)) for path in paths]


def _change(path: str, a: Entry | None, b: Entry | None, old: Text | None, new: Text | None) -> FileChange:
    how: Literal["added", "removed", "changed"] = "added" if a is None else "removed" if b is None else "changed"
    shown, why, texts = path.removeprefix(PROJECT), None, []
    for entry, text in ((a, old), (b, new)):
        if entry is not None and text is None:
            why = "too many files differ to be compared line by line"
        elif entry is not None and text is not None:
            why = why or text.why
        texts.append(text.text or "" if text is not None else "")
    if why:
        return FileChange(path=shown, how=how, why=why)
    diff = unified(texts[0], texts[1], f"a/{shown}" if a else "/dev/null", f"b/{shown}" if b else "/dev/null")
    if not diff:
        why = f"a {a.kind} has become a {b.kind}" if a and b and a.kind != b.kind else "it is empty"
    return FileChange(path=shown, how=how, diff=diff, why=why)


def unified(old: str, new: str, old_name: str, new_name: str) -> str:
    """A unified diff that `patch` takes; empty when both are the same."""
    lines = []
    # By line feeds alone: other characters that Python takes for the end of a line stand inside one of a patch.
    for line in difflib.unified_diff(_lines(old), _lines(new), old_name, new_name):
        lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(lines)


def _lines(text: str) -> list[str]:
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + parts[-1:] * bool(parts[-1])
