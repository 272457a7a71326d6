"""A request to stop, as a signal brings it: SIGTERM or SIGINT once finishes the step, again after 5 s ends at once.

Only the main thread runs signal handlers, and a handler can strike while that thread holds any lock; so the handler
takes none. It notes the request, which the loop reads at the end of a step, or ends the process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

REPEAT_IGNORED_S = 5.0


class StopRequest:
    """`requested` turns True once. Until `training` is set there is no step to finish, so the process ends at once."""

    def __init__(self) -> None:
        self.requested = False
        self.training = False
        self.on_exit: Callable[[bool, int], None] | None = None
        """Told (stopped, exit code) right before the handler ends the process; must not take locks."""
        self._first_at = 0.0

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._first_at = time.monotonic()
            if not self.training:
                self._exit(stopped=True, code=0)
        elif time.monotonic() - self._first_at >= REPEAT_IGNORED_S:
            self._exit(stopped=False, code=128 + number)

    def _exit(self, *, stopped: bool, code: int) -> None:
        if self.on_exit is not None:
            self.on_exit(stopped, code)
        # Not sys.exit: the exception could land in, and be swallowed by, whatever import or compile is going on.
        os._exit(code)
