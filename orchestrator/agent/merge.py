"""One summary of a run that writes several logs: `train.log` beside a log of each rank beside metrics as JSON lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.model import FollowedLog, LogSummary, Worker

FRESH_S = 10.0
"""A log that stepped no longer before the newest one is of the same moment."""


def merge(logs: Iterable[FollowedLog]) -> LogSummary:
    """Steps from the run's own log, else from the one that stepped last, of those that speak of the whole run if there
    are any; a tok/s or a loss that it lacks from another. Logs of single workers add up. Findings are those of all."""
    logs = list(logs)
    summaries = [log.summary for log in logs]
    if not summaries:
        return LogSummary()
    if len(summaries) == 1:
        return summaries[0]
    newest = max(summaries, key=lambda summary: (summary.step_at or 0.0, summary.phase_at or 0.0))
    step_at = newest.step_at or 0.0
    fresh = [
        log for log in logs if log.summary.step is not None and step_at - (log.summary.step_at or 0.0) <= FRESH_S
    ]  # fmt: skip
    workers = _workers(summaries)
    best = _whole(fresh) or _of_workers(newest, workers)
    phased = max(summaries, key=lambda summary: summary.phase_at or 0.0)

    def all_of(name: str) -> list[Any]:
        return [item for summary in summaries for item in getattr(summary, name)]

    findings = sorted(all_of("findings"), key=lambda found: found.at)
    # A step in one log follows what another one said before it.
    tail = [found for found in all_of("tail") if found.at >= step_at or found in newest.tail]
    return dataclasses.replace(
        best, phase=phased.phase, phase_at=phased.phase_at, workers=workers,
        findings=findings[:8], tail=sorted(tail, key=lambda found: found.at), open_findings=all_of("open_findings"),
        findings_total=sum(summary.findings_total for summary in summaries),
        nonfinite_step=min((one.nonfinite_step for one in summaries if one.nonfinite_step is not None), default=None),
    )  # fmt: skip


def _workers(summaries: Sequence[LogSummary]) -> list[Worker]:
    """Each worker as the log says that heard of it last."""
    found: dict[str, Worker] = {}
    for worker in (worker for summary in summaries for worker in summary.workers):
        known = found.get(worker.name)
        if known is None or _heard(worker) > _heard(known):
            found[worker.name] = worker
    return list(found.values())


def _heard(worker: Worker) -> float:
    return max(worker.step_at or 0.0, worker.died_at or 0.0)


def _whole(fresh: Sequence[FollowedLog]) -> LogSummary | None:
    """The run's own log, or the newest that speaks of the whole run, with the tok/s and the loss of the next if it has
    none."""
    newest_first = sorted(fresh, key=lambda log: (log.foreign is None, log.summary.step_at or 0.0), reverse=True)
    whole = [log.summary for log in newest_first if log.foreign is None or log.summary.scan.whole_run]
    if not whole:
        return None
    best = whole[0]
    rated = next((one for one in whole if one.tok_s is not None), best)
    return dataclasses.replace(
        best, loss=next((one.loss for one in whole if one.loss is not None), None), tok_s=rated.tok_s,
        tok_s_median=rated.tok_s_median, tok_s_printed=any(one.tok_s_printed for one in whole),
        scan=dataclasses.replace(best.scan, recent_tok_s=rated.scan.recent_tok_s),
    )  # fmt: skip


def _of_workers(newest: LogSummary, workers: Sequence[Worker]) -> LogSummary:
    """`newest`, with what all workers add up to if they are spread over several logs."""
    living = [one for one in workers if one.died_at is None and one.step is not None]
    if {one.name for one in living} <= {one.name for one in newest.workers}:
        return newest
    rates = [one.tok_s for one in living if one.tok_s is not None]
    losses = [one.loss for one in living if one.loss is not None]
    return dataclasses.replace(
        newest, step=min(one.step for one in living if one.step is not None),
        tok_s=sum(rates) if rates else None, loss=sum(losses) / len(losses) if losses else None,
    )  # fmt: skip
