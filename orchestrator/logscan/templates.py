"""Step lines that look like earlier ones, read without the grammar: a program prints thousands of the same form.

A template is a step line with its numbers left open. Whatever it matches the grammar reads alike: what is written
around the numbers is the same, and what depends on how *many* digits there are (thousands separators, times in front of
a line, a step with a point in it) is not left open. It is also of the same `shapes` shape, which has been learned.
"""

from __future__ import annotations

import re

from orchestrator.logscan.grammar import Reading
from orchestrator.logscan.names import worker_span
from orchestrator.logscan.shapes import MAX_CHARS

MAX_TEMPLATES, MAX_LEARNED = 8, 500
"""So many at a time, and so many in all: a log whose every line is of another form is not worth the compiling."""
TOKEN = re.compile(r"\d{1,9}(?P<point>\.\d{1,17})?(?P<exponent>[eE][-+]?\d{1,3})?")
WHOLE, POINT, EXPONENT = r"\d{1,9}", r"\.\d{1,17}", r"[eE][-+]?\d{1,3}"
NUMBERED = r"\d{1,6}"
OPEN = rf"{WHOLE}(?:{POINT})?(?:{EXPONENT})?"
UNSAFE = re.compile(r"\d[,_]\d|[^\x20-\x7e\t]|\d{10}")
DIGITS = re.compile(r"\d+")


class Template:
    """One form of a step line, as bytes with their line break."""

    __slots__ = ("groups", "match")

    def __init__(self, pattern: str, groups: dict[str, int]) -> None:
        self.match = re.compile(pattern.encode("ascii")).match
        self.groups = tuple(groups.get(name, 0) for name in ("step", "tok_s", "loss", "lr", "grad_norm", "worker"))

    def read(self, data: bytes, position: int) -> tuple[Reading, int] | None:
        """What the line at `position` says, and where the next one starts; None: it is of another form."""
        match = self.match(data, position)
        if match is None:
            return None
        step, tok_s, loss, lr, grad_norm, worker = self.groups
        reading = Reading(
            int(match[step]),
            float(match[tok_s]) if tok_s else None,
            float(match[loss]) if loss else None,
            float(match[lr]) if lr else None,
            float(match[grad_norm]) if grad_norm else None,
            match[worker].decode("ascii") if worker else None,
        )
        return reading, match.end()


class Templates:
    """The last few forms of step lines."""

    def __init__(self) -> None:
        self.known: list[Template] = []
        self._learned = 0

    def forget(self) -> None:
        self.known.clear()

    def learn(self, line: str, reading: Reading) -> None:
        """`line` is one that the grammar has read as `reading`."""
        if reading.spans is None or reading.phase or self._learned >= MAX_LEARNED:
            return
        if len(line) > MAX_CHARS or UNSAFE.search(line):
            return
        self._learned += 1
        template = _template(line, reading)
        if template is not None:
            self.known.insert(0, template)
            del self.known[MAX_TEMPLATES:]


def _template(line: str, reading: Reading) -> Template | None:
    assert reading.spans is not None
    first = min(start for _, start, _ in reading.spans)
    spans = {start: (name, end) for name, start, end in reading.spans}
    if reading.worker is not None:
        name, start, end = worker_span(line, first) or ("", 0, 0)
        if name != reading.worker or line[start:end] != name or len(name) > 80:
            return None
        spans[start] = ("worker", end)
    parts, groups, at = [], dict[str, int](), 0
    while at < len(line):
        name, end = spans.get(at, ("", at))
        token = TOKEN.match(line, at)
        if name == "worker":
            words = re.split(r"(\d+)", line[at:end])
            parts.append(f"({''.join(NUMBERED if word.isdigit() else re.escape(word) for word in words)})")
        elif name:
            if token is None or token.end() != end or (name == "step" and token[0] != line[at:end]):
                return None  # a sign, a thousands separator, 1.2k, nan
            if name == "step" and not token[0].isdigit():
                return None
            parts.append(f"({WHOLE if name == 'step' else OPEN})")
        elif token and (at == 0 or not (line[at - 1].isalpha() or line[at - 1] in "_.")):
            end = token.end()
            if at < first:
                parts.append(DIGITS.sub(lambda run: rf"\\d{{{len(run[0])}}}", re.escape(token[0])))
            else:
                parts.append(WHOLE + POINT * bool(token["point"]) + EXPONENT * bool(token["exponent"]))
        else:
            end = token.end() if token else at + 1
            parts.append(re.escape(line[at:end]))
        if name:
            groups[name] = len(groups) + 1
        at = end
    return Template("".join(parts) + "\n", groups)
