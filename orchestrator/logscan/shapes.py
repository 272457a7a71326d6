"""How the step lines of a log look, so that one is known again inside a line that two threads wrote.

Python writes a traceback in pieces (`    `, `self.run()`, the line break), and another thread's line can land between
any two of them: `    self.run()worker=drafter-1 step=111 loss=2.0`. A step line that has been seen whole is found there
by its shape: its text with every number left open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBER = re.compile(r"\d+(?:[.,_]\d+)*(?:[eE][-+]?\d+)?[kM]?|\bnan\b|\binf\b")
OPEN_NUMBER = r"(?:\d+(?:[.,_]\d+)*(?:[eE][-+]?\d+)?[kM]?|nan|inf)"
GAP = "\0"
MAX_SHAPES, MAX_CHARS = 4, 300


class Shapes:
    """The last few shapes of step lines."""

    def __init__(self, shapes: Iterable[str] = ()) -> None:
        self.texts = list(shapes)
        self._pattern: re.Pattern[str] | None = None

    def learn(self, line: str) -> bool:
        """Whether an older shape had to make room for it."""
        if len(line) > MAX_CHARS or (self.texts and self._compiled().fullmatch(line)):
            return False
        shape = NUMBER.sub(GAP, line.strip())
        if shape and shape not in self.texts:
            self.texts.append(shape)
            self._pattern = None
            if len(self.texts) > MAX_SHAPES:
                del self.texts[0]
                return True
        return False

    def find(self, line: str) -> re.Match[str] | None:
        """A step line that is only a part of `line`."""
        match = self._compiled().search(line) if self.texts else None
        return match if match and match[0] != line.rstrip() else None

    def _compiled(self) -> re.Pattern[str]:
        if self._pattern is None:
            shapes = (OPEN_NUMBER.join(map(re.escape, text.split(GAP))) for text in self.texts)
            self._pattern = re.compile("|".join(sorted(shapes, key=len, reverse=True)))
        return self._pattern
