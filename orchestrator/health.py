"""What may be said of a run: one look (`Probe`) in, one verdict out.

Pure, and the only place that decides a state. The exit record decides how a run ended, the process table whether it
lives, the log whether it gets on; a log that is not verified decides nothing. `rung` is `ladder`'s.
"""

from __future__ import annotations

from orchestrator.blame import OWN_FAULTS, cause, how_by, killed, said_by
from orchestrator.ladder import missing, output_seen, rung
from orchestrator.logscan import headline, pace, settled
from orchestrator.logscan.launchers import SIGNALS, is_report
from orchestrator.logscan.pace import CLOCK_S, COMPILE_PHASE, Limits, Progress
from orchestrator.model import (
    BAD,
    LIVE,
    ExitRecord,
    Finding,
    GpuClaim,
    InLine,
    LastWords,
    LogSummary,
    Probe,
    Process,
    StateName,
    Verdict,
    Worker,
    age,
    listed,
    ordinal,
    told,
)

__all__ = ["Limits", "age", "headline", "judge", "missing", "rung"]

SIGKILL = 9
SHELL_SIGNAL = 128
"""A shell reports a child that signal N ended as exit code 128 + N."""
SILENT_STEPS = 5
"""A worker whose exception was printed and that stands still while the others take so many steps is worth a word."""
BEHIND_BYTES = 64 << 20
"""A supervisor that keeps up may have so much of a log before it that is written at full speed."""



def judge(probe: Probe, *, limits: Limits = Limits()) -> Verdict:
    """The verdict on one run. Total: every probe has one."""
    look = _Look(probe, limits)
    if probe.closed is not None:
        return look.verdict("UNREACHABLE", probe.closed)
    if probe.damaged is not None:
        return _damaged(look, probe.damaged)
    if probe.elsewhere is not None and probe.exit is None:
        # Its processes would be invisible here, alive as they may be.
        return look.verdict("UNREACHABLE", f"it is a run of the host {probe.elsewhere}, and only that one can tell")
    if probe.exit is not None and look.refuted is None:
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
        self.progress = Progress.of(self.summary, probe.heartbeat, self.now)
        self.step, self.progress_at, self.phase = self.progress.step, self.progress.at, self.progress.phase
        self.began = probe.program_seen or output_seen(probe) is not None or self.step is not None
        """Whether the program has run: it was recorded, or its output is there."""
        claim = probe.gpu_claim
        self.began_at = max(probe.created_at, (claim.granted_at or 0.0) if claim else 0.0)
        """From when on it may be expected to do something: not while it waited in line."""
        self.refuted = probe.exit.never_started if probe.exit is not None and self.began else None
        """A record that says it never started, of a run that did."""

    def verdict(
        self, state: StateName, why: str, *, error: Finding | None = None, words: LastWords | None = None
    ) -> Verdict:
        if not self.probe.log.verified and self.probe.program_seen:
            why += f"; log not used: {self.probe.log.why or 'it is not verified'}"
        full = self.probe.disk.problem if self.probe.disk else None
        if full and (state in LIVE or state in BAD):
            why += f"; {'' if state in LIVE else 'now '}{full}"
        if words is not None:
            why += f"; {words.told}"
        return Verdict(
            state=state, why=why, observed_at=self.now, step=self.step, tok_s=self.summary.tok_s,
            loss=self.summary.loss, last_progress_at=self.progress_at,
            workers_alive=len(self.known) - len(self.gone) if self.alive else 0, workers_total=len(self.known),
            workers_gone=[worker.name for worker in self.gone], workers=self.known, error=error, last_words=words,
        )  # fmt: skip

    def figures(self) -> str:
        """`step 12, 310 tok/s, 3 s ago`."""
        parts = [f"step {self.step}" + (" by its heartbeat" if self.progress.by_heartbeat else "")]
        if self.summary.tok_s is not None:
            parts.append(f"{self.summary.tok_s:,.{0 if self.summary.tok_s >= 10 else 2}f} tok/s")
        if self.progress_at is not None:
            parts.append(f"{age(self.now - self.progress_at)} ago")
        return ", ".join(parts)


def _workers(summary: LogSummary, now: float, limits: Limits, *, live: bool) -> tuple[list[Worker], list[Worker]]:
    """The workers that are gone, and all that are known. An older run's text makes no worker."""
    named = any(worker.seen and (worker.step, worker.tok_s) != (None, None) for worker in summary.workers)
    gone, known = [], []
    for worker in summary.workers:
        if worker.died_at is None:
            known.append(worker)
        elif worker.seen or named or _believed(worker, summary, now, limits, live=live):
            known.append(worker)
            gone.append(worker)
    return gone, known


def _believed(worker: Worker, summary: LogSummary, now: float, limits: Limits, *, live: bool) -> bool:
    """Whether a thread's exception is this run's, when nothing else ever named the thread, nor any other worker.

    It may be an older run's text, and then steps follow it; after a while without any it is believed.
    """
    if summary.step is not None and all(finding.worker != worker.name for finding in summary.tail):
        return False
    patience_s = max(limits.unproven_death_s, limits.stall_intervals * (summary.step_interval_s or 0.0))
    return not live or now - (worker.died_at or 0.0) >= patience_s


def _blame(look: _Look, code: int | None) -> Finding | None:
    """The finding a run ended with.

    First the workers: of what no step has followed, the first whose worker is gone, else the last. Then a gone worker's
    own, however many steps others took after it. Last, for exit code 1, which is what an uncaught exception in the main
    thread gives: the newest of all, since other threads may step on until the process is over. What a launcher reports
    of its processes is only blamed if there is nothing else, or if it says that one was killed: that broke the others.
    """
    gone = {worker.name for worker in look.gone}
    tail = look.summary.tail
    if killed(tail):
        return cause(tail)
    for finding in tail:
        if finding.worker in gone:
            return finding
    if tail:
        return cause(tail)
    for finding in look.summary.findings:
        if finding.worker in gone:
            return finding
    if code == 1 and look.summary.findings:
        return cause(look.summary.findings)
    return None


# --- ended ----------------------------------------------------------------------------------------------------------


def _damaged(look: _Look, why: str) -> Verdict:
    if not look.alive:
        return look.verdict("LOST", f"{why}; no process carries its mark")
    return look.verdict("LOST", f"{why}, but {_processes(look.alive)} alive with its mark: what they do is not known")


def _ended(look: _Look, ending: ExitRecord) -> Verdict:
    left = f", but {_processes(look.alive)} left" if look.alive else ""
    step = f" after step {ending.last_step}" if ending.last_step is not None else ""
    if ending.never_started is not None and ending.stopped:
        return look.verdict("STOPPED", ending.never_started + left)
    if ending.never_started is not None:
        return look.verdict("NEVER_STARTED", ending.never_started + left)
    how = "its ending is not known"
    if ending.signal is not None:
        how = _signal(ending.signal)
    elif ending.code is not None:
        how = f"exit code {ending.code}"
    if ending.stopped:
        return look.verdict("STOPPED", f"stopped as asked ({how}){step}{left}")
    memory, aside = "", _memory(ending.oom_kills)
    if ending.oom_kills and (ending.signal == SIGKILL or ending.code == SHELL_SIGNAL + SIGKILL):
        memory, aside = f", for memory ({ending.oom_kills} killed)", ""
    first, hidden = look.probe.program_exit, ending.behind_pipe
    if hidden is not None and (ending.code or ending.signal):
        how += f" of {hidden}, whose pipe to tee ended with 0"
    elif first is not None and first.code == 0 and (ending.code or ending.signal):
        how += " of another process of the run, whose started program had ended with exit code 0"
    words = ending.last_words if ending.nonce == look.probe.nonce else None
    if ending.signal is not None or memory:
        error = _blame(look, None)
        words = words if error is None and ending.signal in OWN_FAULTS else None
        return look.verdict("KILLED", f"{how}{memory}{step}{aside}{left}", error=error, words=words)
    if ending.code is None:
        return look.verdict("LOST", f"the record of its end says neither exit code nor signal{step}{aside}{left}")
    if ending.code == 0 and look.phase == "stopping":
        return look.verdict("STOPPED", f"stopped by a signal that specctl did not send ({how}){step}{left}")
    if ending.code == 0:
        error = _blame(look, 0) if look.gone or look.summary.tail else None
        but = ""
        if error is not None:
            # A pipe's exit code is its last command's: `python train.py | tee log` ends with 0 whatever became of it.
            but = f", but {_gone(look)}" if look.gone else f", but its last words are {said_by(error)}"
        if hidden is not None:
            how += f" (a pipe's to tee: that {hidden} before it ended well is said only under set -o pipefail)"
        return look.verdict("SUCCEEDED", f"{how}{step}{but}{aside}{left}", error=error)
    error = _blame(look, ending.code)
    if ending.code - SHELL_SIGNAL in SIGNALS:
        how += f" ({_signal(ending.code - SHELL_SIGNAL)} of a child)"
    because, error, words = _because(look, error, words)
    state: StateName = "FAILED"
    if (child := killed(look.summary.tail)) is not None and child.signal == SIGKILL and ending.oom_kills:
        state, because, aside = "KILLED", f"{because}, for memory ({ending.oom_kills} killed)", ""
    return look.verdict(state, f"{how}{step}{because}{aside}{left}", error=error, words=words)


def _because(look: _Look, error: Finding | None, words: LastWords | None
             ) -> tuple[str, Finding | None, LastWords | None]:  # fmt: skip
    """In words, by which exception it ended, and else what it had said last. What a launcher says of a process that
    has failed is not the reason: what that process said is, if it has not been killed."""
    if error is None:
        return "", None, words
    if words is None or not is_report(error.type) or killed([error]):
        return f": {said_by(error)}", error, None
    return f" ({how_by(error)})", None, words


def _memory(kills: int) -> str:
    """The container counts kills for memory; a neighbour's are among them."""
    return f"; {kills} killed for memory in this container meanwhile, whose is not known" if kills else ""


def _vanished(look: _Look) -> Verdict:
    """No process, and no record of the end."""
    probe = look.probe
    waited = probe.gpu_claim is not None and probe.gpu_claim.waiting and not look.began
    if probe.same_boot is False and waited:
        return look.verdict("NEVER_STARTED", "the container restarted while it waited in line; its program never ran")
    if probe.same_boot is False:
        return look.verdict("LOST", "container restarted since the run started; no exit record")
    hidden = "supervisor.json" in probe.unreadable
    if not look.began and not hidden:
        waited_s = look.now - probe.created_at
        if probe.gpu_claim is not None and probe.in_line is not None:
            return look.verdict("QUEUED", _queued(look, probe.gpu_claim, probe.in_line))
        if probe.supervisor_alive:
            return look.verdict("STARTING", f"supervisor is up, program not started yet after {age(waited_s)}")
        if probe.same_boot is None and waited_s < look.limits.accepted_s:
            return look.verdict("QUEUED", f"accepted {age(waited_s)} ago, no supervisor yet")
        amid = " while it waited in line" if waited else ""
        return look.verdict(
            "NEVER_STARTED", f"its supervisor is gone{amid} and had started no program{_memory(probe.oom_kills)}"
        )  # fmt: skip
    if probe.supervisor_alive and probe.disk is not None and probe.disk.read_only:
        return look.verdict("LOST", "no process is left, and how it ended cannot be recorded")
    if probe.supervisor_alive:
        # Not yet FAILED or SUCCEEDED: the end of its log, and of what outlived the program, is still being read.
        if (pid := probe.supervisor_stopped) is not None:
            woken = f"its supervisor, which is stopped, records how it ended once woken (there: kill -CONT {pid})"
            return look.verdict("STOPPING", f"no process is left; {woken}")
        return look.verdict("STOPPING", f"no process is left; how it ended is being recorded{_behind(look)}")
    step = f"; last seen at step {look.step}" if look.step is not None else ""
    record = f"{' and '.join(probe.unreadable)} cannot be read" if probe.unreadable else "no exit record"
    if look.refuted is not None:
        record = f"a record that it never started ({look.refuted}), although it did"
    if probe.oom_kills:
        why = f"no process is left, {record}{_memory(probe.oom_kills)}{step}"
        return look.verdict("KILLED", why, error=_blame(look, None))
    stop = ", after a stop was asked for" if probe.stop else ""
    return look.verdict("LOST", f"no process and {record}{stop}{step}", error=_blame(look, None))


def _queued(look: _Look, claim: GpuClaim, stands: InLine) -> str:
    """`2nd in line for GPU 0, held by run ...; behind ...; queued 10 min ago`."""
    since = f"queued {age(look.now - (claim.queued_at or claim.asked_at))} ago"
    stopped = look.probe.supervisor_stopped
    held_up = "" if stopped is None else f"; its supervisor is stopped (state T; there: kill -CONT {stopped})"
    if stands.problem is not None:
        return f"in line for {claim.wish}, {since}; where it stands is not known: {stands.problem}{held_up}"
    behind = f"; next before it: run {stands.ahead[-1]}" if stands.ahead else ""
    what = told(stands.obstacles, look.now) or "free now, it is about to start"
    alike = len({(one.what, one.since) for one in stands.obstacles}) == 1 and len(stands.obstacles) == claim.count
    if not alike or claim.count < len(claim.pool):
        what = f"{claim.wish}: {what}"
    return f"{ordinal(stands.position)} in line for {what}{behind}; {since}{held_up}"


# --- alive ----------------------------------------------------------------------------------------------------------


def _live(look: _Look) -> Verdict:
    probe, summary = look.probe, look.summary
    notes = _notes(look)
    if probe.stop is not None:
        asked = f"{probe.stop.by or 'somebody'} asked {age(look.now - probe.stop.at)} ago"
        late = probe.stop.now or look.now - probe.stop.at > probe.stop.grace_s
        hung = [f"{one.name} ({one.pid})" for one in look.alive if one.state == "D"] if late else []
        stuck = f"; state D, hung in the kernel: {', '.join(hung)}" if hung else ""
        return look.verdict("STOPPING", f"{asked}, {_processes(look.alive)} left{stuck}{notes}")
    ended = probe.program_exit
    if ended is not None and (ended.signal or ended.code) and (summary.step_at or 0.0) <= ended.at:
        # What is left of a program that failed (a loader's orphan, say) is not the run alive.
        how = _signal(ended.signal) if ended.signal else f"exit code {ended.code}"
        said = ended.last_words if ended.signal is None or ended.signal in OWN_FAULTS else None
        because, error, words = _because(look, _blame(look, ended.code), said)
        left = f"{_processes(look.alive)} left, which specctl stop ends"
        state: StateName = "KILLED" if ended.signal else "FAILED"
        return look.verdict(state, f"{how}{because}; {left}", error=error, words=words)
    if look.gone:
        rest = look.figures() if look.step is not None else "no step yet"
        return look.verdict("DEGRADED", f"{_gone(look)}; {rest}{notes}", error=_blame(look, None))
    if look.progress_at is not None:
        silent_s, limit_s = look.now - look.progress_at, _patience_s(look)
        if silent_s > limit_s:
            phase = f" in phase {look.phase}" if look.phase and look.progress.after_step else ""
            what, by = ("heartbeat", " by the last one") if look.progress.by_heartbeat else ("step", "")
            silence = f"no {what} for {age(silent_s)}{phase}, at step {look.step}{by}"
            if summary.tail:
                silence += f", after which {headline(summary.tail[-1])} was printed"
            return look.verdict("STALLED", f"{silence} (limit {age(limit_s)}){notes}")
    if not probe.log.verified:
        beat = f", {look.figures()}" if look.step is not None else ""
        return look.verdict("RUNNING", f"{_processes(look.alive)} alive{beat}{notes}")
    if look.step is None:
        return _starting(look, notes)
    unanswered = ""
    if summary.tail:
        last = summary.tail[-1]
        unanswered = f"; {headline(last)} was printed {age(look.now - last.at)} ago, and no step since"
    return look.verdict("RUNNING", f"{look.figures()}{unanswered}{notes}")


def _starting(look: _Look, notes: str) -> Verdict:
    probe, summary, limits = look.probe, look.summary, look.limits
    limit_s = limits.compile_s if look.phase and COMPILE_PHASE.search(look.phase) else limits.start_s
    heard_at = max(
        look.began_at, summary.phase_at or 0.0, probe.log.modified_at,
        *(log.modified_at or 0.0 for log in probe.foreign_logs if log.own_bytes and log.shared is None),
    )  # fmt: skip
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
    return look.progress.patience_s(look.summary, created_at=look.began_at, limits=look.limits)


def _notes(look: _Look) -> str:
    """What else a reader should know, as `; clause` after `; clause`."""
    probe, summary = look.probe, look.summary
    notes = [f"{name} cannot be read" for name in probe.unreadable]
    if not probe.supervisor_alive and not notes:
        held = probe.gpu_claim.held if probe.gpu_claim else []
        void = f", and with it its claim of {listed([one.number for one in held])}" if held else ""
        notes.append(f"supervisor gone{void}")
    if probe.gpus_lost:
        notes.append(f"its claim of {listed(probe.gpus_lost)} is gone: somebody has removed its lock")
    if probe.supervisor_stopped is not None:
        notes.append(f"supervisor stopped (state T; there: kill -CONT {probe.supervisor_stopped})")
    if look.refuted is not None:
        notes.append(f"its record says that it never started ({look.refuted})")
    if abs(probe.clock_set_by_s) >= CLOCK_S:
        way = "ahead" if probe.clock_set_by_s > 0 else "back"
        notes.append(f"the clock there was set {way} by {age(abs(probe.clock_set_by_s))} since it began")
    if probe.log.moved == "renamed":
        notes.append(f"its log was renamed to {probe.log.path}")
    elif probe.log.moved == "deleted":
        notes.append(f"its log was deleted: while it runs, specctl logs {probe.run_id} >FILE can still save it")
    if probe.program_exit is not None or (probe.program is None and probe.program_seen):
        ended = probe.program_exit
        code = f" (exit code {ended.code})" if ended is not None and ended.code is not None else ""
        notes.append(f"the started program has ended{code}, {_processes(look.alive)} left")
    elif probe.program is not None and probe.program.stopped:
        notes.append(f"process {probe.program.pid} is stopped (state T)")
    notes += [f"{log.path} is not read, {log.shared} writes it too" for log in probe.foreign_logs if log.shared]
    if summary.nonfinite_step is not None:
        notes.append(f"loss not finite since step {summary.nonfinite_step}")
    ahead = max((one.step or 0 for one in look.known), default=0)
    for worker in (one for one in look.known if one.died_at is None and one.step_at is not None):
        behind_s = (summary.step_at or 0.0) - (worker.step_at or 0.0)
        if behind_s > _patience_s(look):
            notes.append(f"{worker.name} has not stepped for {age(behind_s)} while others did")
        elif ahead - (worker.step or 0) >= SILENT_STEPS:
            fault = next((one for one in summary.findings if one.worker == worker.name), None)
            if fault is not None and fault.at >= (worker.step_at or 0.0):
                notes.append(f"{worker.name} has not stepped since its exception ({headline(fault)})")
    for worker in (one for one in summary.workers if one.died_at is not None and one not in look.known):
        notes.append(f"an exception of a thread {worker.name} was printed ({worker.error}), which may be older text")
    if (fallen_from := pace.fallen_from(summary, look.limits)) is not None:
        notes.append(f"tok/s has fallen from {fallen_from:,.0f}")
    return "".join(f"; {note}" for note in notes) + _behind(look)


def _behind(look: _Look) -> str:
    """That what is said may be old news: the log is written faster than it is read."""
    unread = look.probe.unread_bytes
    return f"; the last {unread >> 20:,} MiB of its log are not read yet" if unread > BEHIND_BYTES else ""


# --- words ----------------------------------------------------------------------------------------------------------


def _gone(look: _Look) -> str:
    """`drafter-0 died (RuntimeError: boom)`, for every worker that is gone."""
    return ", ".join(f"{one.name} died ({one.error})" if one.error else f"{one.name} died" for one in look.gone)


def _processes(processes: list[Process]) -> str:
    pids = ", ".join(str(one.pid) for one in processes[:5]) + (", ..." if len(processes) > 5 else "")
    return f"{len(processes)} process{'es' if len(processes) != 1 else ''} ({pids})"


def _signal(number: int) -> str:
    return SIGNALS.get(number, f"signal {number}")
