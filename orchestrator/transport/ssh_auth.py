"""Proves to a node who is asking: with the keys of the agent, then with key files, in OpenSSH's order.

Nothing is ever asked of the person: a key that needs a passphrase is used through the agent or named in the error.
"""

from __future__ import annotations

import base64
import socket
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    PasswordRequiredException,
    SSHException,
)

from orchestrator.errors import AuthError, DeadlineExceeded, LinkLost
from orchestrator.transport.ssh_config import SshOptions

_MAGIC = b"openssh-key-v1\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    key: paramiko.PKey
    source: str


def authenticate(transport: paramiko.Transport, options: SshOptions, *, target: str) -> None:
    """Log in on `transport`. Raises `AuthError` that says what was tried, and what could not be."""
    agent = _agent(options)
    try:
        candidates, unusable = _candidates(agent, options)
        _log_in(transport, options, candidates, unusable, target)
    finally:
        agent.close()


def _log_in(
    transport: paramiko.Transport,
    options: SshOptions,
    candidates: list[_Candidate],
    unusable: list[str],
    target: str,
) -> None:
    who = f"{options.user}@{options.hostname} port {options.port}"
    tried: list[str] = []
    try:
        try:
            transport.auth_none(options.user)
            return
        except BadAuthenticationType as error:
            if "publickey" not in error.allowed_types:
                offered = ", ".join(error.allowed_types) or "nothing"
                raise AuthError(
                    f"{who} takes no keys, only {offered}",
                    target=target,
                    hint="let its sshd accept keys (PubkeyAuthentication)",
                ) from error
        for candidate in candidates:
            tried.append(candidate.source)
            try:
                further = transport.auth_publickey(options.user, candidate.key)
            except BadAuthenticationType as error:
                raise _refused(who, tried, unusable, options, target) from error
            except AuthenticationException as error:
                if not transport.is_active() or _is_silence(error):
                    raise
                continue
            if further:
                raise AuthError(
                    f"{who} took the key {candidate.source} but wants {', '.join(further)} as well",
                    target=target,
                    hint="a second factor cannot be asked for here; let this key log in by itself",
                )
            return
    except (SSHException, EOFError, OSError) as error:
        if _is_silence(error):
            raise DeadlineExceeded(
                f"{who} did not answer the login within {transport.auth_timeout:g} s",
                target=target,
                hint="the node is busy or hangs; whether the key would do is not known",
            ) from error
        if transport.is_active() and isinstance(error, AuthenticationException):
            raise _refused(who, tried, unusable, options, target) from error
        if tried:
            raise AuthError(
                f"{who} ended the connection after {len(tried)} keys ({', '.join(tried)}): {error}",
                target=target,
                hint="too many keys were offered? Set IdentityFile and IdentitiesOnly yes for this host in ssh_config",
            ) from error
        raise LinkLost(f"{who} ended the connection while logging in: {error}", target=target) from error
    raise _refused(who, tried, unusable, options, target)


def _is_silence(error: Exception) -> bool:
    """paramiko says a time-out in the words of a refusal."""
    return isinstance(error, AuthenticationException) and "timeout" in str(error).lower()


def _refused(who: str, tried: list[str], unusable: list[str], options: SshOptions, target: str) -> AuthError:
    parts = [f"refused {', '.join(tried)}" if tried else "no key was there to offer", *unusable]
    encrypted = next((note.split(" is encrypted")[0] for note in unusable if " is encrypted" in note), None)
    if encrypted:
        hint = f"ssh-add {encrypted}"
    elif tried:
        hint = f"put its public key into ~{options.user}/.ssh/authorized_keys there; `{options.ssh_command} true` tells"
    else:
        hint = "make a key with ssh-keygen, or set IdentityFile for this host in ssh_config"
    return AuthError(f"cannot log in as {who}: {'; '.join(parts)}", target=target, hint=hint)


# --- keys -----------------------------------------------------------------------------------------------------------


def _candidates(agent: _Agent, options: SshOptions) -> tuple[list[_Candidate], list[str]]:
    """The keys to offer, in order, and why others cannot be."""
    in_agent = {key.blob: key for key in agent.get_keys()}
    files: list[_Candidate] = []
    first: list[_Candidate] = []
    unusable: list[str] = [agent.trouble] if agent.trouble else []
    for path in options.identity_files:
        blob = _public_blob(path)
        if blob is not None and blob in in_agent:
            first.append(_Candidate(key=in_agent.pop(blob), source=f"{path} (agent)"))
            continue
        if not Path(path).exists():
            continue
        loaded = _load(path)
        if isinstance(loaded, str):
            unusable.append(loaded)
        else:
            files.append(_Candidate(key=loaded, source=path))
    others = [] if options.identities_only else list(in_agent.values())
    rest = [_Candidate(key=key, source=f"{key.comment or key.name} (agent)") for key in others]
    return [*first, *rest, *files], unusable


def _load(path: str) -> paramiko.PKey | str:
    """The private key at `path`, or why it cannot be used."""
    try:
        return paramiko.PKey.from_path(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (PasswordRequiredException, TypeError):
        # The TypeError is the cryptography package's way to say that a password is needed.
        return f"{path} is encrypted and the agent does not hold it"
    except Exception as error:  # paramiko and cryptography raise a dozen kinds for a file that is no usable key
        return f"{path} is no usable key ({' '.join(str(error).split())[:120] or type(error).__name__})"


def _public_blob(path: str) -> bytes | None:
    """The public half of the key at `path`, without any passphrase: from `.pub`, or from the key file's clear part."""
    for name in (f"{path}.pub", path):
        try:
            text = Path(name).read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        words = text.split()
        try:
            if "-----BEGIN OPENSSH PRIVATE KEY-----" in text:
                return _clear_part(base64.b64decode("".join(text.split("-----")[2].split())))
            if len(words) >= 2 and words[0].startswith(("ssh-", "ecdsa-", "sk-")):
                return base64.b64decode(words[1])
        except (ValueError, IndexError):
            continue
    return None


def _clear_part(data: bytes) -> bytes | None:
    if not data.startswith(_MAGIC):
        return None
    message = paramiko.Message(data[len(_MAGIC) :])
    for _ in ("cipher", "kdf", "kdf options"):
        message.get_string()
    return message.get_string() if message.get_int() == 1 else None


# --- the agent ------------------------------------------------------------------------------------------------------


class _Agent(AgentSSH):
    """An ssh-agent at a given socket (paramiko's own class knows only $SSH_AUTH_SOCK)."""

    def __init__(self) -> None:
        super().__init__()
        self.trouble: str | None = None

    def get_keys(self) -> tuple[AgentKey, ...]:
        return tuple(super().get_keys())

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def _agent(options: SshOptions) -> _Agent:
    agent = _Agent()
    if options.identity_agent is None:
        return agent
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    try:
        connection.connect(options.identity_agent)
        agent._connect(connection)  # type: ignore[attr-defined]
    except (OSError, SSHException) as error:
        connection.close()
        agent.trouble = f"the agent at {options.identity_agent} does not answer ({error})"
    return agent
