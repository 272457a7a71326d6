"""What a run said last, kept by its supervisor as evidence of an end that no exception explains.

A trainer may say in its own `ended` event why it ends, and knows that better than anybody who reads its log. Else it is
the last line of whichever log of the run was written last: the log that holds the program's stdout and stderr, or one
that a start script has sent them to.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence

from orchestrator.agent import files
from orchestrator.agent.follow import Follower
from orchestrator.logscan import settled
from orchestrator.logscan.grammar import FIELD, Grammar
from orchestrator.logscan.last_line import WORD, last_line, one_line
from orchestrator.logscan.launchers import death, is_report
from orchestrator.model import LastWords, RunPaths

END_BYTES = 64 << 10
"""So much of the end of a file is looked at."""


def of(paths: RunPaths, followers: Sequence[Follower], *, nonce: str) -> LastWords | None:
    """`followers` are of the run's logs, its own first, and have read what there is. None: nothing says anything."""
    error = _own_error(paths, nonce)
    if error is not None:
        return LastWords(text=error, by="program")
    try:
        for follower in sorted(followers, key=lambda one: -one.written_at_ns):
            data, begun = follower.end(END_BYTES)
            data, report = _before_reports(data, follower)
            line = last_line(data, begun=begun)
            # Figures, a line of JSON each, are often written last of all, when the program closes its files.
            if line is not None and (follower.foreign is None or not line.startswith("{")):
                if _only_a_step(line):
                    return None  # after its last step it has not said a word
                return LastWords(text=line, log=follower.path if follower.foreign else None, before=report)
    except OSError:
        pass  # evidence, without which the end is recorded all the same
    return None


def _before_reports(data: bytes, follower: Follower) -> tuple[bytes, str | None]:
    """`data`, the end of a log, without the exceptions at its end by which launchers report that a process of theirs
    has failed, and the type of the first of these. Who has a prefix for each process gets the failed one's lines."""
    start, report = follower.offset - len(data), None
    for finding in reversed(settled(follower.scanner.summary()).tail):
        at = finding.offset - start
        if not is_report(finding.type) or at < 0 or last_line(data) != last_line(finding.traceback.encode()):
            break
        data, report = data[:at], finding
    if report is None:
        return data, None
    ended = death(report.message)
    if ended is not None and ended.local_rank is not None:
        own = re.findall(rb"^\[[A-Za-z_]*%d\]:.*\n?" % ended.local_rank, data, re.MULTILINE)
        data = b"".join(own) or data
    return data, report.type.rpartition(".")[2]


def _only_a_step(line: str) -> bool:
    reading = Grammar().read(line)
    return reading is not None and reading.step is not None and not WORD.search(FIELD.sub("", line))


def _own_error(paths: RunPaths, nonce: str) -> str | None:
    """What the program itself, in this attempt, has given as the reason of its end."""
    try:
        with os.fdopen(files.open_regular(paths.events), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - END_BYTES))
            lines = file.read(END_BYTES).split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        if b'"ended"' not in line:
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict) or event.get("event") != "ended" or event.get("nonce") != nonce:
            continue
        error = event.get("error")
        return (one_line(error) or None) if isinstance(error, str) else None
    return None
