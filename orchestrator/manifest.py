"""What a bundle is: a list of files with their content hashes, and one hash over all of it.

Pure, and shared by both sides: the laptop names a bundle by this hash, the agent computes it again from what arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

from orchestrator.record import record


@record
class Entry:
    """One file of a bundle. `path` is relative, with slashes; `sha256` is of the content, or of a link's text."""

    path: str
    kind: Literal["file", "program", "link"]
    sha256: str


def text_of(data: bytes) -> tuple[str | None, str | None]:
    """(the text that a file of a bundle holds, why it holds none)"""
    try:
        if b"\0" in data:
            raise ValueError
        return data.decode("utf-8"), None
    except ValueError:
        return None, f"it is no text ({len(data):,} bytes)"


def bundle_hash(entries: Iterable[Entry]) -> str:
    """16 hex digits that name exactly these paths, kinds and contents, whatever their order."""
    total = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.path.encode("utf-8", "surrogateescape")):
        line = f"{entry.kind} {entry.sha256} {entry.path}\0"
        total.update(line.encode("utf-8", "surrogateescape"))
    return total.hexdigest()[:16]
