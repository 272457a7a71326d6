"""Opens one SSH connection over a way that is given: the key exchange, the host's key, the login; each failure says
which of them it was.

Only connecting is ever tried again, and only when sshd hung up before it had shown its key (MaxStartups makes it do
so). Nothing has been asked of the node by then.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

import paramiko
from paramiko.common import MSG_DISCONNECT
from paramiko.ssh_exception import IncompatiblePeer, SSHException

from orchestrator.errors import ConfigError, LinkLost, UnreachableError
from orchestrator.transport import host_keys, ssh_pace
from orchestrator.transport.base import Limits
from orchestrator.transport.host_keys import Trust
from orchestrator.transport.ssh_auth import authenticate
from orchestrator.transport.ssh_options import SshOptions
from orchestrator.transport.ssh_pulse import Heard
from orchestrator.transport.ssh_way import Way

CONNECT_TRIES = 5
_FULL = ("Exceeded MaxStartups", "Not allowed at this time")
"""What sshd says when it hangs up for reasons that pass."""
_ALGORITHMS = {"KexAlgorithms": "kex", "HostKeyAlgorithms": "key_types", "Ciphers": "ciphers", "MACs": "digests"}


class _HungUp(Exception):
    """The other side closed the connection before the host key was seen; `missing` is what it did not get to."""

    def __init__(self, why: str, missing: str) -> None:
        super().__init__(why)
        self.missing = missing


def connect(
    options: SshOptions, dial: Callable[[float], Way], *, target: str, limits: Limits, trust: Trust | None = None
) -> tuple[paramiko.Transport, Way]:
    """A connection that is logged in, and the way that it uses; `dial` opens one within so many seconds.

    Raises an `UnreachableError` that says how far it came.
    """
    # Without a handler, logging would print paramiko's tracebacks to stderr.
    logging.getLogger("paramiko").addHandler(_SILENT)
    for attempt in range(1, CONNECT_TRIES + 1):
        try:
            with ssh_pace.turn(options.where, limits):
                return _connect_once(options, dial, target, limits, trust)
        except _HungUp as error:
            if attempt == CONNECT_TRIES:
                raise UnreachableError(
                    f"{options.where} answers, but hangs up before {error.missing} ({error}); tried {attempt} times",
                    target=target,
                    hint="is the port sshd's? Its MaxStartups and the node's log may tell more",
                ) from error
            pause_s = random.uniform(0.1, 0.3) * 2**attempt
            left_s = limits.left_s()
            time.sleep(pause_s if left_s is None else min(pause_s, left_s))
    raise AssertionError("unreachable: the last attempt returns or raises")


_SILENT = logging.NullHandler()


def _connect_once(
    options: SshOptions, dial: Callable[[float], Way], target: str, limits: Limits, trust: Trust | None
) -> tuple[paramiko.Transport, Way]:
    left_s = limits.left_s()
    timeout_s = options.connect_timeout_s if left_s is None else min(left_s, options.connect_timeout_s)
    way = dial(timeout_s)
    transport = None
    done = False
    try:
        records = host_keys.read(options)
        transport = paramiko.Transport(way.socket, packetizer_class=_Packetizer)
        transport.banner_timeout = timeout_s
        transport.handshake_timeout = timeout_s
        transport.auth_timeout = max(timeout_s, 15.0)
        transport.use_compression(options.compression)
        _choose_algorithms(transport, options, records.types(options.record_name), target)
        _exchange_keys(transport, options, way, timeout_s, target)
        host_keys.check(transport.get_remote_server_key(), records, options, target=target, trust=trust)
        authenticate(transport, options, target=target)
        done = True
        return transport, way
    except (SSHException, EOFError) as error:
        # Between two steps, each of which tells its own failures: paramiko then says that there is no session.
        raise LinkLost(
            f"{options.where} ended the connection before the login ({error})", target=target, hint="ask again"
        ) from error
    finally:
        if not done:
            way.abandon()
            (transport or way.socket).close()
            way.over()


class _Packetizer(Heard):
    """Keeps the last line before the keys are exchanged, and the last word after it: who hangs up may have said why."""

    greeting = ""
    farewell: str | None = None

    def read_message(self) -> tuple[int, paramiko.Message]:
        kind, message = super().read_message()
        if kind == MSG_DISCONNECT:
            copy = paramiko.Message(message.asbytes())
            copy.get_int()  # a code, which says less than the words
            self.farewell = " ".join(copy.get_string().decode(errors="replace").split())
        return kind, message

    def readline(self, timeout: float) -> str:
        line = str(super().readline(timeout))
        self.greeting = line.strip() or self.greeting
        return line


def _choose_algorithms(transport: paramiko.Transport, options: SshOptions, recorded: list[str], target: str) -> None:
    """What ssh_config allows; of host keys the recorded types first, so that the server shows what can be compared."""
    security = transport.get_security_options()
    for name, attribute in _ALGORITHMS.items():
        allowed = options.algorithms.get(name)
        if allowed is None:
            continue
        usable = [algorithm for algorithm in getattr(security, attribute) if algorithm in allowed]
        if not usable:
            raise ConfigError(
                f"{name} {','.join(allowed)} allows none that specctl knows for {options.where}",
                target=target,
                hint=f"allow one more for this host: {', '.join(getattr(security, attribute))}",
            )
        setattr(security, attribute, usable)
    wanted: list[str] = []
    for key_type in recorded:
        wanted += ["rsa-sha2-512", "rsa-sha2-256"] if key_type == "ssh-rsa" else [key_type]
    first = [name for name in wanted if name in security.key_types]
    security.key_types = [*first, *(name for name in security.key_types if name not in first)]


def _exchange_keys(transport: paramiko.Transport, options: SshOptions, way: Way, timeout_s: float, target: str) -> None:
    negotiated = threading.Event()
    silent_at = time.monotonic() + 0.9 * timeout_s
    where = f"{options.where} (through {way.leads})" if way.leads else options.where
    try:
        transport.start_client(event=negotiated)
        negotiated.wait(timeout_s + 1)
        if not transport.is_active():
            raise transport.get_exception() or EOFError("closed")
        if not negotiated.is_set():
            raise TimeoutError
    except IncompatiblePeer as error:
        raise UnreachableError(
            f"{where} and specctl share no algorithm: {error}",
            target=target,
            hint="its sshd is too old, or its Ciphers, MACs, KexAlgorithms or HostKeyAlgorithms are too narrow",
        ) from error
    except (SSHException, EOFError, OSError) as error:
        greeting = str(getattr(transport.packetizer, "greeting", ""))
        if not greeting and (said := way.said()):
            raise UnreachableError(
                f"{options.where}: {way.leads} brought no SSH server; it says: {said}",
                target=target,
                hint="mend that command in ssh_config",
            ) from error
        said = "" if greeting.startswith("SSH-") else greeting
        if said and not said.startswith(_FULL):
            raise UnreachableError(
                f"{where} is no SSH server: it says {said[:100]!r}",
                target=target,
                hint="check the port: ssh: in hosts.yaml, and Port in ssh_config",
            ) from error
        # paramiko has one exception for a peer that hangs up and for one that says nothing.
        if time.monotonic() < silent_at:
            missing = "the keys are exchanged" if greeting.startswith("SSH-") else "it says that it is an SSH server"
            raise _HungUp(f"it says: {said}" if said else " ".join(str(error).split()), missing) from error
        raise UnreachableError(
            f"{where} took the connection, but no key exchange came within {timeout_s:g} s",
            target=target,
            hint="the machine may be overloaded or its sshd stuck",
        ) from error
