"""What there is to know before one connects to an SSH host: where, as whom, by which way, and what proves it."""

from __future__ import annotations

import re
import shlex
import socket
from dataclasses import field

from orchestrator.errors import ConfigError
from orchestrator.record import record

CONNECT_TIMEOUT_S = 10.0
_SPEC = re.compile(r"(?:(?P<user>\S+)@)?(?:\[(?P<bracketed>[^\]\s]+)\]|(?P<host>[^@\s\[\]]+?))(?::(?P<port>\d+))?")
_NEVER = set("'`\"$;&<>|(){}\0")
"""A ProxyCommand hands names to a shell; no host has such a one."""


@record
class SshSpec:
    """`[user@]host[:port]` in its parts; `host` may be an alias."""

    text: str
    host: str
    user: str | None = None
    port: int | None = None


@record
class Jump:
    """The host through which another one is reached."""

    host: str
    """An alias or `[user@]host[:port]`."""
    via: str | None
    """The hosts before it, as ProxyJump lists them; None: as its own configuration says."""


@record
class SshOptions:
    """Where to connect, as whom, with which keys, and which files say what the host's key is."""

    spec: SshSpec
    config_file: str | None
    hostname: str
    port: int
    user: str
    via: str | None = None
    """The jump hosts that were asked for in place of its own."""
    jump: Jump | None = None
    proxy_command: str | None = None
    """With its tokens replaced: for a shell."""
    identity_files: list[str] = field(default_factory=list)
    certificate_files: list[str] = field(default_factory=list)
    identities_only: bool = False
    identity_agent: str | None = None
    """Path of the agent's socket; None is no agent."""
    known_hosts_files: list[str] = field(default_factory=list)
    """The first one is where a new key belongs."""
    verify_by_dns: bool = False
    """`ssh` would also ask DNS for the host's key."""
    pkcs11_provider: str | None = None
    """`ssh` would also use its keys."""
    host_key_alias: str | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    address_family: socket.AddressFamily = socket.AF_UNSPEC
    bind_address: str | None = None
    compression: bool = False
    algorithms: dict[str, list[str]] = field(default_factory=dict)
    """What is allowed, by the option's name; one that is missing limits nothing."""

    @property
    def where(self) -> str:
        """`[host]:port`, as messages name it."""
        return f"[{self.hostname}]:{self.port}"

    @property
    def record_name(self) -> str:
        """The name under which known_hosts has it."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname if self.port == 22 else self.where

    @property
    def ssh_command(self) -> str:
        """How a person reaches it with `ssh`, for hints."""
        return self.ssh_command_with([])

    def ssh_command_with(self, flags: list[str]) -> str:
        return shlex.join(ssh_argv(self.spec, config_file=self.config_file, via=self.via, flags=flags))


def ssh_argv(
    spec: SshSpec, *, config_file: str | None, via: str | None = None, flags: list[str] | None = None
) -> list[str]:
    """What a person types to reach it."""
    argv = ["ssh", *(flags or [])]
    if config_file:
        argv += ["-F", config_file]
    if via:
        argv += ["-J", via]
    if spec.port:
        argv += ["-p", str(spec.port)]
    return [*argv, f"{spec.user}@{spec.host}" if spec.user else spec.host]


def parse_spec(text: str) -> SshSpec:
    """The parts of `alias`, `[user@]host[:port]` or `[user@][ipv6]:port`. Raises `ConfigError`."""
    plain = text.removeprefix("ssh://")
    match = _SPEC.fullmatch(plain)
    if match is None or set(text) & _NEVER or plain.startswith("-") or (match["host"] or "").startswith("-"):
        raise ConfigError(f"{text!r} is not an ssh_config alias or [user@]host[:port]", hint="see ssh: in hosts.yaml")
    host, port = match["bracketed"] or match["host"], match["port"]
    if match["bracketed"] is None and plain.count(":") > 1:
        # A bare IPv6 address: what follows the last colon is not a port.
        host, port = plain.rpartition("@")[2], None
    if port is not None and not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r}: {port} is not a port", hint="a port is 1 to 65535")
    return SshSpec(text=text, host=host, user=match["user"], port=int(port) if port else None)
