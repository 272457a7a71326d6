"""Worker threads and what runs between them: a crew whose first failure ends the run, and bounded channels.

The loader lays out work for the target threads, they put micro-batches into a channel for each share of a step, and
drafters take them from there; what goes where is decided by its index, never by who asks first. A full channel holds up
whoever fills it. When a worker fails, its traceback is printed once, everything that others wait on is opened, and they
leave through `Aborted`, which is not a failure of their own. Each worker keeps a note of what it does and of how long
it has waited for whom (`waiting`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, Literal, TypeVar

from trainer.report.reporter import Reporter

T = TypeVar("T")
Cause = Literal["input", "room", "peers"]
"""What a worker waits for: something to work on, room for what it has made, or others of its own stage."""
CAUSES: tuple[Cause, ...] = ("input", "room", "peers")
SAID: dict[Cause, str] = {"input": "waits for input", "room": "waits for room", "peers": "waits for its peers"}


class Aborted(Exception):
    """The run is ending, or regrouping, for another worker's reason."""


class Worker:
    """One worker thread: what it does, for whoever asks from another thread, and how long it has waited so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.step: int | None = None
        self.doing = "starts"
        self.done = False
        self._waited_s: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self._waits: tuple[Cause, float] | None = None
        """What it waits for right now, and since when."""

    @property
    def idle(self) -> bool:
        """It waits for somebody else, or has nothing left to do."""
        return self._waits is not None

    def __str__(self) -> str:
        waits = self._waits
        doing = "is done" if self.done else SAID[waits[0]] if waits else self.doing
        return f"{self.name} {doing}" if self.step is None else f"{self.name} {doing} (step {self.step})"

    def end(self) -> None:
        """It has nothing left to do, which is no work: as if all that it could make were made."""
        self.done, self._waits = True, ("room", time.monotonic())

    @contextlib.contextmanager
    def waiting(self, cause: Cause) -> Iterator[None]:
        self._waits = cause, time.monotonic()
        try:
            yield
        finally:
            _, since = self._waits
            self._waits = None
            self._waited_s[cause] += time.monotonic() - since

    def waited_on_device(self, cause: Cause, seconds: float) -> None:
        """Its device has, while the thread itself was ahead."""
        self._waited_s[cause] += seconds

    def waited_s(self, now: float) -> dict[Cause, float]:
        """Altogether, with what it waits for right now."""
        waited, waits = dict(self._waited_s), self._waits
        if waits:
            waited[waits[0]] += max(0.0, now - waits[1])
        return waited


_here = threading.local()


def waiting(cause: Cause) -> contextlib.AbstractContextManager[None]:
    """What is inside counts as waiting of the worker whose thread this is, if it is a worker's."""
    worker: Worker | None = getattr(_here, "worker", None)
    return worker.waiting(cause) if worker else contextlib.nullcontext()


class Channel(Generic[T]):
    """A queue of at most `size` items that can be closed from any thread. Items come out by number, rising from
    `first`, whoever puts them in and when; so several threads may fill it without changing what comes out."""

    def __init__(self, size: int, *, first: int = 0) -> None:
        self.size = size
        self._items: dict[int, T] = {}
        self._next_in = self._next_out = first
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: T, number: int | None = None) -> None:
        """Waits until fewer than `size` items come before it; without a number it is the next. Raises `Aborted` once
        closed."""
        with self._changed:
            number = self._next_in if number is None else number
            self._next_in = max(self._next_in, number + 1)
            self._wait_until("room", lambda: number < self._next_out + self.size)
            self._items[number] = item
            self._changed.notify_all()

    def get(self) -> T:
        """Waits for the next item. Raises `Aborted` once closed, also when items are left."""
        with self._changed:
            self._wait_until("input", lambda: self._next_out in self._items)
            item = self._items.pop(self._next_out)
            self._next_out += 1
            self._changed.notify_all()
            return item

    def _wait_until(self, cause: Cause, ready: Callable[[], bool]) -> None:
        if not (self._closed or ready()):
            with waiting(cause):
                self._changed.wait_for(lambda: self._closed or ready())
        if self._closed:
            raise Aborted

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)


class Crew:
    """The worker threads of a run. `failed` is the name of the worker whose failure ended it, by `error`."""

    def __init__(self, reporter: Reporter, *, abort: Callable[[str], None]) -> None:
        """`abort` is told who has failed."""
        self.failed: str | None = None
        self.error: BaseException | None = None
        self.workers: dict[str, Worker] = {}
        self._reporter, self._abort = reporter, abort
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[Worker], None]) -> threading.Thread:
        self.workers[name] = worker = Worker(name)
        # Daemon: a worker stuck inside a kernel must not keep a failed process alive.
        thread = threading.Thread(target=self._run, args=(worker, work), name=name, daemon=True)
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

    def fail(self, name: str, error: BaseException) -> None:
        """The run ends because of `error`, unless it already does because of another."""
        name = getattr(error, "worker", name)  # one worker may find out what went wrong in another
        with self._lock:
            first = self.failed is None
            if first:
                self.failed, self.error = name, error
        if first:
            worker = self.workers.get(name)
            doing, step = (worker.doing, worker.step) if worker else (None, None)
            # Open the others' doors before anything slow or fallible, such as writing to a full disk.
            self._abort(name)
            self._reporter.exception(name, error, step=step, doing=doing)

    def _run(self, worker: Worker, work: Callable[[Worker], None]) -> None:
        reason = "done"
        _here.worker = worker
        self._reporter.event("worker_up", worker=worker.name)
        try:
            work(worker)
        except Aborted:
            reason = "aborted"
        except BaseException as error:
            reason = "failed"
            self.fail(worker.name, error)
        finally:
            worker.end()
            self._reporter.event("worker_down", worker=worker.name, reason=reason)
