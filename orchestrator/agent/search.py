"""`grep -E` over cleaned log lines, told apart by number and by where they stand in the raw file.

grep itself does the matching: its language is the one people know, and it is fast. What it reads is cleaned first, so
that a colour code inside a word or a progress bar in front of a traceback hides nothing from a pattern.
"""

from __future__ import annotations

import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.agent import system
from orchestrator.agent.main import Refusal
from orchestrator.logscan.clean import Block, OffsetMap

OUTPUT = re.compile(rb"(\d+)([:-])(\d+)[:-](.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """What to look for, in grep's words."""

    expression: str
    ignore_case: bool = False
    invert: bool = False
    before: int = 0
    after: int = 0

    def argv(self, *, follow: bool) -> list[str]:
        grep = system.which("grep")
        if grep is None:
            raise Refusal("preflight", "grep not found on the target", "install it there: apt-get install grep")
        argv = [grep, "-a", "-E", "-n", "-b", f"-B{self.before}", f"-A{self.after}"]
        argv += ["-i"] * self.ignore_case + ["-v"] * self.invert + ["--line-buffered"] * follow
        return [*argv, "-e", self.expression]

    def check(self) -> None:
        """Raises `Refusal` when grep does not understand the expression."""
        done = subprocess.run(
            self.argv(follow=False), stdin=subprocess.DEVNULL, capture_output=True, check=False, env=_environ()
        )
        if done.returncode > 1:
            said = done.stderr.decode("utf-8", "replace").strip().rpartition("grep: ")[2]
            raise Refusal("usage", f"--grep {self.expression!r}: {said or 'grep does not understand it'}")


@dataclass(frozen=True, slots=True)
class Hit:
    """A line that grep printed: its raw offset, its text, and whether it matched or is context."""

    offset: int
    text: bytes
    match: bool


class Search:
    """One grep that is fed blocks and gives hits back."""

    def __init__(self, pattern: Pattern, *, follow: bool = False) -> None:
        self._process = subprocess.Popen(
            pattern.argv(follow=follow), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environ(), bufsize=1 << 20
        )
        self._map, self._lock = OffsetMap(), threading.Lock()
        self._hits: queue.SimpleQueue[Hit | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def feed(self, block: Block) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._map.add(block)
        self._process.stdin.write(block.data)

    def flush(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.flush()

    def hits(self) -> Iterator[Hit]:
        """What has come back so far."""
        while not self._hits.empty():
            hit = self._hits.get()
            if hit is not None:
                yield hit

    def finish(self) -> Iterator[Hit]:
        """All that is still to come."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        while (hit := self._hits.get()) is not None:
            yield hit
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            found = OUTPUT.fullmatch(raw.rstrip(b"\n"))
            if found is None:
                continue  # the `--` between groups of context
            with self._lock:
                offset = self._map.raw(int(found[3]))
            self._hits.put(Hit(offset, found[4], found[2] == b":"))
        self._hits.put(None)


def _environ() -> dict[str, str]:
    return {"PATH": system.search_path(), "LC_ALL": "C.UTF-8"}
