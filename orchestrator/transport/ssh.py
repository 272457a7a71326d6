"""SSH through paramiko: commands on the one connection that an `SshNode` keeps, at most eight at once.

An `SshTransport` is one target's view of its node, so that errors carry the target's name. Every call of paramiko that
may block is made in the thread of the command it serves, which the caller waits for under a deadline: paramiko itself
has none for sending a command, and notices a dead peer only by TCP.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import paramiko
from paramiko.ssh_exception import ChannelException, SSHException

from orchestrator.errors import LinkLost, SpecctlError, UnreachableError
from orchestrator.transport import quoting
from orchestrator.transport.base import CHUNK_BYTES, Limits, Stdin, Stream, Transport, pieces
from orchestrator.transport.ssh_node import Link, SshNode, ended
from orchestrator.transport.ssh_terminal import SshTerminal
from orchestrator.transport.terminal import Screen, Terminal

__all__ = ["SshNode", "SshTransport"]

REFUSALS = 20
T = TypeVar("T")
_BOUND = 'command -v timeout >/dev/null && exec timeout -s KILL "$@"; shift; exec "$@"'
"""Closing a channel ends nothing there, so `timeout` does, where there is one; it takes the whole group along."""


class SshTransport(Transport):
    """Runs commands on an SSH host. The remote command line is `quoting.join(argv)`; nothing else quotes."""

    def __init__(self, node: SshNode, target: str | None = None) -> None:
        super().__init__(target or node.spec)
        self.node = node

    def _bounded(self, argv: list[str], deadline_s: float | None) -> list[str]:
        if deadline_s is None:
            return argv
        # A second later than here, so that the deadline is told by the one who waits.
        return ["sh", "-c", _BOUND, "specctl-bound", str(math.ceil(deadline_s) + 1), *argv]

    def _open(self, argv: list[str], stdin: Stdin, limits: Limits, stderr_limit: int) -> Stream:
        return _SshStream(self.node, quoting.join(argv), stdin, limits, stderr_limit)

    def terminal(self, argv: list[str], screen: Screen, *, deadline_s: float) -> Terminal:
        return SshTerminal(self.node, quoting.join(argv), screen, Limits(deadline_s, None, self.target, self.late))

    def close(self) -> None:
        self.node.close()


class _Wakeup(threading.Event):
    """Set by paramiko when bytes or the end come in. Only its owner re-arms it, before it looks: none is missed."""

    def clear(self) -> None:
        pass  # paramiko clears it when one of the two buffers is empty, whatever the other one holds

    def rearm(self) -> None:
        super().clear()


class _SshStream(Stream):
    def __init__(self, node: SshNode, command: str, stdin: Stdin, limits: Limits, stderr_limit: int) -> None:
        super().__init__(stderr_limit)
        self._node, self._command, self._stdin, self._limits = node, command, stdin, limits
        self._link: Link | None = None
        self._channel: paramiko.Channel | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._wakeup = _Wakeup()
        self._stdin_error: BaseException | None = None
        threading.Thread(target=self._start_and_feed, name=f"ssh {node.spec}", daemon=True).start()
        self._wait_for_start()

    # --- the command's own thread -----------------------------------------------------------------------------------

    def _start_and_feed(self) -> None:
        try:
            channel = self._start()
        except BaseException as error:
            self._started.put(error)
            if self._channel is not None:
                self._close_channel(self._channel)
            self._release()
            return
        self._started.put(None)
        try:
            self._feed(channel)
        except (OSError, EOFError, SSHException):
            pass  # nobody reads it any more; how the command ended tells why

    def _feed(self, channel: paramiko.Channel) -> None:
        source = pieces(self._stdin)
        while True:
            try:
                piece = next(source, None)
            except BaseException as error:
                # To end the input here would pass for the whole of it: the reader raises this instead.
                self._stdin_error = error
                self._wakeup.set()
                return
            if piece is None:
                channel.shutdown_write()
                return
            channel.sendall(piece)
            self._limits.moved()

    def _start(self) -> paramiko.Channel:
        """Open a channel and send the command. Everything before the sending is tried again; the sending never is."""
        refusals = 0
        while True:
            link = self._node.link(self._limits)
            link.enter(self._limits)
            self._link = link
            try:
                channel = link.transport.open_session(timeout=self._limits.left_s())
                break
            except (SSHException, EOFError, OSError) as error:
                # Which kind of error paramiko makes of a refusal depends on who else is refused at that moment; and
                # for a while sshd still counts the sessions that have just ended.
                refusals += link.transport.is_active() and not link.shared
                if refusals > REFUSALS:
                    why = error.text if isinstance(error, ChannelException) else str(error)
                    raise UnreachableError(
                        f"the node opens no session: {why}", hint="see MaxSessions of its sshd, and Match blocks there"
                    ) from error
            # The connection is dead, or full of other commands: no harm is done by asking once more.
            self._release()
            self._limits.left_s()
            time.sleep(0.05)
        with self._lock:
            self._channel = channel
            closed = self._closed
        if closed:
            channel.close()
            raise LinkLost("given up before the command was sent")
        try:
            channel.exec_command(self._command)
        except (SSHException, EOFError, OSError) as error:
            if not ended(link.transport):
                raise UnreachableError(
                    f"the node refuses to run commands: {error}", hint="see ForceCommand and the user's shell there"
                ) from error
            why = link.why()
            raise LinkLost(
                "the connection ended while the command was being sent"
                + (f" ({why})" if why else "")
                + "; it may have run",
                hint="ask again",
            ) from error
        return channel

    # --- the caller's thread ----------------------------------------------------------------------------------------

    def _wait_for_start(self) -> None:
        while True:
            try:
                error = self._wait(lambda left_s: self._started.get(timeout=left_s))
            except queue.Empty:
                continue
            if isinstance(error, SpecctlError):
                # Another target may share the failed connection: each says its own name.
                raise type(error)(error.message, target=self._limits.target, hint=error.hint) from error
            if error is not None:
                raise error
            return

    def __iter__(self) -> Iterator[bytes]:
        channel = self._channel
        assert channel is not None
        self._limits.moved()
        # Not fileno(): its pipe loses a wake-up when one stream is emptied while the other one fills.
        channel.in_buffer.set_event(self._wakeup)
        channel.in_stderr_buffer.set_event(self._wakeup)
        while True:
            self._wakeup.rearm()
            # Looked at before the buffers: what came before the end is in them by now.
            ended = channel.eof_received or channel.closed
            moved = False
            while channel.recv_stderr_ready():
                self._stderr.add(self._received(channel.recv_stderr))
                moved = True
            if channel.recv_ready():
                yield self._received(channel.recv)
                moved = True
            self._raise_stdin_error()
            if moved:
                self._limits.moved()
                self._within(self._limits.left_s)
            elif ended:
                break
            else:
                self._wait(self._wakeup.wait)
        self._finish(channel)

    def _received(self, receive: Callable[[int], bytes]) -> bytes:
        try:
            return receive(CHUNK_BYTES)
        except (OSError, EOFError, SSHException) as error:
            # To read is to write, too: the peer is told that there is room again.
            raise self._lost() from error

    def _raise_stdin_error(self) -> None:
        if self._stdin_error is not None:
            raise self._stdin_error

    def _finish(self, channel: paramiko.Channel) -> None:
        while not self._wait(channel.status_event.wait):
            pass
        self._raise_stdin_error()
        code = channel.recv_exit_status()
        if code >= 0:
            self.exit_code = code
            return
        # -1 is both a signal and a lost connection.
        transport = channel.get_transport()
        if not ended(transport) and channel.eof_received:
            self.why_unknown = "killed by a signal"
            return
        raise self._lost()

    def _lost(self) -> LinkLost:
        why = self._link.why() if self._link is not None else ""
        return LinkLost(
            "the connection ended before the command did" + (f": {why}" if why else ""),
            target=self._limits.target,
            hint="the state of what runs there is not known; ask again",
        )

    def _wait(self, wait: Callable[[float], T]) -> T:
        return self._within(lambda: self._limits.wait(wait))

    def _within(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except SpecctlError:
            # The peer may be dead without TCP knowing: whoever comes next gets a connection that was just proved.
            if self._link is not None:
                self._link.retire(suspect=True)
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channel = self._channel
        if channel is not None:
            threading.Thread(target=self._close_channel, args=(channel,), daemon=True).start()

    def _close_channel(self, channel: paramiko.Channel) -> None:
        try:
            channel.close()
        except (OSError, EOFError, SSHException):
            pass  # the connection has gone first, and its channels with it
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.leave()
