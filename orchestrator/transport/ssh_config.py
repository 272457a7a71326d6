"""What `ssh` would do for a host: `ssh -G` is asked, so that Include, Match and aliases mean what they mean to it.

Pure but for that one question. An option that says where to connect, as whom, or what proves the host, and that
specctl cannot honour, is refused by name: to skip it would be a connection to somewhere else.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import ConfigError, UnreachableError
from orchestrator.transport.ssh_options import CONNECT_TIMEOUT_S, Jump, SshOptions, SshSpec, parse_spec, ssh_argv

CONFIG_VARIABLE = "SPECCTL_SSH_CONFIG"
_REFUSED = {
    "bindinterface": ("BindInterface", "bind by BindAddress instead"),
    "knownhostscommand": ("KnownHostsCommand", "put the keys that it prints into a UserKnownHostsFile"),
    "revokedhostkeys": ("RevokedHostKeys", "put @revoked lines into a UserKnownHostsFile instead"),
}
"""Options that must be unset, and what does the same."""
_ALGORITHMS = ("KexAlgorithms", "HostKeyAlgorithms", "Ciphers", "MACs")
_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


def resolve(text: str, config_file: str | None = None, *, via: str | None = None) -> SshOptions:
    """What `ssh` would use for `text`. `config_file` (or $SPECCTL_SSH_CONFIG) stands in for the user's ssh_config.

    `via` lists jump hosts, and stands in for its own ProxyJump. Raises `ConfigError` for what cannot be read or
    honoured.
    """
    spec = parse_spec(text)
    config_file = config_file or os.environ.get(CONFIG_VARIABLE) or None
    client = shutil.which("ssh")
    if client is None:
        if config_file:
            raise ConfigError(f"{config_file}: no `ssh` here to read it with", hint="install openssh-client")
        return _without_client(spec)
    return parse_dump(_ask(client, spec, config_file, via), spec, config_file, via=via)


def typed(text: str, config_file: str | None = None) -> list[str]:
    """The words with which a person reaches `text` from here. Raises `ConfigError`."""
    return ssh_argv(parse_spec(text), config_file=config_file or os.environ.get(CONFIG_VARIABLE) or None)


def _ask(client: str, spec: SshSpec, config_file: str | None, via: str | None) -> str:
    argv = [client, "-G"]
    if config_file:
        argv += ["-F", config_file]
    if via:
        argv += ["-J", via]
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
        lines = done.stderr.decode(errors="replace").splitlines()
        why = " ".join(" ".join(line.split()) for line in lines if not line.startswith("Pseudo-terminal"))
        hint = "give the jump host itself `ProxyJump none`" if "jumphost loop" in why else "mend that file"
        raise ConfigError(f"ssh cannot read its configuration: {why}", target=spec.text, hint=hint)
    return done.stdout.decode(errors="surrogateescape")


def parse_dump(dump: str, spec: SshSpec, config_file: str | None, *, via: str | None = None) -> SshOptions:
    """The output of `ssh -G`. Raises `ConfigError` that names an option which cannot be honoured."""
    values: dict[str, list[str]] = {}
    for line in dump.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value.strip())

    def one(key: str, default: str = "none") -> str:
        return values.get(key, [default])[0]

    def given(key: str) -> str | None:
        value = one(key)
        return None if value.lower() in ("none", "") else value

    _refuse(one, given, spec)
    hostname, user, port = one("hostname", spec.host), one("user", "") or _user(), int(one("port", "22"))
    alias, jump, command = given("hostkeyalias"), given("proxyjump"), given("proxycommand")
    tokens = _tokens(spec, hostname, user, port, alias, jump)
    timeout = one("connecttimeout")
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    return SshOptions(
        spec=spec,
        config_file=config_file,
        hostname=hostname,
        port=port,
        user=user,
        via=via,
        jump=_jump(jump) if jump else None,
        proxy_command=_replaced(command, tokens) if command else None,
        identity_files=[_expand(path, tokens) for path in values.get("identityfile", []) if path != "none"],
        certificate_files=[_expand(path, tokens) for path in values.get("certificatefile", []) if path != "none"],
        identities_only=one("identitiesonly") == "yes",
        identity_agent=_agent(one("identityagent", "SSH_AUTH_SOCK"), tokens),
        known_hosts_files=[
            _expand(path, tokens)
            for key in ("userknownhostsfile", "globalknownhostsfile")
            for path in _files(one(key))
            if path != "none"
        ],
        verify_by_dns=one("verifyhostkeydns") not in ("none", "no", "false"),
        pkcs11_provider=given("pkcs11provider"),
        host_key_alias=alias,
        connect_timeout_s=float(timeout) if timeout.isdigit() and int(timeout) else CONNECT_TIMEOUT_S,
        address_family=families.get(one("addressfamily"), socket.AF_UNSPEC),
        bind_address=given("bindaddress"),
        compression=one("compression") == "yes",
        algorithms={name: one(name.lower()).split(",") for name in _ALGORITHMS if given(name.lower())},
    )


def _refuse(one: Callable[..., str], given: Callable[[str], str | None], spec: SshSpec) -> None:
    for key, (name, instead) in _REFUSED.items():
        if value := given(key):
            raise ConfigError(
                f"{name} {value} is set for this host, and specctl cannot honour it", target=spec.text, hint=instead
            )
    if given("proxycommand") and one("proxyusefdpass") == "yes":
        raise ConfigError(
            "ProxyUseFdpass yes is set for this host, and specctl cannot honour it", target=spec.text,
            hint="use a ProxyCommand that passes the bytes itself",
        )  # fmt: skip
    methods = given("preferredauthentications")
    if one("pubkeyauthentication", "yes") in ("no", "false"):
        what = "PubkeyAuthentication no"
    elif methods and "publickey" not in methods.split(","):
        what = f"PreferredAuthentications {methods}"
    else:
        return
    raise ConfigError(
        f"{what} is set for this host, and keys are the only way in that specctl has", target=spec.text,
        hint="allow publickey for this host in ssh_config",
    )  # fmt: skip


def _jump(hosts: str) -> Jump:
    via, _, host = hosts.rpartition(",")
    return Jump(host=host, via=via or None)


def _tokens(spec: SshSpec, hostname: str, user: str, port: int, alias: str | None, jump: str | None) -> dict[str, str]:
    """ssh's `%h` and the like."""
    here = socket.gethostname()
    hop = _jump(jump).host if jump else ""
    digest = hashlib.sha1(f"{here}{hostname}{port}{user}{hop}".encode(errors="surrogateescape")).hexdigest()
    return {
        "h": hostname, "n": spec.host, "p": str(port), "r": user, "u": _user(), "d": str(Path.home()),
        "i": str(os.getuid()), "k": alias or spec.host, "l": here, "L": here.partition(".")[0], "j": hop, "C": digest,
    }  # fmt: skip


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


def _files(value: str) -> list[str]:
    """The paths in `value`. `ssh -G` quotes none, so that only the files themselves tell which blanks part them."""
    words = value.split(" ")
    found = []
    while words:
        count = next((n for n in range(len(words), 1, -1) if Path(" ".join(words[:n])).exists()), 1)
        found.append(" ".join(words[:count]))
        del words[:count]
    return [path for path in found if path]


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
    path = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), _replaced(path, tokens))
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _replaced(text: str, tokens: dict[str, str]) -> str:
    return re.sub(r"%([a-zA-Z%])", lambda match: tokens.get(match[1], "%" if match[1] == "%" else match[0]), text)
