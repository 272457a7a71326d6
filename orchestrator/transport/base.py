"""What every way to reach a target has in common: `Transport.run` and `Transport.stream`, each under a deadline.

A transport carries an argv there and bytes back, and knows nothing of runs. What an exit code means is the caller's
to say, by the frame in the answer; `Transport.explain` says what went wrong when no frame came.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from orchestrator.errors import DeadlineExceeded, LinkLost, SpecctlError
from orchestrator.record import record
from orchestrator.transport.terminal import Screen, Terminal

Stdin = bytes | Iterable[bytes]
T = TypeVar("T")

CHUNK_BYTES = 256 * 1024
MOMENT_S = 1.0
RUN_STDERR_LIMIT = 64 * 1024 * 1024
STREAM_STDERR_LIMIT = 256 * 1024


@record
class Completed:
    """What came back of one command. `exit_code` None: it is not known how the command ended."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    why_unknown: str | None = None
    """Why `exit_code` is None: killed by a signal, or the connection ended."""
    link_lost: bool = False
    """The connection ended before the command did: it may have run, and may still be running."""


class Stream(ABC):
    """A command that is running: iterate for its stdout, as it comes. Leaving the `with` block lets go of it.

    Iterating raises `DeadlineExceeded` at the deadline, and `LinkLost` when the connection ends or nothing moved for
    `idle_s`. `exit_code` is set once the iteration has ended by itself; None then means killed by a signal.
    """

    exit_code: int | None = None
    why_unknown: str | None = None

    def __init__(self, stderr_limit: int) -> None:
        self._stderr = Tail(stderr_limit)

    @property
    def stderr(self) -> bytes:
        """The end of what came on stderr so far."""
        return self._stderr.value

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]: ...

    @abstractmethod
    def close(self) -> None:
        """Let go of the command; what it does then is the transport's to say. Never blocks, may be repeated."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Transport(ABC):
    """A way to run commands on one target. Safe to use from several threads."""

    def __init__(self, target: str) -> None:
        self.target = target
        """The name that its errors carry."""
        self.late = "the machine, its workdir or a shell start-up file there hangs, or is slow; ask again"
        """What is said where an answer took too long."""
        self.trial: str | None = None
        """What to do where there was none."""

    def run(self, argv: list[str], *, stdin: Stdin = b"", deadline_s: float) -> Completed:
        """Run `argv` to its end. Both streams are drained while stdin is fed.

        Raises `DeadlineExceeded` when that takes longer than `deadline_s`, and `UnreachableError` when the command
        could not be sent at all. A connection that ends later is no error here, since the answer may have come whole:
        it is told by `Completed.link_lost`.
        """
        stdout = bytearray()
        limits = Limits(deadline_s, None, self.target, self.late)
        with self._open(self._bounded(argv, deadline_s), stdin, limits, RUN_STDERR_LIMIT) as stream:
            try:
                for chunk in stream:
                    stdout += chunk
            except LinkLost as error:
                return Completed(
                    exit_code=None,
                    stdout=bytes(stdout),
                    stderr=stream.stderr,
                    why_unknown=error.message,
                    link_lost=True,
                )
            except DeadlineExceeded as error:
                said = bytes(stdout + stream.stderr).decode(errors="replace")
                raise DeadlineExceeded(error.message + _words(said), target=self.target, hint=error.hint) from error
            return Completed(
                exit_code=stream.exit_code,
                stdout=bytes(stdout),
                stderr=stream.stderr,
                why_unknown=stream.why_unknown,
            )

    def stream(
        self, argv: list[str], *, stdin: Stdin = b"", deadline_s: float | None = None, idle_s: float | None = None
    ) -> Stream:
        """Start `argv` and return its `Stream`, to be used as a context manager. Only the end of stderr is kept."""
        limits = Limits(deadline_s, idle_s, self.target, self.late)
        return self._open(self._bounded(argv, deadline_s), stdin, limits, STREAM_STDERR_LIMIT)

    def explain(self, completed: Completed) -> SpecctlError | None:
        """Why a command gave no answer, as far as the transport can tell from `completed`; None if it cannot.

        To be asked only when the answer holds no frame: a command that ran may print anything.
        """
        if completed.link_lost:
            return LinkLost(
                completed.why_unknown or "the connection ended before the answer was complete",
                target=self.target,
                hint="whether the command ran is not known; ask again",
            )
        return None

    def for_reads(self) -> Transport:
        """The way to the same place for commands that leave no process there: it may be a quicker one."""
        return self

    def _bounded(self, argv: list[str], deadline_s: float | None) -> list[str]:
        """`argv` that is also ended there at the deadline, where letting go of it does not end it."""
        return argv

    @abstractmethod
    def _open(self, argv: list[str], stdin: Stdin, limits: Limits, stderr_limit: int) -> Stream: ...

    @abstractmethod
    def terminal(self, argv: list[str], screen: Screen, *, deadline_s: float) -> Terminal:
        """Start `argv` with a terminal there, like `screen`. Raises `UnreachableError` when that takes too long."""

    def close(self) -> None:  # noqa: B027  (a transport may hold nothing)
        """Let go of what the transport holds; it may be used again, and then opens what it needs."""


class Limits:
    """The time that a command has: until the deadline, and without a sign of life."""

    def __init__(self, deadline_s: float | None, idle_s: float | None, target: str, late: str) -> None:
        self.deadline_s, self.idle_s, self.target, self.late = deadline_s, idle_s, target, late
        self._started = self._moved = time.monotonic()

    def moved(self) -> None:
        """Something was sent or came."""
        self._moved = time.monotonic()

    @property
    def over(self) -> bool:
        return self.deadline_s is not None and time.monotonic() >= self._started + self.deadline_s

    def wait(self, wait: Callable[[float], T]) -> T:
        """`wait(seconds)`, a moment at a time. What it takes beyond that this program has slept itself (Ctrl-Z, a
        closed lid): nobody was late meanwhile, and what has come is read before anything is said."""
        left_s = self.left_s()
        moment_s = MOMENT_S if left_s is None else min(left_s, MOMENT_S)
        began = time.monotonic()
        try:
            return wait(moment_s)
        finally:
            slept_s = time.monotonic() - began - moment_s
            if slept_s > MOMENT_S:
                self._started += slept_s
                self._moved += slept_s

    def left_s(self) -> float | None:
        """Seconds until one of the limits is reached, None when there is none. Raises the error of a reached one."""
        now = time.monotonic()
        left = None
        if self.deadline_s is not None:
            left = self._started + self.deadline_s - now
            if left <= 0:
                raise DeadlineExceeded(
                    f"no complete answer within {self.deadline_s:g} s",
                    target=self.target,
                    hint=self.late,
                )
        if self.idle_s is not None:
            idle = self._moved + self.idle_s - now
            if idle <= 0:
                raise LinkLost(
                    f"nothing was heard for {self.idle_s:g} s: the connection is lost, or the other side hangs",
                    target=self.target,
                    hint=f"the state of what runs there is not known; {self.late}",
                )
            left = idle if left is None else min(left, idle)
        return left


def _words(said: str) -> str:
    """What came in place of an answer, if it is for people's eyes (a frame is not)."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    text = " ".join("".join(char if char.isprintable() else " " for char in plain).split())
    return f"; all it said is: {text[-200:]}" if text and "\x1e" not in said else ""


class Tail:
    """The last `limit` bytes of what was added."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        # Cut rarely, so that a chatty stream does not move the whole tail with every chunk.
        if len(self._data) > 2 * self._limit:
            del self._data[: -self._limit]

    @property
    def value(self) -> bytes:
        return bytes(self._data[-self._limit :])


def pieces(stdin: Stdin) -> Iterator[bytes]:
    """`stdin` in pieces of at most a chunk, without the empty ones."""
    for block in [stdin] if isinstance(stdin, bytes) else stdin:
        for start in range(0, len(block), CHUNK_BYTES):
            yield block[start : start + CHUNK_BYTES]
