"""What may be said of a run: one look (`Probe`) in, one verdict out.

Pure, and the only place that decides a state. The exit record decides how a run ended, the process table whether it
lives, the log whether it gets on; a log that is not verified decides nothing. `rung` is `ladder`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.ladder import missing, output_seen, rung
from orchestrator.logscan import settled
from orchestrator.model import ExitRecord, Finding, LogSummary, Probe, Process, StateName, Verdict, Worker

__all__ = ["Limits", "age", "headline", "judge", "missing", "rung"]

# By number, since the laptop that judges need not number its signals as the container does.
SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
SHELL_SIGNAL = 128
"""A shell reports a child that signal N ended as exit code 128 + N."""
COMPILE_PHASE = re.compile(r"compil|warm", re.IGNORECASE)
BUSY_PHASE = re.compile(r"checkpoint|eval|valid|sav(?:e|ing)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """An exception of a thread nobody heard of, before the first step, may be an older run's text: steps would show
    that. After so long without any it is believed."""
    accepted_s: float = 10.0
    """How long a supervisor may take to say its first word."""
    decay: float = 0.6
    """tok/s below this part of the best recent figure is worth a word."""


def judge(probe: Probe, *, limits: Limits = Limits()) -> Verdict:
    """The verdict on one run. Total: every probe has one."""
    look = _Look(probe, limits)
    if probe.exit is not None:
        return _ended(look, probe.exit)
    if look.alive:
        return _live(look)
    return _vanished(look)


# --- what was seen --------------------------------------------------------------------------------------------------


class _Look:
    """A probe, and what follows from it alone."""

    def __init__(self, probe: Probe, limits: Limits) -> None:
        self.probe, self.limits, self.now = probe, limits, probe.observed_at
        # Not verified means: what stands under the log's name need not be this run's, so nothing is said from it.
        self.summary = settled(probe.summary) if probe.log.verified else LogSummary()
        self.alive = [one for one in probe.tree if one.alive]
        if probe.program is not None and probe.program.alive and probe.program not in self.alive:
            self.alive.insert(0, probe.program)
        self.gone, self.known = _workers(self.summary, probe.observed_at, limits, live=bool(self.alive))
        beat = probe.heartbeat
        self.step = self.summary.step
        if self.step is None and beat is not None and beat.step:
            self.step = beat.step
        self.phase = self.summary.phase
        if beat is not None and beat.phase and (self.phase is None or beat.at >= (self.summary.phase_at or 0.0)):
            self.phase = beat.phase

    def verdict(self, state: StateName, why: str, *, error: Finding | None = None) -> Verdict:
        if not self.probe.log.verified and self.probe.program_seen:
            why += f"; log not used: {self.probe.log.why or 'it is not verified'}"
        return Verdict(
            state=state, why=why, observed_at=self.now, step=self.step, tok_s=self.summary.tok_s,
            loss=self.summary.loss, last_progress_at=self.summary.step_at,
            workers_alive=len(self.known) - len(self.gone) if self.alive else 0, workers_total=len(self.known),
            workers_gone=[worker.name for worker in self.gone], error=error,
        )  # fmt: skip

    def figures(self) -> str:
        """`step 12, 310 tok/s, 3 s ago`."""
        parts = [f"step {self.step}"]
        if self.summary.tok_s is not None:
            parts.append(f"{self.summary.tok_s:,.{0 if self.summary.tok_s >= 10 else 2}f} tok/s")
        if self.summary.step_at is not None:
            parts.append(f"{age(self.now - self.summary.step_at)} ago")
        return ", ".join(parts)


def _workers(summary: LogSummary, now: float, limits: Limits, *, live: bool) -> tuple[list[Worker], list[Worker]]:
    """The workers that are gone, and all that are known. An older run's text makes no worker."""
    named = any(worker.seen and worker.step is not None for worker in summary.workers)
    gone, known = [], []
    for worker in summary.workers:
        if worker.died_at is None:
            known.append(worker)
            continue
        if worker.died_before_first_step and not worker.seen and not named:
            waiting = live and summary.step is None and now - worker.died_at < limits.unproven_death_s
            if summary.step is not None or waiting:
                continue
        gone.append(worker)
        known.append(worker)
    return gone, known


def _blame(look: _Look, code: int | None) -> Finding | None:
    """The finding a run ended with.

    First the workers: of what no step has followed, the first whose worker is gone, else the last. Then a gone worker's
    own, however many steps others took after it. Last, for exit code 1, which is what an uncaught exception in the main
    thread gives: the newest of all, since other threads may step on until the process is over.
    """
    gone = {worker.name for worker in look.gone}
    tail = look.summary.tail
    for finding in tail:
        if finding.worker in gone:
            return finding
    if tail:
        return tail[-1]
    for finding in look.summary.findings:
        if finding.worker in gone:
            return finding
    if code == 1 and look.summary.findings:
        return look.summary.findings[-1]
    return None


# --- ended ----------------------------------------------------------------------------------------------------------


def _ended(look: _Look, ending: ExitRecord) -> Verdict:
    left = f", but {_processes(look.alive)} left" if look.alive else ""
    step = f" after step {ending.last_step}" if ending.last_step is not None else ""
    memory = f", for memory ({ending.oom_kills} killed)" if ending.oom_kills else ""
    if ending.never_started is not None:
        return look.verdict("NEVER_STARTED", ending.never_started + left)
    how = "its ending is not known"
    if ending.signal is not None:
        how = _signal(ending.signal)
    elif ending.code is not None:
        how = f"exit code {ending.code}"
    if ending.stopped:
        return look.verdict("STOPPED", f"stopped as asked ({how}){step}{left}")
    if ending.signal is not None or (ending.oom_kills and ending.code in (None, SHELL_SIGNAL + 9)):
        return look.verdict("KILLED", f"{how}{memory}{step}{left}", error=_blame(look, None))
    if ending.code is None:
        return look.verdict("LOST", f"the record of its end says neither exit code nor signal{step}{left}")
    if ending.code == 0 and look.phase == "stopping":
        return look.verdict("STOPPED", f"stopped by a signal that specctl did not send ({how}){step}{left}")
    if ending.code == 0:
        gone = _gone(look)
        error = _blame(look, 0) if look.gone else None
        return look.verdict("SUCCEEDED", f"exit code 0{step}{f', but {gone}' if gone else ''}{left}", error=error)
    error = _blame(look, ending.code)
    if ending.code - SHELL_SIGNAL in SIGNALS:
        how += f" ({_signal(ending.code - SHELL_SIGNAL)} of a child)"
    because = f": {headline(error)}" if error else ""
    also = f" ({ending.oom_kills} killed for memory)" if ending.oom_kills else ""
    return look.verdict("FAILED", f"{how}{also}{step}{because}{left}", error=error)


def _vanished(look: _Look) -> Verdict:
    """No process, and no record of the end."""
    probe = look.probe
    if probe.same_boot is False:
        return look.verdict("LOST", "container restarted since the run started; no exit record")
    if not probe.program_seen:
        waited_s = look.now - probe.created_at
        if probe.supervisor_alive:
            return look.verdict("STARTING", f"supervisor is up, program not started yet after {age(waited_s)}")
        if probe.same_boot is None and waited_s < look.limits.accepted_s:
            return look.verdict("QUEUED", f"accepted {age(waited_s)} ago, no supervisor yet")
        memory = f"; {probe.oom_kills} killed for memory meanwhile" if probe.oom_kills else ""
        return look.verdict("NEVER_STARTED", f"its supervisor is gone and had started no program{memory}")
    if probe.supervisor_alive:
        # Not yet FAILED or SUCCEEDED: the end of its log, and of what outlived the program, is still being read.
        return look.verdict("STOPPING", "no process is left; how it ended is being recorded")
    step = f"; last seen at step {look.step}" if look.step is not None else ""
    if probe.oom_kills:
        return look.verdict(
            "KILLED", f"no process is left, {probe.oom_kills} killed for memory, no exit record{step}",
            error=_blame(look, None),
        )  # fmt: skip
    stop = ", after a stop was asked for" if probe.stop else ""
    return look.verdict("LOST", f"no process and no exit record{stop}{step}", error=_blame(look, None))


# --- alive ----------------------------------------------------------------------------------------------------------


def _live(look: _Look) -> Verdict:
    probe, summary = look.probe, look.summary
    notes = _notes(look)
    if probe.stop is not None:
        asked = f"{probe.stop.by or 'somebody'} asked {age(look.now - probe.stop.at)} ago"
        return look.verdict("STOPPING", f"{asked}, {_processes(look.alive)} left{notes}")
    ended = probe.program_exit
    if ended is not None and (ended.signal or ended.code) and (summary.step_at or 0.0) <= ended.at:
        # What is left of a program that failed (a loader's orphan, say) is not the run alive.
        how = _signal(ended.signal) if ended.signal else f"exit code {ended.code}"
        error = _blame(look, ended.code)
        because = f": {headline(error)}" if error else ""
        left = f"{_processes(look.alive)} left, which specctl stop ends"
        return look.verdict("KILLED" if ended.signal else "FAILED", f"{how}{because}; {left}", error=error)
    if look.gone:
        rest = look.figures() if look.step is not None else "no step yet"
        return look.verdict("DEGRADED", f"{_gone(look)}; {rest}{notes}", error=_blame(look, None))
    if not probe.log.verified:
        beat = f", heartbeat at step {look.step}" if look.step is not None else ""
        return look.verdict("RUNNING", f"{_processes(look.alive)} alive{beat}{notes}")
    if look.step is None:
        return _starting(look, notes)
    if summary.step_at is not None:
        silent_s, limit_s = look.now - summary.step_at, _patience_s(look)
        if silent_s > limit_s:
            phase = f" in phase {look.phase}" if look.phase and _is_after_step(look) else ""
            return look.verdict(
                "STALLED", f"no step for {age(silent_s)}{phase}, at step {look.step} (limit {age(limit_s)}){notes}"
            )
    return look.verdict("RUNNING", f"{look.figures()}{notes}")


def _starting(look: _Look, notes: str) -> Verdict:
    probe, summary, limits = look.probe, look.summary, look.limits
    limit_s = limits.compile_s if look.phase and COMPILE_PHASE.search(look.phase) else limits.start_s
    heard_at = max(probe.created_at, summary.phase_at or 0.0, probe.log.modified_at)
    silent_s = look.now - heard_at
    phase = f"phase {look.phase}" if look.phase else "no phase"
    if silent_s > limit_s:
        silence = f"no step and no output for {age(silent_s)}"
        return look.verdict("STALLED", f"{silence}, {phase} (limit {age(limit_s)}){notes}")
    said = "log: no output yet" if not output_seen(probe) else f"last output {age(silent_s)} ago"
    found = summary.tail[-1] if summary.tail else None
    seen = f"; {headline(found)} was printed {age(look.now - found.at)} ago" if found else ""
    return look.verdict("STARTING", f"{phase}, no step yet, {said}{seen}{notes}")


def _patience_s(look: _Look) -> float:
    """How long this run may go without a step."""
    summary, limits = look.summary, look.limits
    patience_s = max(limits.stall_s, limits.stall_intervals * (summary.step_interval_s or 0.0))
    if summary.steps_seen == 1 and summary.step_at is not None:
        # One step tells no interval; the second may take as long as the first did, within reason.
        patience_s = max(patience_s, min(summary.step_at - look.probe.created_at, limits.start_s))
    if look.phase and _is_after_step(look):
        if BUSY_PHASE.search(look.phase):
            return patience_s * limits.busy_factor
        if COMPILE_PHASE.search(look.phase):
            return max(patience_s, limits.compile_s)
    return patience_s


def _is_after_step(look: _Look) -> bool:
    """Whether the phase is what the run does now, and not what it did before its last step."""
    step_at = look.summary.step_at or 0.0
    beat = look.probe.heartbeat
    if beat is not None and beat.phase == look.phase and beat.at >= step_at:
        return True
    return (look.summary.phase_at or 0.0) >= step_at


def _notes(look: _Look) -> str:
    """What else a reader should know, as `; clause` after `; clause`."""
    probe, summary = look.probe, look.summary
    notes = []
    if not probe.supervisor_alive:
        notes.append("supervisor gone")
    if probe.program_exit is not None or (probe.program is None and probe.program_seen):
        ended = probe.program_exit
        code = f" (exit code {ended.code})" if ended is not None and ended.code is not None else ""
        notes.append(f"the started program has ended{code}, {_processes(look.alive)} left")
    elif probe.program is not None and probe.program.state in ("T", "t"):
        notes.append(f"process {probe.program.pid} is stopped (state T)")
    if summary.nonfinite_step is not None:
        notes.append(f"loss not finite since step {summary.nonfinite_step}")
    for worker in (one for one in look.known if one.died_at is None and one.step_at is not None):
        behind_s = (summary.step_at or 0.0) - (worker.step_at or 0.0)
        if behind_s > _patience_s(look):
            notes.append(f"{worker.name} has not stepped for {age(behind_s)} while others did")
    recent = summary.scan.recent_tok_s
    if len(recent) > 1 and max(recent[-2:]) < look.limits.decay * max(recent):
        notes.append(f"tok/s has fallen from {max(recent):,.0f}")
    return "".join(f"; {note}" for note in notes)


# --- words ----------------------------------------------------------------------------------------------------------


def age(seconds: float) -> str:
    """`12 s`, `4 min`, `3.1 h`, `2.0 d`."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def headline(finding: Finding) -> str:
    """`RuntimeError: boom`: the type and the first line of the message."""
    first = finding.message.partition("\n")[0]
    return f"{finding.type}: {first}" if first else finding.type


def _gone(look: _Look) -> str:
    """`drafter-0 died (RuntimeError: boom)`, for every worker that is gone."""
    return ", ".join(f"{one.name} died ({one.error})" if one.error else f"{one.name} died" for one in look.gone)


def _processes(processes: list[Process]) -> str:
    pids = ", ".join(str(one.pid) for one in processes[:5]) + (", ..." if len(processes) > 5 else "")
    return f"{len(processes)} process{'es' if len(processes) != 1 else ''} ({pids})"


def _signal(number: int) -> str:
    return SIGNALS.get(number, f"signal {number}")
