"""Proves to a node who is asking: with the keys of the agent, then with key files, in OpenSSH's order.

Nothing is ever asked of the person: a key that needs a passphrase is used through the agent or named in the error.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import os
import shlex
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    PasswordRequiredException,
    SSHException,
)

from orchestrator.errors import AuthError, DeadlineExceeded, LinkLost
from orchestrator.record import record
from orchestrator.transport.ssh_options import SshOptions

_CERTIFICATE = "-cert-v01@openssh.com"
_MAGIC = b"openssh-key-v1\0"


@record
class _Candidate:
    key: paramiko.PKey
    source: str
    blob: bytes
    """Its public half."""


@record
class _Unusable:
    """A key that cannot be offered, and the command that would change that."""

    why: str
    cure: str | None = None


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
    unusable: list[_Unusable],
    target: str,
) -> None:
    who = f"{options.user}@{options.hostname} port {options.port}"
    tried: list[str] = []
    others: list[str] = []
    try:
        try:
            transport.auth_none(options.user)
            return
        except BadAuthenticationType as error:
            others = [kind for kind in error.allowed_types if kind != "publickey"]
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
                raise _refused(who, tried, unusable, others, options, target) from error
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
            raise _refused(who, tried, unusable, others, options, target) from error
        farewell = getattr(transport.packetizer, "farewell", None)
        if tried and farewell is not None:
            raise AuthError(
                f"{who} ended the connection after {len(tried)} keys ({', '.join(tried)}): {farewell}",
                target=target,
                hint="too many keys were offered? Set IdentityFile and IdentitiesOnly yes for this host in ssh_config",
            ) from error
        raise LinkLost(
            f"the connection to {who} ended during the login" + (f": {farewell}" if farewell else ""),
            target=target,
            hint=f"ask again; if it ends each time, the log of sshd there tells why, or `{options.ssh_command} true`",
        ) from error
    raise _refused(who, tried, unusable, others, options, target)


def _is_silence(error: Exception) -> bool:
    """paramiko says a time-out in the words of a refusal."""
    return isinstance(error, AuthenticationException) and "timeout" in str(error).lower()


def _refused(
    who: str, tried: list[str], unusable: list[_Unusable], others: list[str], options: SshOptions, target: str
) -> AuthError:
    absent = [path for path in options.identity_files if not Path(path).exists()]
    parts = [f"refused {', '.join(tried)}" if tried else "no key was there to offer"]
    if absent and not tried and not unusable:
        parts[0] += f" (looked for {', '.join(absent)})"
    parts += [one.why for one in unusable]
    if options.pkcs11_provider:
        add = f"ssh-add -s {shlex.quote(options.pkcs11_provider)}"
        parts.append(f"the keys of PKCS11Provider can be used through the agent only ({add})")
    if others:
        parts.append(f"it would take {', '.join(others)} as well, which specctl does not have")
    cure = next((one.cure for one in unusable if one.cure), None)
    if cure:
        hint = cure
    elif tried:
        hint = f"put its public key into ~{options.user}/.ssh/authorized_keys there; `{options.ssh_command} true` tells"
    else:
        hint = "make a key with ssh-keygen and take it there with ssh-copy-id, or set IdentityFile for it in ssh_config"
    return AuthError(f"cannot log in as {who}: {'; '.join(parts)}", target=target, hint=hint)


# --- keys -----------------------------------------------------------------------------------------------------------


def _candidates(agent: _Agent, options: SshOptions) -> tuple[list[_Candidate], list[_Unusable]]:
    """The keys to offer, in OpenSSH's order (certificates, the agent's, files), and why others cannot be."""
    in_agent = {key.blob: key for key in agent.get_keys()}
    certificates = [in_agent.pop(blob) for blob, key in list(in_agent.items()) if key.get_name().endswith(_CERTIFICATE)]
    unusable: list[_Unusable] = [agent.trouble] if agent.trouble else []
    keys: list[_Candidate] = []
    files: list[_Candidate] = []
    for path in options.identity_files:
        blob = _public_blob(path)
        if blob is not None and blob in in_agent:
            keys.append(_Candidate(key=in_agent.pop(blob), source=f"{path} (agent)", blob=blob))
            continue
        if not Path(path).exists():
            continue
        loaded = _load(path, blob, options)
        if isinstance(loaded, _Unusable):
            unusable.append(loaded)
        else:
            files.append(_Candidate(key=loaded, source=path, blob=loaded.asbytes()))
    others = [_Candidate(key=key, source=_name(key), blob=blob) for blob, key in in_agent.items()]
    for other in [one for one in others if one.key.get_name().startswith("sk-")]:
        others.remove(other)
        unusable.append(_Unusable(why=_security_key(other.source, other.key.get_name())))
    certified = _certified(_certificate_files(options), [*keys, *files, *others])
    if not options.identities_only:
        keys += others
    found = [(_name(key), PublicBlob(key.get_name(), key.blob)) for key in certificates]
    return [*certified, *_certified(found, [*keys, *files]), *keys, *files], unusable


def _name(key: AgentKey) -> str:
    return f"{key.comment or key.name} (agent)"


def _certificate_files(options: SshOptions) -> Iterator[tuple[str, PublicBlob]]:
    for path in [*options.certificate_files, *(f"{path}-cert.pub" for path in options.identity_files)]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            yield path, PublicBlob.from_file(path)


def _certified(certificates: Iterable[tuple[str, PublicBlob]], candidates: list[_Candidate]) -> list[_Candidate]:
    """The certificates that are about one of `candidates`, each with that key."""
    found = []
    for name, certificate in certificates:
        for candidate in candidates:
            if _certifies(certificate.key_blob, candidate.blob):
                key = _twin(candidate.key)
                key.public_blob = certificate
                found.append(_Candidate(key=key, source=f"{candidate.source} with {name}", blob=candidate.blob))
                break
    return found


def _twin(key: paramiko.PKey) -> paramiko.PKey:
    return AgentKey(key.agent, key.blob, key.comment) if isinstance(key, AgentKey) else copy.copy(key)


def _certifies(certificate: bytes, blob: bytes) -> bool:
    """Whether the certificate is about this public key: after its type and its nonce, it holds the key's numbers."""
    cert, key = paramiko.Message(certificate), paramiko.Message(blob)
    cert_type, key_type = cert.get_string(), key.get_string()
    cert.get_string()
    return cert_type.startswith(key_type + b"-cert-") and cert.get_remainder().startswith(key.get_remainder())


def _load(path: str, blob: bytes | None, options: SshOptions) -> paramiko.PKey | _Unusable:
    """The private key at `path`, or why it cannot be used."""
    kind = paramiko.Message(blob).get_string().decode(errors="replace") if blob else ""
    if kind.startswith("sk-"):
        return _Unusable(why=_security_key(path, kind))
    if kind == "ssh-dss":
        return _Unusable(why=f"{path} is a DSA key, which neither specctl nor a present OpenSSH uses any more")
    try:
        return paramiko.PKey.from_path(path)
    except OSError as error:
        return _Unusable(why=f"{path} cannot be read: {error.strerror}")
    except (PasswordRequiredException, TypeError):
        # The TypeError is the cryptography package's way to say that a password is needed.
        cure = f"ssh-add {shlex.quote(path)}"
        if options.identity_agent is None and os.environ.get("SSH_AUTH_SOCK"):
            cure += " (and drop `IdentityAgent none` for this host in ssh_config)"
        elif options.identity_agent is None:
            cure = f'eval "$(ssh-agent)" && {cure}'
        return _Unusable(why=f"{path} is encrypted and the agent does not hold it", cure=cure)
    except Exception as error:  # paramiko and cryptography raise a dozen kinds for a file that is no usable key
        if blob is not None and Path(path).read_bytes().split(b" ")[0].decode(errors="replace") == kind:
            return _Unusable(why=f"{path} is a public key, and the agent does not hold its private half")
        why = " ".join(str(error).split())[:120] or type(error).__name__
        return _Unusable(why=f"{path} is no usable key ({why})")


def _security_key(source: str, kind: str) -> str:
    return f"{source} is a security key ({kind}): to use it somebody has to touch it, and specctl asks nobody"


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
        self.trouble: _Unusable | None = None

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
        agent.trouble = _Unusable(why=f"the agent at {options.identity_agent} does not answer ({error})")
    return agent
