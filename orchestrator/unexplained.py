"""How a run ended badly where no exception says why: its exit code or signal, and what it had said last. Pure."""

from __future__ import annotations

import re

from orchestrator.blame import cause, how_by
from orchestrator.logscan import settled
from orchestrator.logscan.launchers import SIGNALS
from orchestrator.model import LastWords, Probe, StateName, Verdict
from orchestrator.record import record

VARIES = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""What may be another in a line that says the same: a pid, a time, an address."""


@record
class Unexplained:
    state: StateName
    text: str
    """`exit code 2`, `SIGKILL for memory`, `LOST, container restarted ...`."""
    kind: str
    """The same for runs that ended alike, apart from what they said."""
    words: LastWords | None
    line: str
    """What they said, without the run's own id."""

    @property
    def told(self) -> str:
        """`exit code 2; last line: tool: error: no such option: --foo`."""
        return self.text if self.words is None else f"{self.text}; {self.words.told}"

    @property
    def fingerprint(self) -> str:
        """The same for runs that ended alike and said the same; figures in it may be others."""
        return f"{self.kind}: {VARIES.sub('0', self.line)}" if self.words else self.kind


def of(probe: Probe, verdict: Verdict) -> Unexplained:
    """Of a run that has ended badly or stands still, and whose verdict names no exception."""
    end, state = probe.exit or probe.program_exit, verdict.state
    text = verdict.why
    if end is not None and end.signal is not None:
        killed = probe.exit is not None and probe.exit.oom_kills
        text = SIGNALS.get(end.signal, f"signal {end.signal}") + (" for memory" if killed else "")
    elif end is not None and end.code is not None:
        text = f"exit code {end.code}"
    same = text if state in ("FAILED", "KILLED") else state
    words, tail = verdict.last_words, settled(probe.summary).tail
    text = text if same == text else f"{state}, {text}"
    if words is not None and words.before and tail:
        text += f" ({how_by(cause(tail))})"
    return Unexplained(
        state=state, text=text, kind=f"{state}: {same}", words=words,
        line=words.text.replace(probe.run_id, "RUN") if words else "",
    )  # fmt: skip
