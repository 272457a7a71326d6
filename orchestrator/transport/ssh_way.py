"""How bytes come to an sshd: straight, through the user's ProxyCommand, or through a tunnel of a jump host.

A `Way` is what `ssh_connect` speaks SSH over; it knows nothing of keys and logins. Every TCP socket is set to notice a
dead peer in seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping

import paramiko

from orchestrator.errors import UnreachableError
from orchestrator.record import record
from orchestrator.transport.base import Tail
from orchestrator.transport.ssh_options import SshOptions

TCP_USER_TIMEOUT_MS = 7000
"""With the 3 to 4 s of silence after which a peer is asked: a cut link is told of in less than 12 s."""
PROXY_STDERR_BYTES = 4096
PROXY_GRACE_S = 2.0


def _nothing() -> None:
    pass


@record
class Way:
    """An open way to an sshd. Whoever has it calls `abandon` or `over`, once or more often."""

    socket: socket.socket | paramiko.Channel
    leads: str = ""
    """Through what, for messages; "" is straight there."""
    abandon: Callable[[], None] = _nothing
    """To be called before the connection is closed, so that closing cannot block. Never blocks itself."""
    over: Callable[[], None] = _nothing
    """To be called after the connection was closed."""
    said: Callable[[], str] = str
    """What the way itself complained of."""


# --- straight -------------------------------------------------------------------------------------------------------


def straight(options: SshOptions, timeout_s: float, target: str) -> Way:
    """A TCP connection. Raises `UnreachableError` that says how far it came."""
    where, name = options.where, options.hostname
    try:
        addresses = socket.getaddrinfo(name, options.port, options.address_family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        hint = f"check ssh: in hosts.yaml, and HostName in ssh_config; `{options.ssh_command} true` should work"
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        kind = {socket.AF_INET: "IPv4 ", socket.AF_INET6: "IPv6 "}.get(options.address_family, "")
        raise UnreachableError(f"no {kind}address for host {name!r}: {why}", target=target, hint=hint) from error
    failure: OSError = OSError("no address")
    for family, kind_of_socket, protocol, _, address in addresses:
        connection = socket.socket(family, kind_of_socket, protocol)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Nagle costs 45 ms a command
            connection.settimeout(timeout_s)
            if options.bind_address:
                connection.bind((options.bind_address, 0))
            connection.connect(address)
            _bound_silence(connection)
            return Way(socket=connection)
        except OSError as error:
            connection.close()
            failure = error
    if isinstance(failure, ConnectionRefusedError):
        message, hint = f"{where} refused the connection", "is sshd running there, and is that its port?"
    elif isinstance(failure, TimeoutError):
        message = f"{where} did not answer within {timeout_s:g} s"
        hint = "is the machine up and the network (VPN, firewall) open?"
    else:
        message, hint = f"{where} cannot be reached: {failure.strerror or failure}", "check the network"
    raise UnreachableError(message, target=target, hint=hint) from failure


def _bound_silence(connection: socket.socket) -> None:
    """A dead peer is noticed in seconds instead of hours. Only of a connection: it would cut ConnectTimeout short."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", TCP_USER_TIMEOUT_MS), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2)):
        option = getattr(socket, name, None)  # not every system has each
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


# --- through a ProxyCommand -----------------------------------------------------------------------------------------


def through_command(options: SshOptions) -> Way:
    """The user's ProxyCommand, with one end of a socket pair as its stdin and stdout; it ends with the connection."""
    assert options.proxy_command is not None
    ours, theirs = socket.socketpair()
    shell = os.environ.get("SHELL") or "/bin/sh"
    with theirs:
        # A session of its own: no terminal to ask on, and Ctrl-C is specctl's to hear.
        process = subprocess.Popen(
            [shell, "-c", f"exec {options.proxy_command}"], stdin=theirs.fileno(), stdout=theirs.fileno(),
            stderr=subprocess.PIPE, start_new_session=True, env=_below_a_shell(os.environ),
        )  # fmt: skip
    heard = Tail(PROXY_STDERR_BYTES)
    listener = threading.Thread(target=_listen, args=(process, heard), daemon=True)
    listener.start()

    def said() -> str:
        listener.join(0.2)  # what it said before it hung up may still be on its way
        return " ".join(heard.value.decode(errors="replace").split())[-300:]

    def over() -> None:
        _end(process, signal.SIGTERM)
        try:
            process.wait(PROXY_GRACE_S)
        except subprocess.TimeoutExpired:
            _end(process, signal.SIGKILL)
            process.wait()

    return Way(
        socket=ours, leads=f"ProxyCommand {options.proxy_command}", abandon=lambda: _end(process, signal.SIGTERM),
        over=over, said=said,
    )  # fmt: skip


def _below_a_shell(environ: Mapping[str, str]) -> dict[str, str]:
    """For a bash whose stdin is a socket: outermost, as under cron, it takes that for a login from afar and reads the
    user's start-up file, which may print, ask or wait."""
    level = environ.get("SHLVL", "")
    return {**environ, "SHLVL": level if level.isdigit() and int(level) else "1"}


def _listen(process: subprocess.Popen[bytes], heard: Tail) -> None:
    assert process.stderr is not None
    with process.stderr:
        while data := os.read(process.stderr.fileno(), 4096):
            heard.add(data)


def _end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    # Until it has been waited for, its pid and its group are its own.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
