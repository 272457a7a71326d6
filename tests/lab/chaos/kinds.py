"""The kinds of programs that are launched, and how each ends when nobody touches it."""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = re.compile(rb"tok-[0-9a-f]{4}-\d+-\d+-[0-9a-f]{6}")
"""Names one launch in every line of its program and in the arguments of its processes: seed, lane, number, chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """`ending` is the state, and for FAILED and KILLED the word that must be said of it."""

    name: str
    state: str
    said: str = ""
    lasting: bool = False
    """Lives for 40 s, long enough for any launch to see it."""
    whole_lines: bool = True
    """Every line of it carries the token; a traceback's do not."""
    steps: bool = False
    shell: str = ""
    """A shell's line around it, with {act} for the program itself."""

    def argv(self, token: str) -> list[str]:
        act = ["python3", "act.py", self.name, token]
        return ["sh", "-c", self.shell.format(act=" ".join(act))] if self.shell else act


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="steps", state="SUCCEEDED", said="exit code 0", steps=True),
        Kind(name="endless", state="SUCCEEDED", said="exit code 0", lasting=True, steps=True),
        Kind(name="deaf", state="SUCCEEDED", said="exit code 0", lasting=True, steps=True),
        Kind(name="daemon", state="FAILED", said="exit code 9", lasting=True, steps=True),
        Kind(name="two_logs", state="SUCCEEDED", said="exit code 0", lasting=True),
        Kind(name="worker", state="SUCCEEDED", said="exit code 0", whole_lines=False),
        Kind(name="silent", state="SUCCEEDED", said="exit code 0", lasting=True),
        Kind(name="burst", state="SUCCEEDED", said="exit code 0"),
        Kind(name="import", state="FAILED", said="exit code 1", whole_lines=False),
        Kind(name="exit0", state="SUCCEEDED", said="exit code 0"),
        Kind(name="exit3", state="FAILED", said="exit code 3"),
        Kind(name="segv", state="KILLED", said="SIGSEGV"),
        Kind(name="exit5", state="SUCCEEDED", said="exit code 0", shell="{act} | cat"),
        Kind(name="exit7", state="FAILED", said="exit code 7", shell="{act}; exit $?"),
    )
}
