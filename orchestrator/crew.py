"""Jobs at the same time, in threads that nobody has to wait for: a Ctrl-C leaves behind what hangs.

The executors of the standard library join their threads when the program ends, so one dead target would hold it up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Crew:
    """Runs jobs, at most `limit` of them at once."""

    def __init__(self, limit: int) -> None:
        self._slots = threading.BoundedSemaphore(limit)

    def do(self, job: Callable[[], T]) -> Future[T]:
        """Starts `job` as soon as there is room. Its result, or what it raised, is the future's."""
        future: Future[T] = Future()

        def work() -> None:
            with self._slots:
                try:
                    result = job()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        threading.Thread(target=work, daemon=True).start()
        return future
