"""Which line belongs to which traceback, while other threads write between.

Lines are routed to readers by the worker's prefix (`[rank0]: `); one that no open traceback wants is an ordinary line.
"""

from __future__ import annotations

from orchestrator.logscan.names import front_end
from orchestrator.logscan.reader import FATAL, HEADER, IN_THREAD, LEAD, MARK, SYNTAX_FRAME, TERMINATE, Reader

SPAN_BYTES = 1 << 20
"""Tracebacks that overlap are decided together; after this much of them, whatever is still missing."""


class Tracebacks:
    """All tracebacks being read at one place of a log.

    Those that overlap are handed back together, once none is open: a scanner that goes on from `start` then reads all
    of them again, and none twice.
    """

    def __init__(self) -> None:
        self._readers: list[Reader] = []
        self._ready: list[Reader] = []
        self._decided: list[Reader] = []
        """Those that overlap with nothing which is still open: taken by `ready` in the same line that ended them."""

    @property
    def open(self) -> bool:
        return bool(self._readers)

    @property
    def start(self) -> int | None:
        """Offset of the first line that is not decided yet."""
        return min((reader.start for reader in self._readers + self._ready), default=None)

    def take(self, line: str, offset: int, *, figures: bool) -> bool:
        """Whether `line` is part of a traceback. `figures`: it reads as a step, a figure or a phase."""
        start = self.start
        if start is not None and offset - start > SPAN_BYTES:
            self._ready += self._readers
            self._readers = []
        key = worker_key(line)
        routed = self._route(key)
        verdict = routed.take(routed.body(line, figures=figures), figures=figures) if routed else "other"
        if verdict == "part":
            return True
        for reader in list(self._readers):
            # A line elsewhere counts too: a traceback whose worker fell silent must be over some time.
            if (verdict if reader is routed else reader.stray(theirs=figures)) == "close":
                self._readers.remove(reader)
                self._ready.append(reader)
        self._decide()  # the next one, which this line may open, does not overlap with them
        return self._open(line, offset, key)

    def _decide(self) -> None:
        if not self._readers:
            self._decided += sorted(self._ready, key=lambda reader: reader.start)
            self._ready = []

    def _route(self, key: str | None) -> Reader | None:
        for reader in reversed(self._readers):
            if reader.key == key:
                return reader
        if key is None and len(self._readers) == 1 and not self._readers[0].prefixed:
            return self._readers[0]
        return None

    def _open(self, line: str, offset: int, key: str | None) -> bool:
        at = line.find(HEADER)
        thread = IN_THREAD.search(line)
        fatal, terminate = FATAL.search(line), TERMINATE.search(line)
        if at >= 0:
            prefix = line[:at].removesuffix("+ Exception Group ")
            reader = Reader("announced", offset, key=key, prefix=prefix)
            reader.take(line[len(prefix) :], figures=False)
        elif thread:
            reader = Reader("announced", offset, key=key, prefix=line[: thread.start()], name=thread["name"])
        elif fatal:
            reader = Reader("fatal", offset, key=key)
            reader.endings.append(("Fatal Python error", [fatal["message"]]))
            reader.text.add(fatal[0])
        elif terminate:
            reader = Reader("terminate", offset, key=key)
            reader.endings.append((terminate["type"], [""]))
            reader.text.add(terminate[0])
        elif key is None and SYNTAX_FRAME.match(line):
            reader = Reader("syntax", offset, key=key)
            reader.text.add(line)
        else:
            return False
        self._readers.append(reader)
        return True

    def fragment(self, text: str, offset: int) -> None:
        """A piece of a traceback's line, into which another thread wrote its own line."""
        reader = self._route(None)
        if reader is None:
            if not MARK.search(text):
                return
            reader = Reader("announced", offset, key=None)
            self._readers.append(reader)
        reader.fragment += text

    def note_step(self, worker: str | None) -> None:
        """A step line was read: what has ended is followed by progress, and that worker lives."""
        for reader in self._readers + self._ready:
            reader.note_step(worker)

    def close(self, worker: str) -> None:
        """That worker steps: its own traceback, if its last line was read, is over."""
        for reader in [one for one in self._readers if one.ended and (worker in one.names or worker == one.key)]:
            self._readers.remove(reader)
            self._ready.append(reader)

    def settle(self, *, cut_off: bool) -> None:
        """Nothing more is coming for now: what has its last line is complete; with `cut_off`, everything is."""
        for reader in self._readers if cut_off else ():
            reader.flush()
        for reader in [reader for reader in self._readers if cut_off or reader.ended]:
            self._readers.remove(reader)
            self._ready.append(reader)

    def ready(self) -> list[Reader]:
        """The readers of what is decided, in the order of the log, if nothing before them is still open."""
        self._decide()
        decided, self._decided = self._decided, []
        return decided

    def ended(self) -> list[Reader]:
        """The readers that have their last line, decided or not."""
        return sorted(
            (reader for reader in self._readers + self._ready if reader.ended or reader in self._ready),
            key=lambda reader: reader.start,
        )


def worker_key(line: str) -> str | None:
    """The worker in front of a line: `[rank0]: `, `(drafter-0) `, `drafter-0: `."""
    match = LEAD.match(line, front_end(line))
    if not match:
        return None
    return match["a"] or match["b"] or match["c"]
