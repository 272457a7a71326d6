"""What `ssh` would do for a host: `ssh -G` is asked, so that Include, Match and aliases mean what they mean to it.

Pure but for that one question. An option that specctl cannot honour is refused by name: a jump host that is skipped
would be a connection to somewhere else.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import ConfigError, UnreachableError

CONFIG_VARIABLE = "SPECCTL_SSH_CONFIG"
CONNECT_TIMEOUT_S = 10.0
_SPEC = re.compile(r"(?:(?P<user>\S+)@)?(?:\[(?P<bracketed>[^\]\s]+)\]|(?P<host>[^@\s\[\]]+?))(?::(?P<port>\d+))?")
_REFUSED = {
    "proxyjump": "ProxyJump",
    "proxycommand": "ProxyCommand",
    "pkcs11provider": "PKCS11Provider",
    "bindinterface": "BindInterface",
}
_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


@dataclass(frozen=True, kw_only=True, slots=True)
class SshSpec:
    """`[user@]host[:port]` in its parts; `host` may be an alias."""

    text: str
    host: str
    user: str | None = None
    port: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SshOptions:
    """Where to connect, as whom, with which keys, and which files say what the host's key is."""

    spec: SshSpec
    config_file: str | None
    hostname: str
    port: int
    user: str
    identity_files: list[str] = field(default_factory=list)
    identities_only: bool = False
    identity_agent: str | None = None
    """Path of the agent's socket; None is no agent."""
    known_hosts_files: list[str] = field(default_factory=list)
    """The first one is where a new key belongs."""
    host_key_alias: str | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    address_family: socket.AddressFamily = socket.AF_UNSPEC
    bind_address: str | None = None
    compression: bool = False

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
        argv = ["ssh"]
        if self.config_file:
            argv += ["-F", self.config_file]
        if self.spec.port:
            argv += ["-p", str(self.spec.port)]
        return shlex.join([*argv, f"{self.spec.user}@{self.spec.host}" if self.spec.user else self.spec.host])


def parse_spec(text: str) -> SshSpec:
    """The parts of `alias`, `[user@]host[:port]` or `[user@][ipv6]:port`. Raises `ConfigError`."""
    match = _SPEC.fullmatch(text)
    if match is None or text.startswith("-") or (match["host"] or "").startswith("-") or "\x00" in text:
        raise ConfigError(f"{text!r} is not an ssh_config alias or [user@]host[:port]", hint="see ssh: in hosts.yaml")
    host, port = match["bracketed"] or match["host"], match["port"]
    if match["bracketed"] is None and text.count(":") > 1:
        # A bare IPv6 address: what follows the last colon is not a port.
        host, port = text.rpartition("@")[2], None
    if port is not None and not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r}: {port} is not a port", hint="a port is 1 to 65535")
    return SshSpec(text=text, host=host, user=match["user"], port=int(port) if port else None)


def resolve(text: str, config_file: str | None = None) -> SshOptions:
    """What `ssh` would use for `text`. `config_file` (or $SPECCTL_SSH_CONFIG) stands in for the user's ssh_config.

    Raises `ConfigError` for what cannot be read or honoured.
    """
    spec = parse_spec(text)
    config_file = config_file or os.environ.get(CONFIG_VARIABLE) or None
    client = shutil.which("ssh")
    if client is None:
        if config_file:
            raise ConfigError(f"{config_file}: no `ssh` here to read it with", hint="install openssh-client")
        return _without_client(spec)
    return parse_dump(_ask(client, spec, config_file), spec, config_file)


def _ask(client: str, spec: SshSpec, config_file: str | None) -> str:
    argv = [client, "-G"]
    if config_file:
        argv += ["-F", config_file]
    if spec.port:
        argv += ["-p", str(spec.port)]
    if spec.user:
        argv += ["-l", spec.user]
    try:
        done = subprocess.run([*argv, "--", spec.host], stdin=subprocess.DEVNULL, capture_output=True, timeout=15)
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"`ssh -G {spec.host}` did not answer within 15 s", target=spec.text, hint="a `Match exec` may hang"
        ) from error
    if done.returncode != 0:
        why = " ".join(done.stderr.decode(errors="replace").split())
        raise ConfigError(f"ssh cannot read its configuration: {why}", target=spec.text, hint="mend that file")
    return done.stdout.decode(errors="surrogateescape")


def parse_dump(dump: str, spec: SshSpec, config_file: str | None) -> SshOptions:
    """The output of `ssh -G`. Raises `ConfigError` that names an option which cannot be honoured."""
    values: dict[str, list[str]] = {}
    for line in dump.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value.strip())

    def one(key: str, default: str = "") -> str:
        return values.get(key, [default])[0]

    for key, name in _REFUSED.items():
        value = one(key, "none")
        if value.lower() not in ("none", ""):
            raise ConfigError(
                f"{name} {value} is set for this host, and specctl cannot honour it",
                target=spec.text,
                hint=f"reach it without {name}, or run specctl on a machine that can",
            )
    hostname, user, port = one("hostname", spec.host), one("user") or _user(), int(one("port", "22"))
    tokens = {"h": hostname, "n": spec.host, "p": str(port), "r": user, "u": _user(), "d": str(Path.home())}
    timeout = one("connecttimeout", "none")
    alias = one("hostkeyalias", "none")
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    bind = one("bindaddress", "none")
    files = _words(one("userknownhostsfile"))
    files += _words(one("globalknownhostsfile"))
    return SshOptions(
        spec=spec,
        config_file=config_file,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=[_expand(path, tokens) for path in values.get("identityfile", []) if path != "none"],
        identities_only=one("identitiesonly", "no") == "yes",
        identity_agent=_agent(one("identityagent", "SSH_AUTH_SOCK"), tokens),
        known_hosts_files=[_expand(path, tokens) for path in files if path != "none"],
        host_key_alias=None if alias == "none" else alias,
        connect_timeout_s=float(timeout) if timeout.isdigit() and int(timeout) else CONNECT_TIMEOUT_S,
        address_family=families.get(one("addressfamily"), socket.AF_UNSPEC),
        bind_address=None if bind == "none" else bind,
        compression=one("compression", "no") == "yes",
    )


def _without_client(spec: SshSpec) -> SshOptions:
    return SshOptions(
        spec=spec,
        config_file=None,
        hostname=spec.host,
        port=spec.port or 22,
        user=spec.user or _user(),
        identity_files=[str(Path(path).expanduser()) for path in _DEFAULT_KEYS],
        identity_agent=os.environ.get("SSH_AUTH_SOCK") or None,
        known_hosts_files=[str(Path("~/.ssh/known_hosts").expanduser()), "/etc/ssh/ssh_known_hosts"],
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no passwd entry, as in some containers
        return str(os.getuid())


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        return value.split()


def _agent(value: str, tokens: dict[str, str]) -> str | None:
    if value == "none":
        return None
    if value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if value.startswith("$"):
        return os.environ.get(value[1:].strip("{}")) or None
    return _expand(value, tokens)


def _expand(path: str, tokens: dict[str, str]) -> str:
    """`path` with ssh's own `%d`-like tokens, `${VARIABLE}` and a leading `~` replaced."""
    path = re.sub(r"%([a-zA-Z%])", lambda match: tokens.get(match[1], "%" if match[1] == "%" else match[0]), path)
    path = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), path)
    return str(Path(path).expanduser()) if path.startswith("~") else path
