"""This machine: commands are child processes, each in a session of its own so that it can be ended as a whole.

Also the node of `pct` targets that name no SSH host. A command that is let go of before its end is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
from collections.abc import Iterator
from typing import IO

from orchestrator.transport.base import CHUNK_BYTES, Limits, Stdin, Stream, Transport, pieces
from orchestrator.transport.terminal import LocalTerminal, Screen, Terminal


class LocalTransport(Transport):
    """Runs commands on this machine, with this process's environment and working directory."""

    def __init__(self, target: str = "local") -> None:
        super().__init__(target)

    def _open(self, argv: list[str], stdin: Stdin, limits: Limits, stderr_limit: int) -> Stream:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL if stdin == b"" else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            # As a remote shell would put it, so that a caller need not know where it runs.
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return _NeverStarted(code, f"specctl: {argv[0]}: {error.strerror}\n".encode())
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        return _LocalStream(process, stdin, limits, stderr_limit)

    def terminal(self, argv: list[str], screen: Screen, *, deadline_s: float) -> Terminal:
        return LocalTerminal(argv, screen, os.environ)


class _NeverStarted(Stream):
    def __init__(self, code: int, message: bytes) -> None:
        super().__init__(len(message))
        self._stderr.add(message)
        self.exit_code = code

    def __iter__(self) -> Iterator[bytes]:
        return iter(())

    def close(self) -> None:
        pass


class _LocalStream(Stream):
    def __init__(self, process: subprocess.Popen[bytes], stdin: Stdin, limits: Limits, stderr_limit: int) -> None:
        super().__init__(stderr_limit)
        self._process, self._limits = process, limits
        self._pieces = pieces(stdin)
        self._pending = b""

    def __iter__(self) -> Iterator[bytes]:
        process, limits = self._process, self._limits
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            outputs: set[IO[bytes]] = {process.stdout, process.stderr}
            for output in outputs:
                selector.register(output, selectors.EVENT_READ)
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE)
            limits.moved()
            # A program may close its outputs and still read on; then only its end says that nobody wants stdin.
            while outputs or (not _closed(process.stdin) and process.poll() is None):
                for key, _ in limits.wait(
                    selector.select if outputs else lambda left_s: selector.select(min(left_s, 0.05))
                ):
                    if key.fileobj is process.stdin:
                        if not self._feed(process.stdin):
                            selector.unregister(key.fileobj)
                            process.stdin.close()
                        limits.moved()
                        continue
                    data = os.read(key.fd, CHUNK_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                        outputs.discard(process.stdout if key.fileobj is process.stdout else process.stderr)
                    elif key.fileobj is process.stderr:
                        self._stderr.add(data)
                    else:
                        yield data
                    # After the yield: the time that the consumer takes is not the program's silence.
                    limits.moved()
        self._wait()

    def _feed(self, stdin: IO[bytes]) -> bool:
        """Write what fits. False when there is nothing more to write, or nobody who reads it."""
        if not self._pending:
            self._pending = next(self._pieces, b"")
        if not self._pending:
            return False
        try:
            written = os.write(stdin.fileno(), self._pending)
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        self._pending = self._pending[written:]
        return True

    def _wait(self) -> None:
        while True:
            try:
                code = self._limits.wait(lambda left_s: self._process.wait(timeout=left_s))
                break
            except subprocess.TimeoutExpired:
                continue
        if code >= 0:
            self.exit_code = code
        else:
            self.why_unknown = f"killed by signal {-code}"

    def close(self) -> None:
        process = self._process
        # While the leader has not been waited for, its pid is its own and so is the group: the kill cannot miss.
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                pass  # stuck in the kernel; it will be gone when that lets it go
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _closed(pipe: IO[bytes] | None) -> bool:
    return pipe is None or pipe.closed
