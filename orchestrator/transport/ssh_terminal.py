"""A terminal on an SSH host: a channel of the verified connection that all other commands use, too."""

from __future__ import annotations

import contextlib
import threading

import paramiko
from paramiko.ssh_exception import ChannelException, SSHException

from orchestrator.errors import LinkLost, UnreachableError
from orchestrator.transport.base import Limits
from orchestrator.transport.ssh_node import Link, SshNode, ended
from orchestrator.transport.terminal import READ_BYTES, Screen, Terminal

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
            if ended(self._link.transport):
                why: UnreachableError = self._lost("the connection ended before the terminal was open")
            else:
                why = UnreachableError(
                    f"the node opens no terminal: {error}", target=self._target,
                    hint="see PermitTTY, MaxSessions and ForceCommand of its sshd",
                )  # fmt: skip
            self.close()
            raise why from error

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
            raise self._lost("the connection ended") from error
        if not data:
            self._channel.status_event.wait(1.0)
            if self._channel.exit_status < 0 and ended(self._link.transport):
                raise self._lost("the connection ended")
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

    def close(self) -> None:
        channel, self._channel = self._channel, None
        link, self._link = self._link, None
        if channel is not None:
            # A peer that does not read can block even this.
            threading.Thread(target=_close, args=(channel,), daemon=True).start()
        if link is not None:
            link.leave()

    def _lost(self, what: str) -> LinkLost:
        why = self._link.why() if self._link is not None else ""
        return LinkLost(
            f"{what}: {why}" if why else what, target=self._target, hint="the run goes on, or not: specctl status tells"
        )


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(SSHException, EOFError, OSError):
        channel.close()
