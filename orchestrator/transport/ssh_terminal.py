"""A terminal on an SSH host: a channel of the verified connection that all other commands use, too."""

from __future__ import annotations

import contextlib
import threading
import time

import paramiko
from paramiko.ssh_exception import ChannelException, SSHException

from orchestrator.errors import LinkLost, UnreachableError
from orchestrator.transport.base import Limits
from orchestrator.transport.ssh_node import Link, SshNode, ended
from orchestrator.transport.terminal import READ_BYTES, Screen, Terminal

ASK_S = 3.0
SILENT_S = 15.0
"""After so long without an answer the connection counts as lost: nothing else ends a wait for a dead peer."""
SEND_S = 10.0


class SshTerminal(Terminal):
    """`command` with a terminal of the host that `node` reaches."""

    def __init__(self, node: SshNode, command: str, screen: Screen, limits: Limits) -> None:
        self._target = limits.target
        self._link: Link | None = node.link(limits)
        self._link.enter(limits)
        self._channel: paramiko.Channel | None = None
        try:
            self._channel = channel = self._link.transport.open_session(timeout=limits.left_s())
            channel.settimeout(SEND_S)
            channel.set_combine_stderr(True)
            channel.get_pty(screen.term, screen.columns, screen.rows)
            channel.exec_command(command)
        except (ChannelException, SSHException, EOFError, OSError) as error:
            gone = ended(self._link.transport)
            self.close()
            if gone:
                raise self._lost("the connection ended before the terminal was open") from error
            raise UnreachableError(
                f"the node opens no terminal: {error}", target=self._target,
                hint="see PermitTTY, MaxSessions and ForceCommand of its sshd",
            ) from error  # fmt: skip
        self._heard_at = time.monotonic()
        threading.Thread(target=self._ask, args=(self._link.transport,), daemon=True).start()

    def _ask(self, transport: paramiko.Transport) -> None:
        """Notes when the other side last answered."""
        while self._channel is not None and transport.is_active():
            with contextlib.suppress(SSHException, EOFError, OSError):
                transport.global_request("keepalive@openssh.com", wait=True)
                if transport.is_active():
                    self._heard_at = time.monotonic()
            time.sleep(ASK_S)

    def fileno(self) -> int:
        assert self._channel is not None
        return int(self._channel.fileno())

    def read(self) -> bytes | None:
        assert self._channel is not None and self._link is not None
        try:
            data = self._channel.recv(READ_BYTES)
        except TimeoutError:
            return None
        except (SSHException, EOFError, OSError) as error:
            # To read is to write, too: the peer is told that there is room again.
            raise self._lost(f"the connection ended ({error})" if str(error) else "the connection ended") from error
        if not data:
            self._channel.status_event.wait(1.0)
            transport = self._link.transport
            if self._channel.exit_status < 0 and ended(transport):
                why = transport.get_exception()
                raise self._lost(f"the connection ended ({why})" if why else "the connection ended")
        return data

    def write(self, data: bytes) -> None:
        assert self._channel is not None
        try:
            self._channel.sendall(data)
        except TimeoutError as error:
            raise self._lost(f"nothing was taken for {SEND_S:g} s") from error
        except (SSHException, EOFError, OSError):
            pass  # it has ended, which the next read tells

    def resize(self, columns: int, rows: int) -> None:
        assert self._channel is not None
        with contextlib.suppress(SSHException, EOFError, OSError):
            self._channel.resize_pty(columns, rows)

    def check(self) -> None:
        if time.monotonic() - self._heard_at > SILENT_S:
            if self._link is not None:
                self._link.retire(suspect=True)
            raise self._lost(f"nothing was heard for {SILENT_S:g} s: the connection is lost")

    def close(self) -> None:
        channel, self._channel = self._channel, None
        link, self._link = self._link, None
        if channel is not None:
            # A peer that does not read can block even this.
            threading.Thread(target=_close, args=(channel,), daemon=True).start()
        if link is not None:
            link.leave()

    def _lost(self, why: str) -> LinkLost:
        return LinkLost(why, target=self._target, hint="the run goes on, or not: specctl status tells")


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(SSHException, EOFError, OSError):
        channel.close()
