"""How far a run is, and how long it may go without getting further: for the judge, and for the supervisor's own notes.

Pure, and light: it works on what has been read out of the logs, and on the trainer's heartbeat.
"""

from __future__ import annotations

import re

from orchestrator.model import Heartbeat, LogSummary
from orchestrator.record import record

COMPILE_PHASE = re.compile(r"compil|warm", re.IGNORECASE)
BUSY_PHASE = re.compile(r"checkpoint|eval|valid|sav(?:e|ing)", re.IGNORECASE)
CLOCK_S = 60.0
"""How far in the future a program's own time may lie, and by how much a clock may be set without a word."""


@record
class Limits:
    """How long is too long."""

    stall_s: float = 120.0
    stall_intervals: float = 20.0
    """Silence of this many of the run's own median step intervals is a stall, if it is longer than `stall_s`."""
    busy_factor: float = 5.0
    """How much longer a checkpoint or an evaluation may be silent."""
    compile_s: float = 30 * 60.0
    start_s: float = 15 * 60.0
    """How long a run may be silent before its first step, when it does not say that it compiles."""
    unproven_death_s: float = 30.0
    """An exception of a thread nobody heard of may be an older run's text: steps would show that. After so long without
    any it is believed."""
    accepted_s: float = 10.0
    """How long a supervisor may take to say its first word."""
    decay: float = 0.6
    """tok/s below this part of the best recent figure is worth a word."""


@record
class Progress:
    """How far a run is, and by what."""

    step: int | None
    at: float | None
    """When it got there."""
    by_heartbeat: bool
    """Its lines name no step."""
    phase: str | None
    after_step: bool
    """The phase is what it does now, and not what it did before its last step."""

    @classmethod
    def of(cls, summary: LogSummary, beat: Heartbeat | None, now: float) -> Progress:
        step, at, phase = summary.step, summary.step_at, summary.phase
        if beat is not None and beat.at > now + CLOCK_S:
            beat = None  # in milliseconds, say: it would be new for ever
        by_heartbeat = step is None and beat is not None and bool(beat.step)
        if by_heartbeat and beat is not None:
            step, at = beat.step, beat.at
        if beat is not None and beat.phase and (phase is None or beat.at >= (summary.phase_at or 0.0)):
            phase = beat.phase
        stepped_at = summary.step_at or 0.0
        by_beat = beat is not None and beat.phase == phase and beat.at >= stepped_at
        return cls(
            step=step, at=at, by_heartbeat=by_heartbeat, phase=phase,
            after_step=by_beat or (summary.phase_at or 0.0) >= stepped_at,
        )  # fmt: skip

    def patience_s(self, summary: LogSummary, *, created_at: float, limits: Limits) -> float:
        """How long the run may go without a step, once it has made one."""
        patience_s = max(limits.stall_s, limits.stall_intervals * (summary.step_interval_s or 0.0))
        if summary.steps_seen == 1 and summary.step_at is not None:
            # One step tells no interval; the second may take as long as the first did, within reason.
            patience_s = max(patience_s, min(summary.step_at - created_at, limits.start_s))
        if self.phase and self.after_step:
            if BUSY_PHASE.search(self.phase):
                return patience_s * limits.busy_factor
            if COMPILE_PHASE.search(self.phase):
                return max(patience_s, limits.compile_s)
        return patience_s


def fallen_from(summary: LogSummary, limits: Limits) -> float | None:
    """The tok/s that the run's newest figures have fallen from, if they have."""
    recent = summary.scan.recent_tok_s
    if len(recent) > 1 and max(recent[-2:]) < limits.decay * max(recent):
        return max(recent)
    return None
