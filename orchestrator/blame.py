"""Which of several exceptions a run ended with, where a launcher reports the failure of a process of its own.

torchrun, accelerate and a script's `subprocess.run(check=True)` end with an exception too, and print it last. It says
that a process failed, not why. Pure; `health` asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from orchestrator.logscan import headline
from orchestrator.model import Finding

REPORT = re.compile(r"(?:^|\.)(?:ChildFailedError|CalledProcessError|Process(?:Raised|Exited)Exception|RayTaskError)$")
ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*: (?P<rank>\d+).*?\bexitcode\s*: (?P<code>-?\d+)", re.DOTALL)


def cause(findings: Sequence[Finding]) -> Finding:
    """The last of `findings`; if that is a launcher's report, what the process itself printed: the one that the report
    names, or else the first."""
    last = findings[-1]
    others = [finding for finding in findings if not REPORT.search(finding.type)]
    if not REPORT.search(last.type) or not others:
        return last
    root = ROOT_CAUSE.search(last.message)
    named = [one for one in others if root and one.worker and re.search(rf"(?<!\d){root['rank']}$", one.worker)]
    return [*named, *others][0]


def said_by(finding: Finding, signals: Mapping[int, str]) -> str:
    """The finding in one line; of a report of torchrun's, whose first line says nothing, what it names as the cause."""
    root = ROOT_CAUSE.search(finding.message) if REPORT.search(finding.type) else None
    if root is None:
        return headline(finding)
    code = int(root["code"])
    how = f"exit code {code}" if code >= 0 else signals.get(-code, f"signal {-code}")
    return f"{finding.type.rpartition('.')[2]}: rank {root['rank']} ended with {how}"
