"""Lines of figures that look like earlier ones, read without the grammar: a program prints thousands of the same form.

A template is such a line with its numbers left open, and with the drawing of its bar. Whatever it matches the grammar
reads alike: what is written around the numbers is the same, and what depends on how *many* digits there are (thousands
separators, times in front of a line, a step with a point in it) is not left open. It is also of the same `shapes`
shape, which has been learned. Lines of one form that follow each other are matched together.
"""

from __future__ import annotations

import re

from orchestrator.logscan.grammar import Reading
from orchestrator.logscan.names import worker_span
from orchestrator.logscan.shapes import MAX_CHARS

MAX_TEMPLATES, MAX_LEARNED = 8, 500
"""So many at a time, and so many in all: a log whose every line is of another form is not worth the compiling."""
TOGETHER = 2048
"""So many lines are matched at once: the memory for it is bounded so."""
TOKEN = re.compile(r"\d{1,9}(?P<point>\.\d{1,22})?(?P<exponent>[eE][-+]?\d{1,3})?")
WHOLE, POINT = r"[0-9]{1,9}", r"\.[0-9]{1,22}"
EXPONENT = r"[eE](?:-[0-9]{1,3}|\+?0?[0-9])(?![0-9])"
"""No figure that a template matches is too large for a sum, or infinite: what might be is left to the grammar."""
NUMBERED = r"[0-9]{1,6}"
OPEN = rf"{WHOLE}(?:{POINT})?(?:{EXPONENT})?"
UNSAFE = re.compile(r"\d[,_]\d|(?<![\d.])\d{10}")
"""From the first figure on; what stands before it is of a fixed number of digits."""
DRAWN = r"[0-9]{1,3}%\|[ #0-9\xe2\x96\x80-\x9f]*\| *"
"""A bar as tqdm draws it; the last bytes are those of its blocks."""
DIGITS = re.compile(r"\d+")
FIGURES = ("step", "tok_s", "loss", "lr", "grad_norm", "worker")

Row = tuple[bytes, ...]
"""What stands in a line where its template is open."""


class Template:
    """One form of a step line, as bytes with their line break."""

    __slots__ = ("_rows", "_several", "columns")

    def __init__(self, parts: list[str], groups: dict[str, int]) -> None:
        """`groups`: which of `parts` each figure is; these are groups in the pattern, and no other is."""
        named = set(groups.values())
        one = "".join(f"({part})" if at in named else part for at, part in enumerate(parts)) + r"\n()"
        self._rows = re.compile(one.encode("ascii")).findall
        self._several = re.compile(rf"(?:{''.join(parts)}\n){{1,{TOGETHER}}}".encode("ascii")).match
        order = sorted(named)
        self.columns = tuple(order.index(groups[name]) if name in groups else None for name in FIGURES)
        """Which item of a row each of FIGURES is."""

    def end(self, data: bytes, position: int) -> int:
        """Where the lines of this form end that begin at `position`, or so many of them; -1: there is none."""
        match = self._several(data, position)
        return -1 if match is None else match.end()

    def rows(self, data: bytes, start: int, end: int) -> list[Row]:
        """The lines between, which are all of this form."""
        return self._rows(data, start, end)

    def reading(self, row: Row) -> Reading:
        step, tok_s, loss, lr, grad_norm, worker = self.columns
        return Reading(
            int(row[step]) if step is not None else None,
            float(row[tok_s]) if tok_s is not None else None,
            float(row[loss]) if loss is not None else None,
            float(row[lr]) if lr is not None else None,
            float(row[grad_norm]) if grad_norm is not None else None,
            row[worker].decode("ascii") if worker is not None else None,
        )


class _Frame(Template):
    """A frame of a progress bar without a name that says nothing else: always of one form."""

    __slots__ = ()

    def __init__(self) -> None:
        parts = [" *", DRAWN, "[0-9]{1,15}", "/", "[0-9]{1,15}", r" \[[0-9:<?, .]*(?:it/s|s/it)\] *"]
        super().__init__(parts, {"n": 2, "total": 4})

    def reading(self, row: Row) -> Reading:
        return Reading(bar=(int(row[0]), int(row[1])))


FRAME = _Frame()


class Templates:
    """The last few forms of step lines."""

    def __init__(self) -> None:
        self.known: list[Template] = []
        """The newest first; FRAME, where the log holds such frames."""
        self._learned = 0
        self._forms: set[str] = set()
        """The forms with their figures open, of which a template has been made."""

    def forget(self) -> None:
        self.known = [one for one in self.known if one is FRAME]
        self._forms.clear()

    def learn(self, line: str, reading: Reading) -> None:
        """`line` is one that the grammar has read as `reading`."""
        if reading.bar is not None and FRAME not in self.known:
            self.known.append(FRAME)
        if not reading.spans or reading.phase or self._learned >= MAX_LEARNED:
            return
        text = line
        if reading.drawn is not None:
            start, end = reading.drawn
            text = line[:start] + line[end:]
            if re.fullmatch(DRAWN.encode(), line[start:end].encode()) is None:
                return
        first = min(start for _, start, _ in reading.spans)
        plain = len(text) <= MAX_CHARS and text.isascii() and text.replace("\t", "").isprintable()
        if not plain or UNSAFE.search(line, first):
            return
        made = _parts(line, reading)
        if made is None:
            return
        self._learned += 1
        narrow, wide, groups = made
        # A figure is taken to be written as it was (a point, no exponent), which is quick to match; but for a form that
        # comes again with its figures written otherwise.
        form = "".join(wide)
        parts = wide if form in self._forms else narrow
        self._forms.add(form)
        self.known.insert(0, Template(parts, groups))
        del self.known[MAX_TEMPLATES:]


def _parts(line: str, reading: Reading) -> tuple[list[str], list[str], dict[str, int]] | None:
    """The pattern of `line`, part by part: with its figures as they are written, and with them open; and which parts
    are what. None where a figure is written as no template has it."""
    assert reading.spans is not None
    first = min(start for _, start, _ in reading.spans)
    spans = {start: (name, end) for name, start, end in reading.spans}
    if reading.worker is not None:
        name, start, end = worker_span(line, first) or ("", 0, 0)
        if name != reading.worker or line[start:end] != name or len(name) > 80:
            return None
        spans[start] = ("worker", end)
    narrow, wide, groups, at = list[str](), list[str](), dict[str, int](), 0
    drawn, drawn_end = reading.drawn or (-1, -1)
    padding = len(line[:drawn].rstrip(" ")) if drawn >= 0 else -1
    while at < len(line):
        name, end = spans.get(at, ("", at))
        token = TOKEN.match(line, at)
        opened = None
        if at == padding:
            part, end = f" *{DRAWN}", drawn_end
        elif name == "worker":
            words = re.split(r"(\d+)", line[at:end])
            part = "".join(NUMBERED if word.isdigit() else re.escape(word) for word in words)
        elif name:
            if token is None or token.end() != end or (name == "step" and not token[0].isdigit()):
                return None  # a sign, a thousands separator, 1.2k, nan
            part, opened = _as_written(token), WHOLE if name == "step" else OPEN
        elif line[at] == " " and at > first and TOKEN.match(line, end := len(line) - len(line[at:].lstrip(" "))):
            part = " +"  # before a figure of a fixed width
        elif token and (at == 0 or not (line[at - 1].isalpha() or line[at - 1] in "_.")):
            end = token.end()
            if at < first:
                part = DIGITS.sub(lambda run: rf"[0-9]{{{len(run[0])}}}", re.escape(token[0]))
            else:
                part = _as_written(token)
        else:
            end = token.end() if token else at + 1
            part = re.escape(line[at:end])
        if name:
            groups[name] = len(narrow)
        narrow.append(part)
        wide.append(opened or part)
        at = end
    return narrow, wide, groups


def _as_written(token: re.Match[str]) -> str:
    return WHOLE + POINT * bool(token["point"]) + EXPONENT * bool(token["exponent"])
