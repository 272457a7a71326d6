"""Opens one SSH connection: TCP, the key exchange, the host's key, the login; each failure says which of them it was.

Only connecting is ever tried again, and only when sshd hung up before it said a word (MaxStartups makes it do so).
"""

from __future__ import annotations

import contextlib
import logging
import random
import shlex
import socket
import threading
import time

import paramiko
from paramiko.ssh_exception import IncompatiblePeer, SSHException

from orchestrator.errors import HostKeyError, SpecctlError, UnreachableError
from orchestrator.transport import known_hosts
from orchestrator.transport.base import Limits
from orchestrator.transport.known_hosts import HostEntry
from orchestrator.transport.ssh_auth import authenticate
from orchestrator.transport.ssh_config import SshOptions

CONNECT_TRIES = 5
KEEPALIVE_S = 5
TCP_USER_TIMEOUT_MS = 8000


class _HungUp(Exception):
    """The other side closed the connection before the host key was seen."""


def connect(options: SshOptions, *, target: str, limits: Limits) -> paramiko.Transport:
    """A connection that is logged in. Raises an `UnreachableError` that says how far it came."""
    # Without a handler, logging would print paramiko's tracebacks to stderr.
    logging.getLogger("paramiko").addHandler(_SILENT)
    for attempt in range(1, CONNECT_TRIES + 1):
        try:
            return _connect_once(options, target, limits)
        except _HungUp as error:
            if attempt == CONNECT_TRIES:
                raise UnreachableError(
                    f"{options.where} answers, but hangs up before it says that it is an SSH server ({error}); "
                    f"tried {attempt} times",
                    target=target,
                    hint="is the port sshd's? Its MaxStartups and the node's log may tell more",
                ) from error
            pause_s = random.uniform(0.1, 0.3) * 2**attempt
            left_s = limits.left_s()
            time.sleep(pause_s if left_s is None else min(pause_s, left_s))
    raise AssertionError("unreachable: the last attempt returns or raises")


_SILENT = logging.NullHandler()


def _connect_once(options: SshOptions, target: str, limits: Limits) -> paramiko.Transport:
    left_s = limits.left_s()
    timeout_s = options.connect_timeout_s if left_s is None else min(left_s, options.connect_timeout_s)
    entries = known_hosts.read(options.known_hosts_files)
    transport = paramiko.Transport(_dial(options, timeout_s, target))
    done = False
    try:
        transport.banner_timeout = timeout_s
        transport.handshake_timeout = timeout_s
        transport.auth_timeout = max(timeout_s, 15.0)
        transport.use_compression(options.compression)
        _prefer(transport, known_hosts.types_on_record(entries, options.record_name))
        _exchange_keys(transport, options, timeout_s, target)
        _check_host_key(transport.get_remote_server_key(), entries, options, target)
        authenticate(transport, options, target=target)
        transport.set_keepalive(KEEPALIVE_S)
        done = True
        return transport
    finally:
        if not done:
            transport.close()


def _dial(options: SshOptions, timeout_s: float, target: str) -> socket.socket:
    where, name = options.where, options.hostname
    try:
        addresses = socket.getaddrinfo(name, options.port, options.address_family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        hint = f"check ssh: in hosts.yaml, and HostName in ssh_config; `{options.ssh_command} true` should work"
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreachableError(f"no address for host {name!r}: {why}", target=target, hint=hint) from error
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, address in addresses:
        connection = socket.socket(family, kind, protocol)
        try:
            _tune(connection)
            connection.settimeout(timeout_s)
            if options.bind_address:
                connection.bind((options.bind_address, 0))
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            failure = error
    if isinstance(failure, ConnectionRefusedError):
        raise UnreachableError(
            f"{where} refused the connection",
            target=target,
            hint="is sshd running there, and is that its port?",
        ) from failure
    if isinstance(failure, TimeoutError):
        raise UnreachableError(
            f"{where} did not answer within {timeout_s:g} s",
            target=target,
            hint="is the machine up and the network (VPN, firewall) open?",
        ) from failure
    raise UnreachableError(
        f"{where} cannot be reached: {failure.strerror or failure}", target=target, hint="check the network"
    ) from failure


def _tune(connection: socket.socket) -> None:
    """No Nagle (45 ms a command), and a dead peer is noticed in seconds instead of hours."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", TCP_USER_TIMEOUT_MS), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2)):
        option = getattr(socket, name, None)  # not every system has each
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _prefer(transport: paramiko.Transport, recorded: list[str]) -> None:
    """Ask for the key types that are on record first, so that the server shows the key that can be compared."""
    supported = list(transport.get_security_options().key_types)
    wanted: list[str] = []
    for key_type in recorded:
        wanted += ["rsa-sha2-512", "rsa-sha2-256"] if key_type == "ssh-rsa" else [key_type]
    first = [name for name in wanted if name in supported]
    transport.get_security_options().key_types = [*first, *(name for name in supported if name not in first)]


def _exchange_keys(transport: paramiko.Transport, options: SshOptions, timeout_s: float, target: str) -> None:
    negotiated = threading.Event()
    silent_at = time.monotonic() + 0.9 * timeout_s
    try:
        transport.start_client(event=negotiated)
        negotiated.wait(timeout_s + 1)
        if not transport.is_active():
            raise transport.get_exception() or EOFError("closed")
        if not negotiated.is_set():
            raise TimeoutError
    except IncompatiblePeer as error:
        raise UnreachableError(
            f"{options.where} and specctl share no algorithm: {error}",
            target=target,
            hint="its sshd is too old, or its Ciphers, MACs, KexAlgorithms or HostKeyAlgorithms are too narrow",
        ) from error
    except (SSHException, EOFError, OSError) as error:
        # paramiko has one exception for a peer that hangs up and for one that says nothing.
        if time.monotonic() < silent_at:
            raise _HungUp(" ".join(str(error).split()) or type(error).__name__) from error
        raise UnreachableError(
            f"{options.where} took the connection, but no key exchange came within {timeout_s:g} s",
            target=target,
            hint="the machine may be overloaded or its sshd stuck",
        ) from error


def _check_host_key(key: paramiko.PKey, entries: list[HostEntry], options: SshOptions, target: str) -> None:
    """Raises `HostKeyError` unless the key is the one on record. Nothing is asked and nothing is written."""
    name, where = options.record_name, options.where
    bare = options.hostname if name == where else None
    key_type, blob = key.get_name(), key.asbytes()
    judgement = known_hosts.judge(entries, name, key_type, blob, bare_name=bare)
    shown = f"{key_type} {known_hosts.fingerprint(blob)}"
    if judgement.standing == "known":
        return
    raise _host_key_error(judgement, shown, where, name, options, target)


def _host_key_error(
    judgement: known_hosts.Judgement, shown: str, where: str, name: str, options: SshOptions, target: str
) -> SpecctlError:
    lines = [f"{entry.file}:{entry.line}" for entry in judgement.entries]
    if judgement.standing == "revoked":
        return HostKeyError(
            f"the host key of {where} is revoked by {lines[0]}: the server shows {shown}",
            target=target,
            hint=f"give the host a new key (ssh-keygen -A there), or remove that line if it is wrong: {lines[0]}",
        )
    if judgement.standing == "changed":
        recorded = ", ".join(
            f"{entry.key_type} {known_hosts.fingerprint(entry.key)} ({entry.file}:{entry.line})"
            for entry in judgement.entries
        )
        remove = shlex.join(["ssh-keygen", "-f", judgement.entries[0].file, "-R", name])
        return HostKeyError(
            f"the host key of {where} has changed: on record is {recorded}, but the server shows {shown}; "
            "either it was installed anew, or somebody is in between",
            target=target,
            hint=f"if you know why it changed: {remove}",
        )
    files = ", ".join(options.known_hosts_files) or "any known_hosts file"
    authority = (
        "; a @cert-authority line names it, but host certificates are not supported: its plain key has to be on record"
        if judgement.authority
        else ""
    )
    ask = options.ssh_command.replace("ssh ", "ssh -o StrictHostKeyChecking=ask ", 1)
    return HostKeyError(
        f"the host key of {where} is not known: the server shows {shown}, and {files} has none for it{authority}",
        target=target,
        hint=f"compare that fingerprint with the host's own, then accept it: {ask} true",
    )
