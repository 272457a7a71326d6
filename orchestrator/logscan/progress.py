"""What the lines of a log add up to: the step, the figures, the workers, the findings. Constant size at any length.

The scanner feeds it; `Progress(summary)` goes on from a summary, so a probe can read on where a supervisor stopped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.logscan.events import Event, FindingEvent, PhaseEvent, StepEvent, WorkerDown, WorkerUp
from orchestrator.model import Finding, LogSummary, OpenFinding, ScanState, Worker

if TYPE_CHECKING:
    from orchestrator.logscan.grammar import Reading
    from orchestrator.logscan.templates import Row

WARM_UP_FIGURES = 2
RECENT = 32
MAX_FINDINGS = 8
MAX_TAIL = 3
MAX_WORKERS = 256
ABSURD = 1e30


@dataclass(slots=True)
class _Worker:
    """A `model.Worker` that can be written to."""

    name: str
    step: int | None = None
    step_at: float | None = None
    tok_s: float | None = None
    loss: float | None = None
    died_at: float | None = None
    error: str | None = None
    seen: bool = False


class Progress:
    """The mutable side of a `LogSummary`."""

    def __init__(self, summary: LogSummary, *, every: bool = False) -> None:
        self._every = every
        self._workers = {worker.name: _Worker(**dataclasses.asdict(worker)) for worker in summary.workers}
        self._findings = list(summary.findings)
        self._tail = list(summary.tail)
        self._findings_total = summary.findings_total
        self._steps_seen, self._step, self._step_at = summary.steps_seen, summary.step, summary.step_at
        self._loss, self._tok_s, self._tok_s_printed = summary.loss, summary.tok_s, summary.tok_s_printed
        self._phase, self._phase_at = summary.phase, summary.phase_at
        self._nonfinite_step = summary.nonfinite_step
        scan = summary.scan
        self._whole_run = scan.whole_run
        self.first_step_offset = scan.first_step_offset
        self._advance_at, self._advance_burst = scan.advance_at, scan.advance_burst
        self._tok_s_figures = scan.tok_s_figures
        self._recent_tok_s, self._recent_intervals_s = list(scan.recent_tok_s), list(scan.recent_intervals_s)
        self._bar, self._bar_total = list(scan.bar), scan.bar_total

    # --- lines ------------------------------------------------------------------------------------------------------

    def read(self, reading: Reading, offset: int, now: float) -> list[Event]:
        """Counts one line in."""
        events: list[Event] = []
        if reading.step is None and (reading.bar is not None or reading.loss is not None):
            self._place(reading)
        worker = self._known(reading, events)
        if reading.phase is not None:
            self._phase, self._phase_at = reading.phase, now
            events.append(PhaseEvent(phase=reading.phase, fields=reading.fields, offset=offset))
        if reading.step is not None:
            events.append(step_event(reading, offset))
            self._tail.clear()
            if self.first_step_offset is None:
                self.first_step_offset = offset
        self._tok_s_printed = self._tok_s_printed or reading.tok_s is not None
        loss = reading.loss
        if loss is not None and not math.isfinite(loss) and self._nonfinite_step is None:
            self._nonfinite_step = reading.step if reading.step is not None else self._step
        if worker is not None:
            self._read_worker(worker, reading, now)
        else:
            self._read_whole_run(reading, now)
        return events

    def read_alike(
        self, rows: Sequence[Row], columns: Sequence[int | None], newest: Mapping[bytes, int], now: float
    ) -> bool:
        """Counts in step lines of one form, as `read` would one by one, if what they say is nothing new: lines of the
        whole run after earlier ones, or of workers that live. Else False, and nothing is counted. `newest`: the last
        row of each worker."""
        at_step, at_tok_s, at_loss, _, _, at_worker = columns
        if at_step is None:
            return False
        if at_worker is None:
            if not self._whole_run or self._step is None:
                return False
            self._rows_of_the_run(rows, at_step, at_tok_s, at_loss, now)
        else:
            living = {}
            for name in newest:
                worker = self._workers.get(name.decode("ascii"))
                if worker is None or worker.step is None or worker.died_at is not None:
                    return False
                living[name] = worker
            if self._step is None:
                return False
            self._rows_of_workers(rows, (at_step, at_tok_s, at_loss, at_worker), living, newest, now)
        self._tail.clear()
        self._tok_s_printed = self._tok_s_printed or at_tok_s is not None
        return True

    def read_frames(self, rows: Sequence[Row]) -> bool:
        """Counts in frames of bars without a name, if they are no steps; else False, and nothing is counted."""
        if self._bar_total is not None and any(int(total) == self._bar_total for _, total, *_ in rows):
            return False
        self._stands_at(int(rows[-1][0]), int(rows[-1][1]))
        return True

    def _rows_of_the_run(
        self, rows: Sequence[Row], at_step: int, at_tok_s: int | None, at_loss: int | None, now: float
    ) -> None:
        before, changed, advanced = self._step, False, 0
        assert before is not None
        for row in rows:
            step = int(row[at_step])
            if step != before:
                changed = True
                advanced += step > before
                before = step
        self._step = before
        if changed:
            self._step_at = now
        self._advanced(now, advanced)
        if at_loss is not None:
            self._loss = float(rows[-1][at_loss])
        if at_tok_s is not None:
            left_out = max(0, len(rows) - RECENT)
            self._tok_s_figures += left_out  # of which none stays in the end
            for row in rows[left_out:]:
                self._figure(float(row[at_tok_s]))
            self._tok_s = float(rows[-1][at_tok_s])

    def _rows_of_workers(
        self, rows: Sequence[Row], columns: tuple[int, int | None, int | None, int], workers: Mapping[bytes, _Worker],
        newest: Mapping[bytes, int], now: float,
    ) -> None:  # fmt: skip
        at_step, at_tok_s, at_loss, at_worker = columns
        advances = self._move(rows, at_step, at_worker, workers, now)
        if not self._whole_run:
            # The sums of all workers at the last advances: those before are in no median any more.
            self._advanced(now, len(advances))
            recent = advances[-RECENT:]
            start = recent[0] if recent else len(rows)
            if at_tok_s is not None:
                for name, index in {row[at_worker]: index for index, row in enumerate(rows[:start])}.items():
                    workers[name].tok_s = float(rows[index][at_tok_s])
            for index in range(start, len(rows)):
                if at_tok_s is not None:
                    workers[rows[index][at_worker]].tok_s = float(rows[index][at_tok_s])
                if recent and index == recent[0]:
                    del recent[0]
                    self._add_up()
                    if self._tok_s is not None:
                        self._tok_s_figures += max(0, len(advances) - RECENT) * (index == start)
                        self._figure(self._tok_s)
        for name, index in newest.items():
            if at_tok_s is not None:
                workers[name].tok_s = float(rows[index][at_tok_s])
            if at_loss is not None:
                workers[name].loss = float(rows[index][at_loss])
        if not self._whole_run:
            self._add_up()

    def _move(
        self, rows: Sequence[Row], at_step: int, at_worker: int, workers: Mapping[bytes, _Worker], now: float
    ) -> list[int]:
        """Sets the steps of these workers; at which rows the step of the last worker advanced."""
        steps = {name: worker.step for name, worker in workers.items() if worker.step is not None}
        mine = {worker.name for worker in workers.values()}
        others = [
            one.step for one in self._workers.values()
            if one.step is not None and one.died_at is None and one.name not in mine
        ]  # fmt: skip
        floor = min(others, default=1 << 62)
        least, moved, advances = min(floor, *steps.values()), set(), []
        for index, row in enumerate(rows):
            name = row[at_worker]
            step, old = int(row[at_step]), steps[name]
            if step == old:
                continue
            steps[name] = step
            moved.add(name)
            if old == least or step < least:
                before, least = least, min(floor, *steps.values())
                if least > before:
                    advances.append(index)
        for name in moved:
            workers[name].step, workers[name].step_at = steps[name], now
            self._step_at = now
        return advances

    def _place(self, reading: Reading) -> None:
        """The step of a loss line without one is where the nameless bar stands; the bar's frames are steps from then
        on. A finished bar is somebody else's: of the loading, say."""
        if reading.bar is None:
            if self._bar:
                reading.step, self._bar_total = self._bar
        else:
            position, total = reading.bar
            self._stands_at(position, total)
            if total == self._bar_total:
                reading.step = position

    def _stands_at(self, position: int, total: int) -> None:
        self._bar = [position, total] if position < total else []

    def _known(self, reading: Reading, events: list[Event]) -> _Worker | None:
        """The line's worker, made known and, when it steps, alive."""
        if reading.worker is None:
            return None
        worker = self._worker(reading.worker)
        if worker is None:
            return None
        revived = worker.died_at is not None and reading.step is not None
        if revived:
            worker.died_at, worker.error = None, None
        if revived or (not worker.seen and worker.died_at is None):
            events.append(WorkerUp(name=worker.name))
        worker.seen = True
        return worker

    def _worker(self, name: str) -> _Worker | None:
        """The worker of that name, new if need be; None when there are more of them than can be real."""
        worker = self._workers.get(name)
        if worker is None and len(self._workers) < MAX_WORKERS:
            worker = self._workers[name] = _Worker(name=name)
        return worker

    def _read_worker(self, worker: _Worker, reading: Reading, now: float) -> None:
        if reading.step is not None and reading.step != worker.step:
            worker.step, worker.step_at = reading.step, now
            self._step_at = now
        worker.tok_s, worker.loss = _newer(reading.tok_s, worker.tok_s), _newer(reading.loss, worker.loss)
        if not self._whole_run:
            before = self._step
            self._add_up()
            if reading.step is not None and self._step is not None and (before is None or self._step > before):
                self._advanced(now)
                if self._tok_s is not None:
                    self._figure(self._tok_s)

    def _read_whole_run(self, reading: Reading, now: float) -> None:
        if reading.step is None and not self._whole_run and any(w.step is not None for w in self._workers.values()):
            return  # a figure of nobody's beside workers that have their own
        if reading.step is not None:
            before = self._step
            if not self._whole_run:  # what the workers added up to so far was not the run's own figure
                self._whole_run, self._tok_s_figures = True, 0
                self._recent_tok_s.clear()
            if reading.step != before:
                self._step_at = now
                if before is None or reading.step > before:
                    self._advanced(now)
            self._step = reading.step
        self._loss = _newer(reading.loss, self._loss)
        self._tok_s = _newer(reading.tok_s, self._tok_s)
        if reading.tok_s is not None and self._tok_s is not None:
            self._figure(self._tok_s)

    def _add_up(self) -> None:
        """Step, tok/s and loss of the run, from its living workers."""
        step, tok_s, rates, loss, losses = None, 0.0, 0, 0.0, 0
        for worker in self._workers.values():
            if worker.died_at is not None or worker.step is None:
                continue
            if step is None or worker.step < step:
                step = worker.step
            if worker.tok_s is not None:
                tok_s, rates = tok_s + worker.tok_s, rates + 1
            if worker.loss is not None:
                loss, losses = loss + worker.loss, losses + 1
        if step is None:
            return
        self._step = step
        self._tok_s = _newer(tok_s, None) if rates else None
        self._loss = _newer(loss / losses, None) if losses else None

    def _advanced(self, now: float, times: int = 1) -> None:
        if not times:
            return
        self._steps_seen += times
        if self._advance_at is None or now < self._advance_at:
            self._advance_at, self._advance_burst = now, times
        elif now == self._advance_at:
            self._advance_burst += times  # several were read at once: the next interval is shared out among them
        else:
            self._recent_intervals_s.append((now - self._advance_at) / self._advance_burst)
            del self._recent_intervals_s[:-RECENT]
            self._advance_at, self._advance_burst = now, times

    def _figure(self, tok_s: float) -> None:
        self._tok_s_figures += 1
        if self._tok_s_figures > WARM_UP_FIGURES:
            self._recent_tok_s.append(tok_s)
            del self._recent_tok_s[:-RECENT]

    # --- findings ---------------------------------------------------------------------------------------------------

    def find(self, finding: Finding, down: Iterable[str], *, followed: bool, now: float) -> list[Event]:
        """Counts a finding in, and the death of the workers that ended with it."""
        events: list[Event] = []
        self._findings_total += 1
        for index, known in enumerate(self._findings):
            if (known.fingerprint, known.worker) == (finding.fingerprint, finding.worker):
                finding = dataclasses.replace(finding, count=known.count + 1)
                self._findings[index] = dataclasses.replace(known, count=finding.count)
                break
        else:
            if len(self._findings) < MAX_FINDINGS:
                self._findings.append(finding)
        if self._every or finding.count & (finding.count - 1) == 0:
            events.append(FindingEvent(finding=finding))
        if not followed:
            self._tail[MAX_TAIL - 1 :] = [finding]
        for name in down:
            worker = self._worker(name)
            if worker is None:
                continue
            own = finding.worker == name
            worker.died_at = now
            worker.error = (
                headline(finding) if own else f"{finding.type}, or another whose traceback is mixed with it"
            )
            events.append(WorkerDown(name=name, finding=finding if own else None))
        if events and not self._whole_run:
            self._add_up()
        return events

    # --- out --------------------------------------------------------------------------------------------------------

    def summary(self, *, offset: int, lines: int, open_findings: list[OpenFinding], scan: ScanState) -> LogSummary:
        """Everything so far. `scan` brings the scanner's own part of the state."""
        return LogSummary(
            offset=offset, lines=lines,
            phase=self._phase, phase_at=self._phase_at,
            step=self._step, step_at=self._step_at, steps_seen=self._steps_seen,
            loss=self._loss, tok_s=self._tok_s, tok_s_printed=self._tok_s_printed,
            tok_s_median=median(self._recent_tok_s), step_interval_s=median(self._recent_intervals_s),
            workers=[Worker(**dataclasses.asdict(worker)) for worker in self._workers.values()],
            findings=list(self._findings), findings_total=self._findings_total, nonfinite_step=self._nonfinite_step,
            tail=list(self._tail), open_findings=open_findings,
            scan=dataclasses.replace(
                scan, whole_run=self._whole_run, first_step_offset=self.first_step_offset,
                advance_at=self._advance_at, advance_burst=self._advance_burst, tok_s_figures=self._tok_s_figures,
                recent_tok_s=list(self._recent_tok_s), recent_intervals_s=list(self._recent_intervals_s),
                bar=list(self._bar), bar_total=self._bar_total,
            ),
        )  # fmt: skip


def step_event(reading: Reading, offset: int) -> StepEvent:
    assert reading.step is not None
    return StepEvent(
        step=reading.step, worker=reading.worker, loss=reading.loss, tok_s=reading.tok_s, lr=reading.lr,
        grad_norm=reading.grad_norm, offset=offset,
    )  # fmt: skip


def settled(summary: LogSummary) -> LogSummary:
    """`summary` as it will be if nothing more of its open tracebacks comes."""
    if not summary.open_findings:
        return summary
    progress = Progress(summary)
    for one in summary.open_findings:
        progress.find(one.finding, one.down, followed=one.followed, now=one.finding.at)
    return progress.summary(offset=summary.offset, lines=summary.lines, open_findings=[], scan=summary.scan)


def median(values: list[float]) -> float | None:
    if not values:
        return None
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def headline(finding: Finding) -> str:
    """`RuntimeError: boom`: the type and the first line of the message."""
    first = finding.message.partition("\n")[0]
    return f"{finding.type}: {first}" if first else finding.type


def _newer(new: float | None, old: float | None) -> float | None:
    """The newer figure; one that is not finite, or that a sum would make so, leaves none: JSON has no word for it."""
    if new is None:
        return old
    return new if abs(new) < ABSURD else None  # nan is not, either
