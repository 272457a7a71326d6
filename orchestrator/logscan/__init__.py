"""Bytes of a log -> steps, tok/s, phases, workers and exceptions; pure, and light enough to travel.

`Scanner` is the way in (`scanner.py`); `grammar.py` says what counts as a step line, `tracebacks.py` what an exception
is, `progress.py` what it all adds up to, `clean.py` how dirty bytes are cleaned (also for `specctl logs`).
"""

from orchestrator.logscan.clean import Block, Cleaner, OffsetMap, is_clean, scrub
from orchestrator.logscan.events import Event, FindingEvent, PhaseEvent, StepEvent, WorkerDown, WorkerUp
from orchestrator.logscan.progress import headline, settled
from orchestrator.logscan.scanner import Scanner

__all__ = [
    "Block", "Cleaner", "Event", "FindingEvent", "OffsetMap", "PhaseEvent", "Scanner", "StepEvent", "WorkerDown",
    "WorkerUp", "headline", "is_clean", "scrub", "settled",
]  # fmt: skip
