"""What one of several processes says: the one that leads speaks for the run, each for its own workers.

Every process writes the lines and records of its own loader, target and drafter, of which it alone knows how busy they
were; the run's own lines, phases, heartbeat, checkpoints and trackers come from the one that leads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainer.distributed.neighbours import Gone
from trainer.distributed.ranks import Ranks
from trainer.report.console import PlainConsole, complain, worker_lines
from trainer.report.records import RunIdentity
from trainer.report.reporter import Reporter, RunStep, stacks_told
from trainer.sections import TrackingConfig

OF_WORKERS = {"worker_up", "worker_down", "exception", "no_progress", "no_graphs"}
OTHERS_REFUSE_S = 8.0
"""What is wrong is mostly found by all alike, and then said once: torchrun ends the others meanwhile."""


def refuse(line: str, ranks: Ranks | None) -> None:
    """Say why this process does not train; if it is not the one that speaks for its machine, only when that one has
    found nothing wrong, which would have ended both."""
    if ranks is not None and not ranks.speaks_here:
        time.sleep(OTHERS_REFUSE_S)
        line = f"process {ranks.rank}: {line}"
    complain(line)


def reporter_for(identity: RunIdentity, ranks: Ranks | None) -> Reporter:
    if ranks is None:
        return Reporter(identity)
    # Several processes write to one terminal, in which nothing can be redrawn.
    return (LeadingReporter if ranks.leads else FollowingReporter)(identity, ranks)


class LeadingReporter(Reporter):
    """Of a run in several processes, and of the first one's workers."""

    def __init__(self, identity: RunIdentity, ranks: Ranks) -> None:
        super().__init__(identity, console=PlainConsole())
        self.ranks = ranks
        self._gone: Gone | None = None

    def exception(self, worker: str | None, error: BaseException, **where: Any) -> None:
        """Every process may find out what is wrong with a worker; the one whose it is tells of it."""
        if worker is None or worker.endswith(f"-{self.ranks.rank}"):
            super().exception(worker, error, **where)

    def gone(self, other: Gone, first: bool) -> None:
        """Another process of this machine has ended without a word of its own, for which all end; the first to know
        says so."""
        self._gone = other
        if first:
            self.console.complain(f"{other}; the others end for it")
            super().event("process_gone", rank=other.rank, pid=other.pid, code=other.code)

    def phase(self, name: str, **facts: Any) -> None:
        if name != "stopping" or self._gone is None:  # else it is torchrun that asks, since it is over
            super().phase(name, **facts)

    def ended(self, *, code: int, stopped: bool, **facts: Any) -> list[str]:
        why = {"error": f"{self._gone}; this one ended for it"} if self._gone and code else {}
        return super().ended(code=code, stopped=stopped, **why, **facts)

    def last_words(self, stopped: bool, code: int) -> None:
        """Nothing of how the run ended: torchrun tells all to stop when a user does, and when another process has
        failed, and a signal handler cannot find out which."""
        self.console.last_words(b"")


class FollowingReporter(LeadingReporter):
    """Of one other process's workers alone."""

    def open(self) -> None:
        self.records.make_directory()

    def track(self, config: TrackingConfig, settings: Mapping[str, Any], *, steps_done: int) -> None:
        pass

    def ended(self, *, code: int, stopped: bool, **facts: Any) -> list[str]:
        return []

    def say(self, line: str) -> None:
        pass

    def complain(self, line: str) -> None:
        if self.ranks.speaks_here:
            super().complain(line)

    def event(self, name: str, **facts: Any) -> None:
        if name in OF_WORKERS:
            super().event(name, **facts)

    def phase(self, name: str, **facts: Any) -> None:
        self.heartbeat.enter(name)

    def step(self, done: RunStep) -> None:
        self.record_workers(done)
        if lines := worker_lines(done):
            self.console.say("\n".join(lines))

    def no_progress(self, what: str, stacks: Mapping[str, str], **facts: Any) -> None:
        self.console.say(stacks_told(what, stacks))
        self.event("no_progress", message=what, stacks=dict(stacks), **facts)

    @property
    def is_checkpointing(self) -> bool:
        """Or evaluating, or whatever holds up the one that leads."""
        return True

    def advanced(self, step: int) -> None:
        pass

    def checkpointing(self, now: bool) -> None:
        pass
