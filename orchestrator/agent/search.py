"""`grep -E` over cleaned log lines, told apart by where they stand in the raw file.

grep itself does the matching: its language is the one people know, and it is fast. What it reads is cleaned first, so
that a colour code inside a word or a progress bar in front of a traceback hides nothing from a pattern. Where nobody
asks for a line's place, and no line is only context, what grep prints is passed on as it is.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.agent import system
from orchestrator.agent.lines import Lines
from orchestrator.agent.main import Refusal
from orchestrator.logscan.clean import Block, OffsetMap

OUTPUT = re.compile(rb"^(\d+)([:-])(.*\n)", re.MULTILINE)
"""A line of `grep -b`; the `--` between groups of context is none."""
CHUNK_BYTES = 256 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """What to look for, in grep's words."""

    expression: str
    ignore_case: bool = False
    invert: bool = False
    before: int = 0
    after: int = 0

    @property
    def context(self) -> bool:
        return self.before > 0 or self.after > 0

    def argv(self, *, places: bool, follow: bool) -> list[str]:
        grep = system.which("grep")
        if grep is None:
            raise Refusal("preflight", "grep not found on the target", "install it there: apt-get install grep")
        argv = [grep, "-a", "-E"]
        argv += ["-i"] * self.ignore_case + ["-v"] * self.invert + ["--line-buffered"] * follow
        if self.context:
            argv += [f"-B{self.before}", f"-A{self.after}"]
        return [*argv, *["-b"] * places, "-e", self.expression]

    def check(self) -> None:
        """Raises `Refusal` when grep does not understand the expression."""
        done = subprocess.run(
            self.argv(places=True, follow=False), stdin=subprocess.DEVNULL, capture_output=True, check=False,
            env=environ(),
        )  # fmt: skip
        if done.returncode > 1:
            said = done.stderr.decode("utf-8", "replace").strip().rpartition("grep: ")[2]
            raise Refusal("usage", f"--grep {self.expression!r}: {said or 'grep does not understand it'}")


class Search:
    """One grep that is fed blocks and gives lines back."""

    def __init__(self, pattern: Pattern, *, places: bool, follow: bool = False) -> None:
        """`places`: whether each line's raw offset is wanted."""
        self._places = places or pattern.context
        self._process = subprocess.Popen(
            pattern.argv(places=self._places, follow=follow), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environ(), bufsize=1 << 20,
        )  # fmt: skip
        self._map, self._lock = OffsetMap(), threading.Lock()
        self._found: queue.SimpleQueue[Lines | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def feed(self, block: Block) -> None:
        assert self._process.stdin is not None
        if self._places:
            with self._lock:
                self._map.add(block)
        self._process.stdin.write(block.data)

    def flush(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.flush()

    def found(self) -> Iterator[Lines]:
        """What has come back so far."""
        while not self._found.empty():
            lines = self._found.get()
            if lines is not None:
                yield lines

    def finish(self) -> Iterator[Lines]:
        """All that is still to come."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        while (lines := self._found.get()) is not None:
            yield lines
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        fd, rest = self._process.stdout.fileno(), bytearray()
        while chunk := os.read(fd, CHUNK_BYTES):
            cut = chunk.rfind(b"\n") + 1
            if cut:
                self._put(bytes(rest) + chunk[:cut])
                rest.clear()
            rest += chunk[cut:]
        if rest:
            self._put(bytes(rest) + b"\n")
        self._found.put(None)

    def _put(self, data: bytes) -> None:
        if not self._places:
            self._found.put(Lines(data, data.count(b"\n")))
            return
        hits = OUTPUT.findall(data)
        if not hits:
            return
        with self._lock:
            offsets = [self._map.raw(int(place)) for place, _, _ in hits]
        context = [index for index, hit in enumerate(hits) if hit[1] == b"-"]
        self._found.put(Lines(b"".join([text for _, _, text in hits]), len(hits), None, offsets, context))


def environ() -> dict[str, str]:
    return {"PATH": system.search_path(), "LC_ALL": "C.UTF-8"}
