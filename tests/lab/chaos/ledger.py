"""What was counted, the transcript of what was done, and the table of both."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.lab.chaos.oracle import Finding, Lie


@dataclass(kw_only=True)
class Ledger:
    """One for all lanes."""

    seed: int
    lies: Counter[Lie] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    """Verbs by name, and faults by name with a dash before it."""
    unknown: int = 0
    """Answers that said that it could not be known, while something was broken."""
    judged: Counter[str] = field(default_factory=Counter)
    """States that were held against the truth."""
    bytes: int = 0
    """Of log lines that were held against their files."""
    slowest_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    said: list[str] = field(default_factory=list)
    """Every lie, with where to find it."""
    enough: threading.Event = field(default_factory=threading.Event)
    """Somebody wants to see the table: no lane begins another episode."""
    begun_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self._lock:
            self.done[what] += 1

    def count_unknown(self) -> None:
        with self._lock:
            self.unknown += 1

    def time(self, verb: str, took_s: float) -> None:
        with self._lock:
            self.slowest_s[verb] = max(took_s, self.slowest_s[verb])

    def judge(self, state: str) -> None:
        with self._lock:
            self.judged[state] += 1

    def compare(self, count: int) -> None:
        with self._lock:
            self.bytes += count

    def note(self, finding: Finding, where: str) -> None:
        with self._lock:
            self.lies[finding.lie] += 1
            self.said.append(f"{finding.lie.value}: {finding.text}\n  {where}")

    @property
    def launches(self) -> int:
        return self.done["launch"]

    def table(self) -> str:
        verbs = sorted((name, count) for name, count in self.done.items() if not name.startswith("-"))
        faults = sorted((name[1:], count) for name, count in self.done.items() if name.startswith("-"))
        minutes = (time.monotonic() - self.begun_at) / 60
        lines = [
            f"| seed {self.seed} | count |", "|---|---|",
            *(f"| {lie.value} | {self.lies[lie]} |" for lie in Lie),
            f"| (said to be unknown, while something was broken) | {self.unknown} |",
            "",
            f"{sum(count for _, count in verbs):,} verbs in {minutes:.0f} minutes: "
            + ", ".join(f"{count:,} {name} (at most {self.slowest_s[name]:.0f} s)" for name, count in verbs),
            "",
            f"{sum(count for _, count in faults):,} faults: "
            + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in faults),
        ]  # fmt: skip
        judged = ", ".join(f"{count:,} {state}" for state, count in self.judged.most_common())
        lines += ["", f"Held against the truth: {self.bytes:,} bytes of log lines, and {judged}"]
        return "\n".join(lines)
