"""What starts processes says of one that has failed: which one and with which exit code, never why.

torchrun, accelerate, torch.multiprocessing, deepspeed and a script's `subprocess.run(check=True)` end with an exception
or a line of their own, behind what the process itself has said. `blame.py` and the supervisor's `last_words.py` look
behind it.
"""

from __future__ import annotations

import re

from orchestrator.record import record

SIGTERM = 15
"""By which a launcher ends the others itself."""
# By number, since the laptop that judges need not number its signals as the container does.
SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
REPORT = re.compile(
    r"(?:^|\.)(?:(?P<group>ChildFailedError)|CalledProcessError|Process(?:Raised|Exited)Exception|RayTaskError)$"
)
BANNER = "=" * 8
"""Between two lines of these torchrun says who has failed."""
ROOT = "Root Cause"
TABLE_LINE = re.compile(r"\s*$|  |\[\d+\]:$|-{8}|Failures:$|Root Cause|.* FAILED$")
"""Between them; whatever a process has raised under torch's `@record` is set in by two."""
OF_RANK = re.compile(r"  rank\s*: (?P<rank>\d+)(?: \(local_rank: (?P<local>\d+)\))?\s*$")
OF_CODE = re.compile(r"  exitcode\s*: (?P<code>-?\d+)\b")
TOLD = re.compile(
    r"rank (?P<rank>\d+)(?: \(local rank (?P<local>\d+)\))? "
    r"(?:ended with exit code (?P<code>\d+)|was killed by (?:(?P<name>SIG\w+)|signal (?P<number>\d+)))$"
)
"""A `Death` in words."""
OF_COMMAND = re.compile(
    r"process (?P<rank>\d+) terminated with (?:exit code (?P<code>\d+)|signal (?P<name>SIG\w+))$"
    r"|Command (?:.|\n)* died with (?:<Signals\.\w+: |unknown signal )(?P<number>\d+)>?\.$"
)
OWN_LINE = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?:site-packages/)?torch/distributed/(?:elastic|run|launch)"
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\] \[\w+\] \[(?:launch|runner)\.py:\d+:\w+\]"
    r"|make(?:\[\d+\])?: \*\*\* "
)
"""What torchrun, deepspeed and make log of a process that has failed, and of the others, which they then end."""


@record
class Death:
    """How one process ended, by its launcher's report."""

    code: int
    """Of a signal, minus its number."""
    rank: int | None = None
    local_rank: int | None = None

    @property
    def signal(self) -> int | None:
        return -self.code if self.code < 0 else None

    def __str__(self) -> str:
        who = "a process" if self.rank is None else f"rank {self.rank}"
        if self.local_rank not in (None, self.rank):
            who += f" (local rank {self.local_rank})"
        if self.signal is None:
            return f"{who} ended with exit code {self.code}"
        return f"{who} was killed by {SIGNALS.get(self.signal, f'signal {self.signal}')}"


def is_report(kind: str) -> bool:
    """Whether an exception of this type only says that another process has failed."""
    return REPORT.search(kind) is not None


def is_group(kind: str) -> bool:
    """Whether it is torchrun's, whose message is a table."""
    found = REPORT.search(kind)
    return found is not None and found["group"] is not None


class Table:
    """torchrun's, line by line, of whatever length: who has failed, and how.

    Its root cause is the first that it has seen, of several within the same second the lowest rank. A process that was
    killed breaks the connections of the others, which then fail within that second: so among those that failed by
    themselves it is the cause.
    """

    def __init__(self) -> None:
        self.bars = 0
        """Lines of `=` so far: it begins with the first and ends with the second."""
        self._root = self._head = False
        self._rank: re.Match[str] | None = None
        self._first: Death | None = None
        self._killed: Death | None = None

    def take(self, line: str) -> bool:
        """Whether it is part of the table."""
        if line.startswith(BANNER) and self.bars < 2:
            self.bars += 1
        elif self.bars != 1 or not TABLE_LINE.match(line):
            return False
        elif line.startswith(ROOT):
            self._root = True
        elif line.startswith("["):
            self._head = True
        elif self._head and (rank := OF_RANK.match(line)):
            self._rank = rank
        elif self._head and (code := OF_CODE.match(line)) and self._rank:
            self._note(Death(
                code=int(code["code"]), rank=int(self._rank["rank"]),
                local_rank=int(self._rank["local"]) if self._rank["local"] else None,
            ))  # fmt: skip
            self._head = False
        return True

    def _note(self, one: Death) -> None:
        if self._root:
            self._first = one
        if one.signal not in (None, SIGTERM):
            self._killed = one

    @property
    def death(self) -> Death | None:
        """Whose process ended first, and how; None if it does not say."""
        return self._killed or self._first


def death(message: str) -> Death | None:
    """Of a report, by its exception's message, whose process ended first, and how; None if it does not say. torchrun's
    begins with what its table says."""
    one = TOLD.match(message.partition("\n")[0]) or OF_COMMAND.match(message)
    if one is None:
        return None
    number = next((number for number, name in SIGNALS.items() if name == one["name"]), int(one["number"] or 0))
    local = one.groupdict().get("local")
    return Death(
        code=int(one["code"]) if one["code"] else -number, rank=int(one["rank"]) if one["rank"] else None,
        local_rank=int(local) if local else None,
    )  # fmt: skip
