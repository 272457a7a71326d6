"""Bytes of a log -> steps, tok/s, phases, workers and exceptions; pure, and light enough to travel.

`Scanner` is the way in (`scanner.py`); `grammar.py` says what counts as a step line, `tracebacks.py` what an exception
is, `progress.py` what it all adds up to, `clean.py` how dirty bytes are cleaned (also for `specctl logs`). Who only
judges what was read has no need of a `Scanner`, whose expressions take longer to compile than a whole probe does.
"""

from typing import TYPE_CHECKING, Any

from orchestrator.logscan.clean import Block, Cleaner, OffsetMap, is_clean, scrub
from orchestrator.logscan.events import Event, FindingEvent, PhaseEvent, StepEvent, WorkerDown, WorkerUp
from orchestrator.logscan.progress import headline, settled

if TYPE_CHECKING:
    from orchestrator.logscan.scanner import Scanner

__all__ = [
    "Block", "Cleaner", "Event", "FindingEvent", "OffsetMap", "PhaseEvent", "Scanner", "StepEvent", "WorkerDown",
    "WorkerUp", "headline", "is_clean", "scrub", "settled",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "Scanner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestrator.logscan.scanner import Scanner

    return Scanner
