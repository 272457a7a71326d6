"""ssh_config: what a spec says, what `ssh -G` says, and that what cannot be honoured is refused by name."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.transport import NodePool, paramiko_alone, ssh_config
from orchestrator.transport.base import Limits
from orchestrator.transport.ssh_config import parse_dump, resolve
from orchestrator.transport.ssh_node import SshNode
from orchestrator.transport.ssh_options import Jump, SshOptions, SshSpec, parse_spec


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [
        ("pve1", None, "pve1", None),
        ("root@pve1", "root", "pve1", None),
        ("pve1:2222", None, "pve1", 2222),
        ("me@10.0.0.9:22", "me", "10.0.0.9", 22),
        ("[fe80::1]:2222", None, "fe80::1", 2222),
        ("root@[fe80::1%eth0]:2222", "root", "fe80::1%eth0", 2222),
        ("[::1]", None, "::1", None),
        ("fe80::1", None, "fe80::1", None),
        ("root@fe80::22", "root", "fe80::22", None),
        ("ssh://root@pve1:2222", "root", "pve1", 2222),
        ("DOMAIN\\me@pve1", "DOMAIN\\me", "pve1", None),
    ],
)
def test_a_spec_falls_into_user_host_and_port(text: str, user: str | None, host: str, port: int | None) -> None:
    assert parse_spec(text) == SshSpec(text=text, user=user, host=host, port=port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-oProxyCommand=x",
        "me@-oX",
        "a b",
        "a@",
        "[::1",
        "pve1:70000",
        "pve1:0",
        "a\0b",
        "$(reboot)",
        "`x`@pve1",
        "a;b",
        "a|b",
        "a'b",
    ],
)
def test_what_is_no_spec_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_spec(text)


def parsed(*lines: str) -> SshOptions:
    return parse_dump("\n".join(["hostname 10.0.0.9", "port 2222", "user me", *lines]), parse_spec("pve1"), None)


def test_a_dump_becomes_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    options = parsed(
        "identityfile ~/.ssh/a key",
        "identityfile %d/.ssh/%h-%r",
        "identitiesonly yes",
        "identityagent ~/agent.sock",
        "userknownhostsfile ~/.ssh/known_hosts /etc/more",
        "globalknownhostsfile /etc/ssh/ssh_known_hosts",
        "connecttimeout 7",
        "addressfamily inet6",
        "compression yes",
        "proxycommand none",
    )
    assert (options.hostname, options.port, options.user) == ("10.0.0.9", 2222, "me")
    assert options.identity_files == ["/home/me/.ssh/a key", "/home/me/.ssh/10.0.0.9-me"]
    assert options.identity_agent == "/home/me/agent.sock"
    assert options.known_hosts_files == ["/home/me/.ssh/known_hosts", "/etc/more", "/etc/ssh/ssh_known_hosts"]
    assert (options.identities_only, options.connect_timeout_s, options.compression) == (True, 7.0, True)
    assert options.address_family == socket.AF_INET6
    assert (options.where, options.record_name) == ("[10.0.0.9]:2222", "[10.0.0.9]:2222")


def test_the_agent_is_the_environment_s_unless_the_configuration_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("OTHER_SOCK", "/run/other")
    assert parsed().identity_agent == "/run/agent"
    assert parsed("identityagent none").identity_agent is None
    assert parsed("identityagent $OTHER_SOCK").identity_agent == "/run/other"
    assert parsed("identityagent ${OTHER_SOCK}").identity_agent == "/run/other"


def test_the_record_name_is_the_alias_or_the_host_with_a_port_that_is_not_22() -> None:
    assert parsed("hostkeyalias cluster").record_name == "cluster"
    plain = parse_dump("hostname pve1\nport 22\nuser me", parse_spec("pve1"), None)
    assert (plain.record_name, plain.where) == ("pve1", "[pve1]:22")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("bindinterface eth0", "BindInterface eth0"),
        ("knownhostscommand /bin/keys %H", "KnownHostsCommand /bin/keys %H"),
        ("revokedhostkeys /etc/ssh/revoked", "RevokedHostKeys /etc/ssh/revoked"),
        ("proxycommand nc %h %p\nproxyusefdpass yes", "ProxyUseFdpass yes"),
        ("pubkeyauthentication false", "PubkeyAuthentication no"),
        ("preferredauthentications keyboard-interactive,password", "PreferredAuthentications keyboard-interactive"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(line: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^pve1: {re.escape(name)}") as caught:
        parsed(line)
    assert caught.value.exit_code == 2 and caught.value.hint


def test_jump_hosts_are_gone_through_from_the_last_one_back() -> None:
    assert parsed("proxyjump a").jump == Jump(host="a", via=None)
    assert parsed("proxyjump me@a:2201,b,[::1]:2202").jump == Jump(host="[::1]:2202", via="me@a:2201,b")
    assert parsed("proxyjump none").jump is None and parsed().jump is None


def test_a_proxy_command_is_one_for_a_shell_with_its_tokens_replaced() -> None:
    command = parsed("proxycommand nc -X 5 %h %p '%r@%n' %% $HOME").proxy_command
    assert command == "nc -X 5 10.0.0.9 2222 'me@pve1' % $HOME"
    assert parsed("proxycommand none").proxy_command is None


def test_what_only_adds_ways_in_is_kept_to_be_named_when_it_is_missed() -> None:
    options = parsed("pkcs11provider /usr/lib/x.so", "verifyhostkeydns ask")
    assert (options.pkcs11_provider, options.verify_by_dns) == ("/usr/lib/x.so", True)
    assert not parsed("verifyhostkeydns false").verify_by_dns


def test_several_files_of_known_hosts_are_parted_even_when_one_has_a_blank(tmp_path: Path) -> None:
    (tmp_path / "my keys").mkdir()
    blank, other = tmp_path / "my keys" / "known", tmp_path / "other"
    blank.touch()
    assert parsed(f"userknownhostsfile {other} {blank} /dev/null").known_hosts_files == [
        str(other), str(blank), "/dev/null",
    ]  # fmt: skip


def test_the_hint_is_how_a_person_reaches_the_host() -> None:
    options = parse_dump("hostname h\nport 2222\nuser me", parse_spec("me@h:2222"), "/tmp/my config")
    assert options.ssh_command == "ssh -F '/tmp/my config' -p 2222 me@h"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no OpenSSH client: install openssh-client")
def test_ssh_itself_reads_include_match_and_aliases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "included").write_text("Host pve1\n  HostName 10.0.0.9\n  User root\n  Port 2222\n")
    config = tmp_path / "config"
    config.write_text(f"Include {tmp_path}/included\nMatch host 10.0.0.9\n  IdentityFile {tmp_path}/key\n")
    options = resolve("pve1", str(config))
    assert (options.hostname, options.user, options.port) == ("10.0.0.9", "root", 2222)
    assert f"{tmp_path}/key" in options.identity_files
    monkeypatch.setenv("SPECCTL_SSH_CONFIG", str(config))
    named = resolve("other@pve1:22")
    assert (named.hostname, named.user, named.port) == ("10.0.0.9", "other", 22)
    assert resolve("[fe80::1]:2222").where == "[fe80::1]:2222"


def test_without_an_ssh_client_the_spec_alone_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options = resolve("root@10.0.0.9:2222")
    assert (options.user, options.where) == ("root", "[10.0.0.9]:2222")
    assert options.identity_files
    with pytest.raises(ConfigError, match="no `ssh` here"):
        resolve("pve1", "/some/config")


def test_ssh_reads_its_configuration_while_paramiko_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(ssh_config, "resolve", lambda *_, **__: asked.set())
    imported: list[bool] = []
    monkeypatch.setattr(paramiko_alone, "load", lambda: imported.append(asked.wait(30)))
    NodePool().node("pve1")
    assert imported == [True]


def test_what_was_asked_ahead_is_for_the_first_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Future[SshOptions] = Future()
    options.set_exception(ConfigError("asked ahead"))
    node = SshNode("pve1", options=options)

    def resolve(*_: object, **__: object) -> SshOptions:
        raise ConfigError("asked again")

    monkeypatch.setattr(ssh_config, "resolve", resolve)
    for said in ("asked ahead", "asked again"):
        with pytest.raises(ConfigError, match=said):
            node.link(Limits(30.0, None, "pve1", ""))
