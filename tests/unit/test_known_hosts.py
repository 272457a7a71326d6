"""known_hosts: which line is about which host, and how a presented key stands."""

from __future__ import annotations

import base64
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.transport import known_hosts
from orchestrator.transport.known_hosts import judge, parse, types_on_record

K1, K2 = b"first key", b"second key"
ED, RSA = "ssh-ed25519", "ssh-rsa"


def line(patterns: str, key: bytes = K1, key_type: str = ED, marker: str = "") -> str:
    return f"{marker} {patterns} {key_type} {base64.b64encode(key).decode()} a comment\n".lstrip()


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), "sha1").digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("patterns", "name", "expected"),
    [
        ("pve1", "pve1", True),
        ("pve1", "PVE1", True),
        ("pve1", "pve12", False),
        ("pve1", "[pve1]:2222", False),
        ("[pve1]:2222", "[pve1]:2222", True),
        ("[pve1]:2222", "[pve1]:2223", False),
        ("a,pve1,b", "pve1", True),
        ("pve?", "pve1", True),
        ("*.lab", "pve1.lab", True),
        ("*", "anything", True),
        ("*.lab,!bad.lab", "good.lab", True),
        ("*.lab,!bad.lab", "bad.lab", False),
        ("[*]:2222", "[pve1]:2222", True),
        ("[fe80::1]:2222", "[fe80::1]:2222", True),
        (hashed("[pve1]:2222"), "[pve1]:2222", True),
        (hashed("[pve1]:2222"), "pve1", False),
        (hashed("pve1"), "pve1", True),
        ("|1|bad", "pve1", False),
        ("|1|!!|??", "pve1", False),
    ],
)
def test_a_line_is_about_the_hosts_that_its_patterns_name(patterns: str, name: str, expected: bool) -> None:
    [entry] = parse(line(patterns), "f")
    assert entry.matches(name) is expected


def test_what_is_no_entry_costs_nothing_but_its_own_line() -> None:
    text = (
        "# words\n\nnonsense\nhost ssh-rsa\nhost ssh-rsa not*base64\n@unknown-marker host ssh-rsa AAAA\n"
        "host 1024 35 1234567890\n" + line("@cert-authority") + line("pve1")
    )
    entries = parse(text, "f")
    assert [(entry.patterns, entry.line, entry.file) for entry in entries if entry.matches("pve1")] == [
        ("pve1", 9, "f")
    ]


def test_a_recorded_key_is_known_and_another_of_any_type_is_changed() -> None:
    entries = parse(line("[pve1]:2222"), "f")
    assert judge(entries, "[pve1]:2222", ED, K1).standing == "known"
    assert judge(entries, "[pve1]:2222", ED, K2).standing == "changed"
    assert judge(entries, "[pve1]:2222", RSA, K2).standing == "changed"
    assert judge(entries, "[pve1]:2222", ED, K2).entries == entries
    assert judge(entries, "[pve2]:2222", ED, K1).standing == "unknown"


def test_one_of_several_recorded_keys_is_enough() -> None:
    entries = parse(line("pve1", K2) + line("pve1", K1, RSA) + line("pve1", K1), "f")
    assert judge(entries, "pve1", ED, K1).standing == "known"
    assert types_on_record(entries, "pve1") == [ED, RSA]


def test_a_record_without_the_port_counts_only_when_it_agrees() -> None:
    entries = parse(line("pve1"), "f")
    assert judge(entries, "[pve1]:2222", ED, K1, bare_name="pve1").standing == "known"
    assert judge(entries, "[pve1]:2222", ED, K2, bare_name="pve1").standing == "unknown"
    with_port = parse(line("pve1") + line("[pve1]:2222", K2), "f")
    assert judge(with_port, "[pve1]:2222", ED, K1, bare_name="pve1").standing == "changed"


def test_a_revoked_key_is_revoked_whatever_else_is_recorded() -> None:
    entries = parse(line("pve1") + line("*", marker="@revoked"), "f")
    assert judge(entries, "pve1", ED, K1).standing == "revoked"
    assert judge(entries, "pve1", ED, K2).standing == "changed"
    elsewhere = parse(line("pve1") + line("other", marker="@revoked"), "f")
    assert judge(elsewhere, "pve1", ED, K1).standing == "known"


def test_a_certificate_authority_vouches_for_no_plain_key_but_is_told() -> None:
    judgement = judge(parse(line("*.lab", marker="@cert-authority"), "f"), "pve1.lab", ED, K1)
    assert (judgement.standing, judgement.authority) == ("unknown", True)


def test_files_that_are_missing_or_not_text_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe nonsense\n" + line("pve1").encode())
    entries = known_hosts.read([str(tmp_path / "none"), str(tmp_path), str(tmp_path / "a")])
    assert [entry.line for entry in entries] == [2]


@given(st.text())
def test_no_text_breaks_the_reading(text: str) -> None:
    for entry in parse(text, "f"):
        entry.matches("pve1")
