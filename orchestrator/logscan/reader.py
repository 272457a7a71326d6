"""One traceback, read line by line until a line is clearly not part of it.

Besides Python's own form (chained exceptions, exception groups, SyntaxError, notes, messages of several lines) two
endings without a traceback count: `Fatal Python error: ...` and C++'s `terminate called after throwing`. A bare word
such as `Killed` does not: the exit code and the kernel's own counts say that better. Two tracebacks merged line by line
cannot be told apart, so their endings are reported and no stack is made up.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from orchestrator.logscan import launchers
from orchestrator.logscan.grammar import FIGURE
from orchestrator.logscan.names import LOGGED, PREFIX_NAME
from orchestrator.model import Finding

HEADER = "Traceback (most recent call last):"
IN_THREAD = re.compile(r"Exception in thread (?P<name>[^\"':\n][^:\n]{0,99}?)(?: \([\w.<>]+\))?:")
FRAME = re.compile(r"\s*File \"(?P<file>[^\"]+)\", line \d+,? in (?P<function>.+)")
SYNTAX_FRAME = re.compile(r"\s*File \"[^\"]+\", line \d+\s*$")
MARK = re.compile(
    r"Traceback \(most recent call last\):|Exception in thread |Fatal Python error: |terminate called after "
    r"|^\s*File \"[^\"]+\", line \d+\s*$"
)
SYNTAX_TYPES = ("SyntaxError", "IndentationError", "TabError")
CHAINED = re.compile(
    r"(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):"
)
ENDING = re.compile(r"(?P<type>[A-Za-z_][\w.<>]*)(?::(?: (?P<message>.*)|(?P<empty>$))|$)")
NO_TYPE = re.compile(r"(?:[A-Z]{2,}|Killed|Terminated|Aborted|Hangup|[Ww]arning|[Ee]rror|Exception in thread.*)$")
SURE_TYPE = re.compile(
    r"(?:\w*(?:Error|Exception|Warning|Exit|Interrupt|Iteration|Timeout|Expired|Group|Fault|Failure|Cancelled)"
    r"|[\w.<>]+\.(?:[A-Z]\w*|error|timeout))$"
)
GROUP_LINE = re.compile(r"\s*(?:\+-|\+ Exception Group|[|+] ?)")
GROUP_MARKS = re.compile(r"^[\s|+]*")
FATAL = re.compile(r"Fatal Python error: (?P<message>.*)")
FATAL_MORE = re.compile(r"\s*$|Current thread|Thread 0x|Python runtime state|Extension modules:|\s+(?:File |<|\.\.\.)")
TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'")
TERMINATE_MORE = re.compile(r"\s+what\(\):|frame #|Exception raised from|\s*$")
SHELL = re.compile(r"make(?:\[\d+\])?: \*\*\* |[^\s:]+: line \d+: |[\w./-]+: \d+: |srun: ")
"""What starts a program says that it has failed: it is no part of the program's own message."""
TORCH_MORE = re.compile(r"from user code:|Set TORCH|You can suppress|For debugging consider|Compile with")
LEAD = re.compile(
    rf"(?:\[(?P<a>{PREFIX_NAME})\]|\((?P<b>{PREFIX_NAME})\)|(?P<c>{PREFIX_NAME})(?=:\s| \|))(?::\s?| \| ?| )?"
)

SHM = re.compile(r"shared memory|Bus error|/dev/shm")
SHM_HINT = "shared memory (/dev/shm) of the container ran out: enlarge it, or use fewer loader workers"
HINTS = (
    (SHM, SHM_HINT),
    (
        re.compile(r"using FX to symbolically trace a dynamo-optimized function"),
        "two threads used torch.compile at once: warm up every shape on one thread before the workers start",
    ),
)
HEAD_BYTES, TAIL_BYTES, LINE_CHARS = 12_000, 4_000, 2_000
MESSAGE_LINES = 50
STRAYS_IN_FRAMES, STRAYS_AFTER_END, STRAYS_BEFORE = 40, 3, 8


@dataclass(slots=True)
class Complete:
    """A finding, the workers that died with it, and whether a step came after its last line."""

    finding: Finding
    down: list[str]
    followed: bool = False


@dataclass(slots=True)
class Text:
    """Lines of a traceback in bounded memory: the first ones and the last ones."""

    head: list[str] = field(default_factory=list)
    tail: deque[str] = field(default_factory=deque)
    head_size: int = 0
    tail_size: int = 0
    left_out: int = 0

    def add(self, line: str) -> None:
        line = line[:LINE_CHARS]
        if not self.tail and self.head_size + len(line) < HEAD_BYTES:
            self.head.append(line)
            self.head_size += len(line) + 1
            return
        self.tail.append(line)
        self.tail_size += len(line) + 1
        while self.tail_size > TAIL_BYTES and len(self.tail) > 1:
            self.tail_size -= len(self.tail.popleft()) + 1
            self.left_out += 1

    def __str__(self) -> str:
        gap = [f"  ... {self.left_out} lines left out ..."] if self.left_out else []
        return "\n".join([*self.head, *gap, *self.tail]).rstrip("\n")


class Reader:
    """One traceback (or several that are merged) being read. `take` says whether a line is part of it."""

    def __init__(self, kind: str, start: int, *, key: str | None, prefix: str = "", name: str | None = None) -> None:
        self.kind, self.start, self.key = kind, start, key
        self.names = [name] if name else []
        self.prefix = _prefix_pattern(prefix)
        self.prefixed = False
        """A later line carried the prefix too, so a line without it is somebody else's."""
        self.headers = 0 if kind == "announced" else 1
        self.text, self.frames = Text(), list[tuple[str, str]]()
        self.endings: list[tuple[str, list[str]]] = []
        self.fragment = ""
        """A piece of a line whose rest has not come yet: another thread's line was written in between."""
        self.followed = False
        self.revived: set[str] = set()
        self.strays = 0
        self._chain = self._chained = self._contiguous = self._blank = self._group = self._said = False
        self._sub: str | None = None
        self._table = launchers.Table()

    @property
    def expected(self) -> int:
        return max(1, self.headers, len(self.names))

    @property
    def ended(self) -> bool:
        return len(self.endings) >= self.expected and not self._chained

    def body(self, line: str, *, figures: bool = False) -> str:
        """`line` without the prefix, with what came of it earlier; a line of figures is another thread's."""
        if self.fragment and not figures:
            line, self.fragment = self.fragment + line, ""
        if self.prefix is not None:
            match = self.prefix.match(line)
            if match:
                self.prefixed = True
                return line[match.end() :]
        return line

    def take(self, body: str, *, figures: bool) -> str:
        """`part`: the line belongs here. `other`: it does not, but more may come. `close`: the traceback is over."""
        if self.kind in ("fatal", "terminate"):
            return self._take_native(body)
        if self._take_table(body):
            return "part"
        if HEADER in body and not (self._group and GROUP_LINE.match(body)):
            return self._take_header(body)
        thread = IN_THREAD.search(body)
        if thread:
            if self.ended:
                return "close"
            if thread["name"] not in self.names:
                self.names.append(thread["name"])
            return "part"
        if self.kind == "announced":
            return "part" if not body.strip() else self.stray(theirs=figures)
        return self._take_after(body, figures) if self.ended else self._take_frame(body, figures)

    def _take_header(self, body: str) -> str:
        if self.ended and not self._chain:
            return "close"
        if self.ended:
            self._chained = True
        elif self.kind != "announced" and not self._chain:
            self.headers += 1
        if self.kind == "announced":
            self.kind, self.headers = "python", 1
        self._chain = self._blank = False
        self._group = self._group or "+ Exception Group Traceback" in body
        self._contiguous, self.strays = True, 0
        self.text.add(body[body.find("+ Exc") :] if self._group else HEADER)
        return "part"

    def _take_frame(self, body: str, figures: bool) -> str:
        if self._group and GROUP_LINE.match(body):
            self.text.add(body)
            self._note_frame(body)
            self._end(GROUP_MARKS.sub("", body), figures=False)
            return "part"
        if not body.strip():
            return "part"
        if body.startswith(("  ", "\t")):
            self.text.add(body)
            self._contiguous, self.strays = True, 0
            self._note_frame(body)
            return "part"
        if CHAINED.match(body):
            self._chain = True
            return "part"
        if self._end(body, figures=figures):
            self.text.add(body)
            return "part"
        self._contiguous = False
        return self.stray(theirs=figures)

    def _note_frame(self, body: str) -> None:
        frame = FRAME.search(body)
        if frame:
            self.frames.append((frame["file"].rpartition("/")[2], frame["function"].strip()))

    def _end(self, body: str, *, figures: bool) -> bool:
        match = ENDING.match(body)
        if not match or NO_TYPE.match(match["type"]):
            return False
        kind = match["type"]
        sure = SURE_TYPE.match(kind) is not None
        if self.kind == "syntax":
            if kind not in SYNTAX_TYPES:
                return False
        elif not sure and (figures or not (self._contiguous and self.frames and kind[:1].isupper())):
            return False
        self.strays = 0
        if self._chained:
            self._chained = False
        else:
            self.endings.append((kind, [match["message"] or ""]))
        return True

    def _take_after(self, body: str, figures: bool) -> str:
        if not body.strip():
            self._blank = self._said = True
            return "part"
        if CHAINED.match(body):
            self._chain = True
            self.text.add("\n" + body + "\n")
            return "part"
        if self._group and GROUP_LINE.match(body):
            self.text.add(body)
            ending = ENDING.match(GROUP_MARKS.sub("", body))
            if self._sub is None and ending and SURE_TYPE.match(ending["type"]):
                self._sub = ending[0]
            return "part"
        if figures or self._chain or LOGGED.match(body) or LEAD.match(body) or SHELL.match(body):
            return self.stray(theirs=figures)
        if self._table.bars == 2 or (self._blank and not body.startswith((" ", "\t")) and not TORCH_MORE.match(body)):
            return "close"
        if self.expected > 1 or self.strays:
            return self.stray(theirs=False)
        if self._blank:
            self.text.add("")
        self.text.add(body)
        message = self.endings[-1][1]
        if len(message) >= MESSAGE_LINES:
            return "close"
        if not self._said:
            message.append(body)
        self._blank = False
        return "part"

    def _take_table(self, body: str) -> bool:
        """Of torchrun's report: it is as long as there are ranks, and may hold whole tracebacks."""
        if not self.ended or self.expected > 1 or not launchers.is_group(self.endings[-1][0]):
            return False
        if not self._table.take(body):
            return False
        self.text.add(body)
        message = self.endings[-1][1]
        if len(message) < MESSAGE_LINES:
            message.append(body)
        return True

    def _take_native(self, body: str) -> str:
        more = FATAL_MORE if self.kind == "fatal" else TERMINATE_MORE
        if not more.match(body):
            return "close"
        if body.strip():
            self.text.add(body)
        self._note_frame(body)
        what = body.partition("what():")[2].strip()
        if self.kind == "terminate" and what:
            self.endings[0][1][0] = what
        return "part"

    def stray(self, *, theirs: bool) -> str:
        """A line that is not part of this: how many more may come depends on what is still missing.

        `theirs`: it is clearly another thread's, of which hundreds can come between two lines of a traceback.
        """
        if theirs and not self.ended:
            return "other"
        self.strays += 1
        if self.ended and not self._chain:
            limit = STRAYS_AFTER_END
        elif self.ended or self.kind in ("announced", "syntax"):
            limit = STRAYS_BEFORE
        else:
            limit = STRAYS_IN_FRAMES
        return "close" if self.strays > limit else "other"

    def note_step(self, worker: str | None) -> None:
        if self.ended:
            self.followed = True
            if worker:
                self.revived.add(worker)

    def flush(self) -> None:
        """No rest of a broken line will come."""
        if self.fragment:
            self.take(self.body(""), figures=False)

    def complete(self, *, now: float, before_first_step: bool, shm: bool, cut_off: bool) -> list[Complete]:
        """The findings of what has been read. `cut_off`: no line will follow."""
        endings = [(kind, "\n".join(message).strip()[:LINE_CHARS]) for kind, message in self.endings]
        if not endings:
            if not cut_off or self.kind in ("announced", "syntax") or not self.frames:
                return []
            endings = [("Traceback", "cut off before its last line")]
        merged = self.expected > 1
        text = str(self.text)
        if self._sub and not merged:
            endings[0] = (endings[0][0], f"{endings[0][1]}; first: {self._sub}")
        hint = next((hint for pattern, hint in HINTS if pattern.search(text)), SHM_HINT if shm else None)
        worker = self.names[0] if self.names and not merged else self.key
        found = []
        for kind, message in endings:
            if merged:
                text = f"{kind}: {message}\n({self.expected} tracebacks are interleaved here: no stack can be told)"
            of_whom = self._table.death if launchers.is_group(kind) else None
            if of_whom is not None:  # which its first line, of `=`, does not say
                message = f"{of_whom}\n{message}"
            finding = Finding(
                type=kind, message=message, traceback=text, worker=worker, offset=self.start, at=now, hint=hint,
                fingerprint=fingerprint(kind, message, [] if merged or of_whom else self.frames),
                before_first_step=before_first_step,
            )  # fmt: skip
            found.append(Complete(finding, [], self.followed))
        # Only `Exception in thread NAME` is a death. A prefix (`[rank0]: `) says whose it is, and it may be handled.
        found[0].down = [name for name in self.names if name not in self.revived]
        return found


def fingerprint(kind: str, message: str, frames: list[tuple[str, str]]) -> str:
    """Stable over line numbers, addresses and the directory of the run."""
    import hashlib  # only where a finding is made: it is not cheap to import

    parts = [kind, *(f"{file}:{function}" for file, function in frames)]
    if not frames:
        parts.append(re.sub(r"0x[0-9a-f]+|\d+", "#", message.partition("\n")[0]))
    return hashlib.sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:16]


def _prefix_pattern(prefix: str) -> re.Pattern[str] | None:
    if FIGURE.search(prefix) or "=" in prefix:  # another thread's line, cut short by this one
        return None
    if not prefix.strip():
        return re.compile(re.escape(prefix)) if prefix else None
    parts = re.split(r"(\d+)", prefix.rstrip())
    return re.compile("".join(r"\d+" if part.isdigit() else re.escape(part) for part in parts) + " ?")
