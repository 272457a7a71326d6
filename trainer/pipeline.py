"""Worker threads and what runs between them: a crew whose first failure ends the run, and bounded channels.

One target thread puts micro-batches into a channel per drafter; which batch goes to which drafter is decided by its
index, never by who asks first. When a worker fails, its traceback is printed once, everything that others wait on is
opened, and they leave through `Aborted`, which is not a failure of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from trainer.metrics import Reporter

T = TypeVar("T")


class Aborted(Exception):
    """The run is ending for another worker's reason."""


class Channel(Generic[T]):
    """A first-in, first-out queue of at most `size` items that can be closed from any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._items: deque[T] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self.put_wait_s = 0.0
        self.get_wait_s = 0.0
        """How long each side has waited so far."""

    def put(self, item: T) -> None:
        """Waits for room. Raises `Aborted` once closed."""
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self.size)
            self.put_wait_s += time.monotonic() - started
            if self._closed:
                raise Aborted
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        """Waits for an item. Raises `Aborted` once closed, also when items are left."""
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._items))
            self.get_wait_s += time.monotonic() - started
            if self._closed:
                raise Aborted
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)


class Crew:
    """The worker threads of a run. `failed` is the name of the worker whose failure ended it."""

    def __init__(self, reporter: Reporter, *, abort: Callable[[], None]) -> None:
        self.failed: str | None = None
        self._reporter, self._abort = reporter, abort
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        # Daemon: a worker stuck inside a kernel must not keep a failed process alive.
        thread = threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def alive(self) -> list[str]:
        return [thread.name for thread in self._threads if thread.is_alive()]

    def wait(self, *, timeout_s: float) -> list[str]:
        """Wait for all workers to end; returns the names of those that have not."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.alive()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        reason = "done"
        self._reporter.event("worker_up", worker=name)
        try:
            work()
        except Aborted:
            reason = "aborted"
        except BaseException as error:
            reason = "failed"
            self._fail(name, error)
        finally:
            self._reporter.event("worker_down", worker=name, reason=reason)

    def _fail(self, name: str, error: BaseException) -> None:
        name = getattr(error, "worker", name)  # one worker may find out what went wrong in another
        with self._lock:
            first = self.failed is None
            if first:
                self.failed = name
        if first:
            # Open the others' doors before anything slow or fallible, such as writing to a full disk.
            self._abort()
            self._reporter.exception(name, error)
