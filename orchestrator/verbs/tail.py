"""The newest lines of one run, kept as they come: `logs -f` for whoever looks on, in a thread of its own.

It keeps a bounded number of lines, each cut where no screen goes on, and says in words what happens to the link.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from orchestrator.errors import SpecctlError
from orchestrator.fleet import Fleet
from orchestrator.resolve import Run
from orchestrator.verbs import logs

LINES = 5000
LINE_CHARS = 2000


class Tail:
    """Follows the logs of `run` until `close`, or its end. `changed` is called, from its thread, when there is news."""

    def __init__(self, fleet: Fleet, run: Run, *, changed: Callable[[], None]) -> None:
        self.run = run
        self.word = "its log is being opened"
        """What is to be said beside the lines; empty while they come."""
        self.ended = False
        """Nothing more will come: the run has ended, or its log cannot be had."""
        self.failed: SpecctlError | None = None
        self._fleet, self._changed = fleet, changed
        self._lines: deque[str] = deque(maxlen=LINES)
        self._count = 0
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._follow, name="top-log", daemon=True).start()

    def after(self, number: int) -> tuple[int, list[str]]:
        """(how many lines have come in all, those of them after the first `number` that are still kept)"""
        with self._lock:
            new = min(self._count - number, len(self._lines))
            return self._count, [self._lines[at] for at in range(len(self._lines) - new, len(self._lines))]

    def close(self) -> None:
        self._closed = True

    def _follow(self) -> None:
        request = logs.Request(run=self.run.run_id, last=LINES, follow=True)
        try:
            with logs.of_run(self._fleet, self.run, request) as found:
                log, self.word = found.probe.log.path, ""
                for item in found.items:
                    if self._closed:
                        return
                    if isinstance(item, logs.Lines):
                        new = item.text.split("\n")[:-1]
                        if item.log != log:
                            log = item.log
                            new = [f"==> {log} <==", *new]
                        self._add(new)
                    elif isinstance(item, logs.Word):
                        self.word = item.text if found.link_lost else ""
                        self._add([f"==> {item.text} <=="])
                verdict = found.verdict
                self.word = f"that is all: {verdict.state} ({verdict.why})" if verdict else "that is all"
        except SpecctlError as error:
            self.failed, self.word = error, f"no more of its log: {error.message}"
        except EOFError:
            self.word = "no more of its log: a connection ended in the middle"
        self.ended = True
        self._changed()

    def _add(self, lines: list[str]) -> None:
        with self._lock:
            self._lines.extend(line[:LINE_CHARS] for line in lines)
            self._count += len(lines)
        self._changed()
