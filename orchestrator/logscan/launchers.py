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
OF_RANK = re.compile(
    r"^\s*rank\s*: (?P<rank>\d+)(?: \(local_rank: (?P<local>\d+)\))?\s*\n\s*exitcode\s*: (?P<code>-?\d+)\b",
    re.MULTILINE,
)
OF_COMMAND = re.compile(
    r"(?:[Pp]rocess (?P<rank>\d+) terminated with (?:exit code (?P<code>\d+)|signal (?P<name>SIG\w+))"
    r"|died with <Signals\.\w+: (?P<number>\d+)>)"
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


def death(text: str) -> Death | None:
    """Of a report, whose process ended first, and how; None if it does not say.

    torchrun's root cause is the first that it has seen, of several within the same second the lowest rank. A process
    that was killed breaks the connections of the others, which then fail within that second: so among those that
    failed by themselves it is the cause.
    """
    if one := OF_COMMAND.search(text):
        number = next((number for number, name in SIGNALS.items() if name == one["name"]), int(one["number"] or 0))
        return Death(code=int(one["code"]) if one["code"] else -number, rank=int(one["rank"]) if one["rank"] else None)
    root = text.rfind(ROOT)
    found = [
        Death(code=int(one["code"]), rank=int(one["rank"]), local_rank=int(one["local"]) if one["local"] else None)
        for part in ((text[root:], text[:root]) if root >= 0 else ()) for one in OF_RANK.finditer(part)
    ]  # fmt: skip
    killed = [one for one in found if one.signal not in (None, SIGTERM)]
    return next(iter(killed or found), None)
