"""What known_hosts says of a host's key: known, unknown, changed or revoked. Pure, and the files are only ever read.

Read line by line: a line that cannot be understood, or that is about certificates, costs nothing but itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from orchestrator.record import record

Standing = Literal["known", "unknown", "changed", "revoked"]


@record
class HostEntry:
    """One line of a known_hosts file."""

    file: str
    line: int
    marker: str
    """"" or `@cert-authority` or `@revoked`."""
    patterns: str
    key_type: str
    key: bytes

    def matches(self, name: str) -> bool:
        """Whether the line is about `name` (`host`, or `[host]:port`)."""
        name = name.lower()
        if self.patterns.startswith("|1|"):
            return _hashed(self.patterns, name)
        matched = False
        for pattern in self.patterns.lower().split(","):
            if _wildcard(pattern.removeprefix("!"), name):
                if pattern.startswith("!"):
                    return False
                matched = True
        return matched


@record
class Judgement:
    """How a presented key stands, and the lines that say so."""

    standing: Standing
    entries: list[HostEntry]
    """Known: the agreeing line. Changed: the lines that disagree. Revoked: the line that revokes it."""
    authority: bool = False
    """A @cert-authority line is about this host, but certificates of hosts are not supported."""


def parse(text: str, file: str) -> list[HostEntry]:
    """The entries of one file. Lines that are not entries are skipped."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@cert-authority", "@revoked"):
            continue
        try:
            key = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        entries.append(HostEntry(file=file, line=number, marker=marker, patterns=words[0], key_type=words[1], key=key))
    return entries


def read(files: Iterable[str]) -> list[HostEntry]:
    """The entries of all files that exist and can be read, in order."""
    entries = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        entries += parse(text, file)
    return entries


def types_on_record(entries: Iterable[HostEntry], name: str) -> list[str]:
    """The key types that are recorded for `name`: to be asked for first, so that the known key is the one shown."""
    types = [entry.key_type for entry in entries if not entry.marker and entry.matches(name)]
    return list(dict.fromkeys(types))


def judge(entries: list[HostEntry], name: str, key_type: str, key: bytes, *, bare_name: str | None = None) -> Judgement:
    """How `key` stands for `name`. `bare_name`: the host without its port, whose record also counts if it agrees."""
    revoked = [entry for entry in entries if entry.marker == "@revoked" and entry.key == key]
    revoked = [entry for entry in revoked if entry.matches(name) or (bare_name and entry.matches(bare_name))]
    if revoked:
        return Judgement(standing="revoked", entries=revoked)
    mine = [entry for entry in entries if not entry.marker and entry.matches(name)]
    agreeing = [entry for entry in mine if entry.key == key and entry.key_type == key_type]
    if agreeing:
        return Judgement(standing="known", entries=agreeing)
    if mine:
        return Judgement(standing="changed", entries=mine)
    if bare_name:
        agreeing = [entry for entry in entries if not entry.marker and entry.key == key and entry.matches(bare_name)]
        if agreeing:
            return Judgement(standing="known", entries=agreeing)
    authority = any(entry.marker == "@cert-authority" and entry.matches(name) for entry in entries)
    return Judgement(standing="unknown", entries=[], authority=authority)


def fingerprint(key: bytes) -> str:
    """As `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _hashed(pattern: str, name: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        expected = base64.b64decode(digest)
        return hmac.compare_digest(hmac.new(base64.b64decode(salt), name.encode(), "sha1").digest(), expected)
    except (ValueError, binascii.Error):
        return False


def _wildcard(pattern: str, name: str) -> bool:
    expression = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)
    return re.fullmatch(expression, name) is not None
