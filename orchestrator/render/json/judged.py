"""compare, errors, diff, plot and report as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.model import to_json
from orchestrator.render.json.base import head

if TYPE_CHECKING:
    from orchestrator.answers import judged
    from orchestrator.codediff import FileChange
    from orchestrator.series import Sums
    from orchestrator.verbs import compare, diff, errors, plot, report


def of_compare(result: compare.Result) -> judged.Compare:
    answer = result.answer

    def side(one: compare.One) -> judged.Compared:
        return {**to_json(one.side), "target": one.seen.target.name, "observed_at": one.seen.verdict.observed_at,
                "bundle": one.history.spec.bundle, "git_commit": one.history.spec.git_commit}  # fmt: skip

    return {
        **head("compare", result.b.seen.verdict.observed_at), "answer": answer.kind, "sentence": answer.sentence,
        "failures": [to_json(one) for one in answer.told], "a": side(result.a), "b": side(result.b),
        "files": [_of_file(one) for one in result.files],
        "files_unknown": result.files_unknown, "config_diff": result.config_diff,
        "changes": [to_json(one) for one in result.changes],
        "training": {
            metric: [{"first": one.first, "last": one.last, "a": _mean(one.a), "b": _mean(one.b)} for one in found]
            for metric, found in result.training.items()
        },
    }  # fmt: skip


def of_plot(result: plot.Result) -> judged.Plot:
    return {
        **head("plot"), "metrics": result.metrics, "by": result.by,
        "runs": [
            {"run_id": one.run_id, "target": one.target, "state": one.verdict.state,
             "observed_at": one.verdict.observed_at, "figures": one.there, "whole": one.whole}
            for one in result.runs
        ],
        "lines": {
            metric: [{**to_json(line), "label": line.label} for line in result.lines(metric)]
            for metric in result.metrics
        },
    }  # fmt: skip


def of_report(result: report.Result, path: str, written_bytes: int) -> judged.Report:
    return {
        **head("report"), "path": path, "bytes": written_bytes,
        "runs": [
            {"run_id": page.run.run_id, "target": page.run.target.name, "state": page.run.verdict.state,
             "observed_at": page.run.verdict.observed_at, "not_seen": [str(error) for error in page.unknown]}
            for page in result.pages
        ],
        "unreachable": [{"run": query, "why": str(error), "hint": error.hint} for query, error in result.unseen],
    }  # fmt: skip


def of_diff(result: diff.Result) -> judged.Diff:
    return {
        **head("diff", result.run.verdict.observed_at), "run_id": result.run.run_id, "target": result.run.target.name,
        "bundle": result.history.spec.bundle, "git_commit": result.history.spec.git_commit,
        "source": str(result.source), "same": not result.files, "files": [_of_file(one) for one in result.files],
    }  # fmt: skip


def of_errors(result: errors.Result) -> judged.Errors:
    return {
        **head("errors"), "runs": result.runs, "unreachable": [view.target.name for view in result.silent],
        "not_searched": [{"run_id": run.run_id, "why": str(error)} for run, error in result.refused],
        "errors": [
            {
                "fingerprint": kind.fingerprint, "type": kind.type, "message": kind.message, "count": kind.count,
                "hint": kind.hint, "traceback": kind.traceback, "first_at": kind.first_at, "last_at": kind.last_at,
                "runs": [
                    {"run_id": one.result.probe.run_id, "target": one.result.target.name,
                     "state": one.result.verdict.state, "ended": one.judged.ended, "why": one.judged.why,
                     "count": one.judged.group.count, "workers": one.judged.group.workers,
                     "first_at": one.first_at, "last_at": one.last_at}
                    for one in kind.seen
                ],
            }
            for kind in result.kinds
        ],
        "without_exception": [
            {
                "how": alike.ending.text,
                "last_words": None if alike.ending.words is None else to_json(alike.ending.words),
                "runs": [
                    {"run_id": one.run.run_id, "target": one.run.target.name, "state": one.run.verdict.state,
                     "why": one.run.verdict.why, "at": one.at}
                    for one in alike.failed
                ],
            }
            for alike in result.alike
        ],
    }  # fmt: skip


def _of_file(one: FileChange) -> judged.File:
    added, removed = one.counts
    return {**to_json(one), "added": added, "removed": removed}


def _mean(sums: Sums) -> judged.Mean:
    return {"count": sums.count, "mean": sums.mean, "spread": sums.spread}
