"""Which of several exceptions a run ended with, where a launcher reports the failure of a process of its own.

What launchers say is `logscan/launchers.py`'s. Pure; `health` asks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.logscan import headline
from orchestrator.logscan.launchers import Death, death, is_group, is_report
from orchestrator.model import Finding

OWN_FAULTS = frozenset({4, 5, 6, 7, 8, 11, 31})
"""Signals that a process is ended by for what it did itself, and may have spoken of: an assertion that failed, say."""
NATIVE = ("Fatal Python error", "terminate called after ")
"""How a process begins to speak of the signal that ends it."""


def cause(findings: Sequence[Finding]) -> Finding:
    """The last of `findings`; if that is a launcher's report, what the process itself printed: the one that the report
    names, or else the first. A process that was killed has printed nothing, and what others then did is no cause."""
    last = findings[-1]
    others = [finding for finding in findings if not is_report(finding.type)]
    if not is_report(last.type) or not others:
        return last
    ended = death(last.traceback)
    rank = ended.rank if ended else None
    named = [one for one in others if rank is not None and one.worker and re.search(rf"(?<!\d){rank}$", one.worker)]
    if ended is None or ended.signal is None:
        return [*named, *others][0]
    if ended.signal not in OWN_FAULTS:
        return last
    native = [one for one in others if one.traceback.startswith(NATIVE)]
    return [*named, *native, last][0]


def killed(findings: Sequence[Finding]) -> Death | None:
    """The process that was ended by a signal, if the last of `findings` is a launcher's report of one."""
    ended = death(findings[-1].traceback) if findings and is_report(findings[-1].type) else None
    return ended if ended is not None and ended.signal is not None else None


def said_by(finding: Finding) -> str:
    """The finding in one line; of a report of torchrun's, which process it names."""
    if not is_group(finding.type):
        return headline(finding)
    return f"{finding.type.rpartition('.')[2]}: {finding.message.partition(chr(10))[0]}"
