"""Which of several exceptions a run ended with, where a launcher reports the failure of a process of its own.

What launchers say is `logscan/launchers.py`'s. Pure; `health` asks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from orchestrator.logscan import headline
from orchestrator.logscan.launchers import Death, death, is_group, is_report
from orchestrator.model import Finding

OWN_FAULTS = frozenset({4, 5, 6, 7, 8, 11, 31})
"""Signals that a process is ended by for what it did itself, and may have spoken of: an assertion that failed, say."""
NATIVE = ("Fatal Python error", "terminate called after ")
"""How a process begins to speak of the signal that ends it."""
OF_PYTHON = re.compile(r"(?:Thread|Dummy|(?:Spawn|Fork|ForkServer)?Process|ThreadPoolExecutor)-\d")


def cause(findings: Sequence[Finding]) -> Finding:
    """The last of `findings`; if that is a launcher's report, what the process itself printed: the one that the report
    names, or else the first. A process that was killed has printed nothing, and what others then did is no cause."""
    report = _report(findings)
    if report is None:
        return findings[-1]
    others = [one for one in findings if not is_report(one.type)] or [*findings[: findings.index(report)], report]
    ended = death(report.message)
    named = [one for one in others if ended and _is_of(one.worker, ended)]
    if ended is None or ended.signal is None:
        return [*named, *others][0]
    if ended.signal not in OWN_FAULTS:
        return report
    native = [one for one in others if one.traceback.startswith(NATIVE)]
    return [*named, *native, report][0]


def killed(findings: Sequence[Finding]) -> Death | None:
    """The process that was ended by a signal, if the last of `findings` is a launcher's report of one."""
    report = _report(findings)
    ended = death(report.message) if report is not None else None
    return ended if ended is not None and ended.signal is not None else None


def _report(findings: Sequence[Finding]) -> Finding | None:
    """Of the reports that `findings` end with, the one that knows most: where launchers start launchers, the first has
    seen the process itself; but torchrun's names one of several, each of which may have started others."""
    reports = list(itertools.takewhile(lambda one: is_report(one.type), reversed(findings)))[::-1]
    return next((one for one in reports if is_group(one.type)), reports[0] if reports else None)


def _is_of(worker: str | None, ended: Death) -> bool:
    """Whether it is the name of a process of that rank. torchrun's `--tee` counts those of its own machine; Python's
    numbers of threads and processes are no ranks."""
    if worker is None or ended.rank is None or OF_PYTHON.match(worker):
        return False
    of_machine = worker.startswith("default") and ended.local_rank is not None
    return re.search(rf"(?<!\d){ended.local_rank if of_machine else ended.rank}$", worker) is not None


def said_by(finding: Finding) -> str:
    """The finding in one line; of a report of torchrun's, which process it names."""
    if not is_group(finding.type):
        return headline(finding)
    return f"{finding.type.rpartition('.')[2]}: {finding.message.partition(chr(10))[0]}"


def how_by(finding: Finding) -> str:
    """The same without the exception's type: of a report, how the process ended."""
    return said_by(finding).partition(": ")[2]
