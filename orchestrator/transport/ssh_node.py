"""The connection to one SSH host: opened when needed, over a jump host's if need be, kept, shared, and reopened.

A jump host is an `SshNode` like any other: one connection to it carries the tunnels to all hosts behind it, and the
commands that are meant for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import paramiko
from paramiko.ssh_exception import ChannelException, SSHException

from orchestrator.errors import ConfigError, SpecctlError, UnreachableError
from orchestrator.transport import ssh_config, ssh_way
from orchestrator.transport.base import Limits
from orchestrator.transport.host_keys import Trust
from orchestrator.transport.ssh_connect import connect
from orchestrator.transport.ssh_options import Jump, SshOptions
from orchestrator.transport.ssh_pulse import SILENT_S, Pulse
from orchestrator.transport.ssh_way import Way

MAX_CHANNELS = 8
"""Below sshd's default MaxSessions of 10, which counts no tunnels."""


class SshNode:
    """One SSH host. Safe to use from several threads."""

    def __init__(
        self,
        spec: str,
        *,
        ssh_config_file: str | None = None,
        trust: Trust | None = None,
        via: str | None = None,
        hop: Callable[[Jump], SshNode] | None = None,
        options: Future[SshOptions] | None = None,
    ) -> None:
        """`via` stands in for its own ProxyJump; `trust` takes in hosts that are new; `options` were asked for already,
        for the first connection.

        `hop` gives the node of a jump host, so that it can be shared.
        """
        self.spec = spec
        self._config_file, self._trust, self._via = ssh_config_file, trust, via
        self._hop = hop or self._own_hop
        self._options = options
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._attempts = 0
        self._failure: SpecctlError | None = None

    def link(self, limits: Limits, *, trail: tuple[Jump, ...] = ()) -> Link:
        """A living connection. Callers that wait while one of them connects share its failure, too.

        `trail` are the hosts that are to be reached through this one.
        """
        me = Jump(host=self.spec, via=self._via)
        if me in trail:
            circle = " -> ".join(jump.host for jump in (*trail, me))
            raise ConfigError(f"ProxyJump goes round in a circle: {circle}", hint="give one of them `ProxyJump none`")
        seen = self._attempts
        while not self._lock.acquire(timeout=limits.left_s() or -1):
            pass  # until left_s raises
        try:
            if self._link is not None and self._link.usable:
                return self._link
            if self._failure is not None and self._attempts != seen:
                raise self._failure
            try:
                if self._link is not None:
                    self._link.retire()
                    self._link = None
                self._link = self._connect(limits, (*trail, me))
                self._failure = None
            except SpecctlError as error:
                # One that ran out of its own time says nothing about the node to those with more.
                self._failure = None if limits.over else error
                raise
            finally:
                self._attempts += 1
            return self._link
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection as soon as no command uses it. The next command opens a new one."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.retire()

    def _connect(self, limits: Limits, trail: tuple[Jump, ...]) -> Link:
        asked, self._options = self._options, None
        options = asked.result() if asked else ssh_config.resolve(self.spec, self._config_file, via=self._via)
        jump, hop = options.jump, None
        if jump is not None:
            try:
                hop = self._hop(jump).link(limits, trail=trail)
            except SpecctlError as error:
                message = f"jump host {jump.host}: {error.message}"
                raise type(error)(message, target=self.spec, hint=error.hint) from error

        def dial(timeout_s: float) -> Way:
            if jump is not None and hop is not None:
                return hop.tunnel(options, jump, timeout_s, self.spec)
            if options.proxy_command is not None:
                return ssh_way.through_command(options)
            return ssh_way.straight(options, timeout_s, self.spec)

        try:
            transport, way = connect(options, dial, target=self.spec, limits=limits, trust=self._trust)
        except SpecctlError:
            if hop is not None and limits.over:
                hop.retire(suspect=True)
            raise
        return Link(transport, way, hop)

    def _own_hop(self, jump: Jump) -> SshNode:
        return SshNode(jump.host, ssh_config_file=self._config_file, trust=self._trust, via=jump.via)


class Link:
    """One connection, and who uses it."""

    def __init__(self, transport: paramiko.Transport, way: Way, hop: Link | None = None) -> None:
        self.transport = transport
        self.slots = threading.BoundedSemaphore(MAX_CHANNELS)
        self._way, self._hop = way, hop
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._closed = False
        self._pulse = Pulse(transport, self._fell_silent)

    @property
    def usable(self) -> bool:
        return not self._retired and self.transport.is_active()

    @property
    def shared(self) -> bool:
        return self._users > 1

    def why(self) -> str:
        """Why it has ended, for a message that says that it has."""
        if self._pulse.gone:
            return f"nothing was heard for {SILENT_S} s"
        return str(self.transport.get_exception() or "")

    def enter(self, limits: Limits) -> None:
        while not self.slots.acquire(timeout=limits.left_s()):
            pass  # until left_s raises
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        self.slots.release()
        self._drop()

    def tunnel(self, options: SshOptions, jump: Jump, timeout_s: float, target: str) -> Way:
        """A way from this host on to another one. Raises `UnreachableError` that names both."""
        with self._lock:
            self._users += 1
        try:
            channel = self.transport.open_channel(
                "direct-tcpip", (options.hostname, options.port), ("127.0.0.1", 0), timeout=timeout_s
            )
        except (SSHException, EOFError, OSError) as error:
            self._drop()
            raise _no_tunnel(error, self, options, jump, timeout_s, target) from error
        dropped = threading.Lock()

        def over() -> None:
            if dropped.acquire(blocking=False):
                self._drop()

        return Way(socket=channel, leads=f"jump host {jump.host}", over=over)

    def retire(self, *, suspect: bool = False) -> None:
        """No new users; closed when the last one leaves. `suspect`: it does not answer, and so may its jump host."""
        with self._lock:
            self._retired = True
        self._close_if_done()
        if suspect and self._hop is not None:
            self._hop.retire(suspect=True)

    def _drop(self) -> None:
        with self._lock:
            self._users -= 1
        self._close_if_done()

    def _close_if_done(self) -> None:
        with self._lock:
            if not self._retired or self._users:
                return
        self._end()

    def _fell_silent(self) -> None:
        self.retire(suspect=True)
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._way.abandon()
        # A peer that does not read can block even this.
        threading.Thread(target=self._close, daemon=True).start()

    def _close(self) -> None:
        self.transport.close()
        self._way.over()


def ended(transport: paramiko.Transport) -> bool:
    """Whether the connection is gone: paramiko wakes who waits for an answer a moment before it says so itself, and a
    connection that is lost takes its thread with it."""
    transport.join(0.3)
    return not transport.is_active()


def _no_tunnel(
    error: Exception, link: Link, options: SshOptions, jump: Jump, timeout_s: float, target: str
) -> UnreachableError:
    where = options.where
    if isinstance(error, ChannelException) and error.code == 1:
        message = f"jump host {jump.host} does not allow a way on to {where}"
        hint = "see AllowTcpForwarding and PermitOpen of its sshd, and `restrict` in its authorized_keys"
    elif ended(link.transport):
        link.retire()
        message, hint = f"jump host {jump.host} ended the connection", "ask again"
    elif "Timeout" in str(error):
        link.retire(suspect=True)
        message = f"jump host {jump.host} did not reach {where} within {timeout_s:g} s"
        hint = "is the machine up, and can the jump host reach it?"
    else:
        why = error.text if isinstance(error, ChannelException) else str(error)
        message = f"jump host {jump.host} cannot reach {where}: {why[:1].lower()}{why[1:]}"
        hint = f"that name is looked up and dialled from there: is it right, and does sshd listen on {where}?"
    return UnreachableError(message, target=target, hint=hint)
