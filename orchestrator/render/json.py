"""`--json`: what other programs build on. One object, `schema_version` first; times are Unix seconds.

What each holds is typed in `orchestrator/answers`, of which `specctl schema VERB` is made: a key that is not there is
an error here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.commands import ANSWERS
from orchestrator.errors import SpecctlError
from orchestrator.model import Finding, to_json

if TYPE_CHECKING:  # every command would import every other's verb
    from orchestrator.answers import base, judged, moved, runs
    from orchestrator.codediff import FileChange
    from orchestrator.inventory import Inventory
    from orchestrator.plan import Plan
    from orchestrator.resolve import Run
    from orchestrator.series import Sums
    from orchestrator.verbs import (
        compare,
        diff,
        doctor,
        errors,
        launch,
        log_errors,
        logs,
        ls,
        plot,
        prune,
        pull,
        push,
        report,
        show,
        status,
        stop,
        targets,
    )


def text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def _head(verb: str, observed_at: float | None = None) -> base.Head:
    return {"schema_version": ANSWERS[verb], "observed_at": observed_at or time.time()}


def of_error(error: SpecctlError) -> base.Error:
    return {
        "schema_version": 1, "observed_at": time.time(),
        "error": {"message": error.message, "hint": error.hint, "kind": type(error).__name__},
        "target": error.target, "run_id": error.run_id, "exit_code": error.exit_code,
    }  # fmt: skip


def of_finding(finding: Finding | None) -> Any:
    return None if finding is None else to_json(finding)


def of_plan(plan: Plan) -> runs.Plan:
    spec = plan.spec
    return {
        **_head("launch"), "plan": True, "run_id": spec.run_id, "target": plan.target.name, "place": plan.target.place,
        "workdir": plan.target.workdir, "argv": spec.argv, "bundle": plan.bundle.hash,
        "files": sorted(plan.bundle.files), "git_commit": spec.git_commit, "dirty": bool(spec.git_diff),
        "python": plan.python, "requirements": plan.requirements,
        "wheelhouse": [wheel.name for wheel in plan.wheelhouse.wheels] if plan.wheelhouse else None,
        "env": spec.env, "reads": {**plan.inputs.get("model", {}), **plan.inputs.get("files", {})},
        "secrets": spec.secrets, "until": plan.until, "wish": None if spec.wish is None else to_json(spec.wish),
    }  # fmt: skip


def of_launch(result: launch.Result) -> runs.Launch:
    verdict, spec = result.verdict, result.plan.spec
    error = of_finding(verdict.error) if verdict else None
    if error is None and not (result.verified or result.queued):
        error = {"type": verdict.state if verdict else "NotVerified", "message": result.why}
    return {
        **_head("launch", verdict.observed_at if verdict else None),
        "run_id": spec.run_id, "target": result.plan.target.name,
        "state": verdict.state if verdict else None, "verified": result.verified, "queued": result.queued,
        "rung": result.rung,
        "evidence": [to_json(item) for item in result.evidence], "session": spec.run_id, "log": result.log,
        "tok_s": verdict.tok_s if verdict else None, "error": error,
        "foreign_logs": [to_json(log) for log in result.probe.foreign_logs] if result.probe else [],
        "findings": [to_json(item) for item in result.probe.summary.findings] if result.probe else [],
        "tail": result.tail,
    }  # fmt: skip


def of_run(run: Run) -> runs.RunRow:
    verdict, probe = run.verdict, run.probe
    gone = set(verdict.workers_gone)
    age_s = None if verdict.last_progress_at is None else max(0.0, verdict.observed_at - verdict.last_progress_at)
    alive: Literal["ALIVE", "ENDED"] = "ALIVE" if verdict.live else "ENDED"
    return {
        "run_id": run.run_id, "target": run.target.name, "attempt": probe.attempt, "owner": probe.owner,
        "state": verdict.state, "why": verdict.why, "step": verdict.step, "tok_s": verdict.tok_s,
        "loss": verdict.loss, "last_progress_age_s": age_s, "observed_at": verdict.observed_at,
        "workers": [
            {"name": worker.name, "state": "GONE" if worker.name in gone else alive, "step": worker.step}
            for worker in verdict.workers
        ],
        "error": of_finding(verdict.error), "log": probe.log.path, "note": probe.note,
        "foreign_logs": [to_json(log) for log in probe.foreign_logs],
        "gpu_claim": None if probe.gpu_claim is None else to_json(probe.gpu_claim),
        "in_line": None if probe.in_line is None else to_json(probe.in_line),
    }  # fmt: skip


def _gpus(rows: list[Any]) -> list[base.Gpu]:
    return list(rows)


def of_status(result: status.Result) -> runs.Status:
    return {
        **_head("status"),
        "runs": [of_run(run) for run in result.runs],
        "targets": [
            {
                "name": view.target.name, "reachable": view.error is None, "no_workdir": view.no_workdir,
                "state": "UNREACHABLE" if view.error else None,
                "error": str(view.error) if view.error else None, "hint": view.error.hint if view.error else None,
                "observed_at": view.now, "gpus": _gpus(view.gpus), "gpus_error": view.gpus_error,
            }
            for view in result.views
        ],
    }  # fmt: skip


def of_lines(found: logs.Logs, lines: logs.Lines) -> str:
    """One object a line, and a line break. There may be millions: what is the same in all of them is written once."""
    head = text({"run_id": found.probe.run_id, "attempt": found.probe.attempt})[:-1]
    log = json.dumps(lines.log)
    return "".join(
        f'{head}, "offset": {one.offset}, "line": {json.dumps(one.line)}, "log": {log}, '
        f'"match": {"true" if one.match else "false"}}}\n'
        for one in lines.each()
    )


def of_error_group(result: log_errors.Result, one: log_errors.Judged) -> runs.ErrorGroup:
    return {
        "run_id": result.probe.run_id, "attempt": result.probe.attempt, "ended": one.ended, "why": one.why,
        **to_json(one.group),
    }  # fmt: skip


def of_stop(result: stop.Result) -> runs.Stop:
    return {
        **_head("stop", result.verdict.observed_at), "run_id": result.probe.run_id, "target": result.target.name,
        "state": result.verdict.state, "why": result.verdict.why,
        "remaining": [{"pid": one.pid, "name": one.name, "state": one.state} for one in result.remaining],
        "gpu_memory_kept": result.kept,
    }  # fmt: skip


def of_ls(result: ls.Result) -> runs.Ls:
    return {
        **_head("ls"),
        "runs": [
            {
                "run_id": row.run_id, "target": row.target, "state": row.state, "why": row.why,
                "started_at": row.started_at or None, "took_s": row.took_s, "owner": row.owner,
                "seen": None if row.seen is None else of_run(row.seen),
            }
            for row in result.rows
        ],
        "left_out": result.left_out,
        "unreachable": [
            {"name": view.target.name, "error": str(view.error), "hint": view.error.hint if view.error else None}
            for view in result.silent
        ],
    }  # fmt: skip


def of_show(result: show.Result) -> runs.Show:
    probe, shown = result.run.probe, result.shown
    return {
        **_head("show", probe.observed_at), "run": of_run(result.run), "rung": result.rung,
        "evidence": [to_json(item) for item in result.evidence], "missing": result.missing, "nonce": probe.nonce,
        "argv": probe.argv, "probe": to_json(probe), **to_json(shown), "gpus": _gpus(shown.gpus),
    }  # fmt: skip


def of_compare(result: compare.Result) -> judged.Compare:
    answer = result.answer

    def side(one: compare.One) -> judged.Compared:
        return {**to_json(one.side), "target": one.seen.target.name, "observed_at": one.seen.verdict.observed_at,
                "bundle": one.history.spec.bundle, "git_commit": one.history.spec.git_commit}  # fmt: skip

    return {
        **_head("compare", result.b.seen.verdict.observed_at), "answer": answer.kind, "sentence": answer.sentence,
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
        **_head("plot"), "metrics": result.metrics, "by": result.by,
        "runs": [
            {"run_id": one.run_id, "target": one.target, "state": one.verdict.state,
             "observed_at": one.verdict.observed_at, "figures": one.there, "whole": one.whole}
            for one in result.runs
        ],
        "lines": {metric: [to_json(line) for line in result.lines(metric)] for metric in result.metrics},
    }  # fmt: skip


def of_report(result: report.Result, path: str, written_bytes: int) -> judged.Report:
    return {
        **_head("report"), "path": path, "bytes": written_bytes,
        "runs": [
            {"run_id": page.run.run_id, "target": page.run.target.name, "state": page.run.verdict.state,
             "observed_at": page.run.verdict.observed_at, "not_seen": [str(error) for error in page.unknown]}
            for page in result.pages
        ],
        "unreachable": [{"run": query, "why": str(error), "hint": error.hint} for query, error in result.unseen],
    }  # fmt: skip


def of_diff(result: diff.Result) -> judged.Diff:
    return {
        **_head("diff", result.run.verdict.observed_at), "run_id": result.run.run_id, "target": result.run.target.name,
        "bundle": result.history.spec.bundle, "git_commit": result.history.spec.git_commit,
        "source": str(result.source), "same": not result.files, "files": [_of_file(one) for one in result.files],
    }  # fmt: skip


def of_errors(result: errors.Result) -> judged.Errors:
    return {
        **_head("errors"), "runs": result.runs, "unreachable": [view.target.name for view in result.silent],
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
    }  # fmt: skip


def _of_file(one: FileChange) -> judged.File:
    added, removed = one.counts
    return {**to_json(one), "added": added, "removed": removed}


def _mean(sums: Sums) -> judged.Mean:
    return {"count": sums.count, "mean": sums.mean, "spread": sums.spread}


def of_push(result: push.Result) -> moved.Push:
    return {
        **_head("push"), "target": result.target.name, "source": result.source, "destination": result.destination,
        "files": result.files, "same": result.same, "total_files": result.total_files,
        "total_bytes": result.total_bytes, "sent_bytes": result.sent_bytes, "resumed_bytes": result.resumed_bytes,
        "took_s": result.took_s, "sha256": result.sha256,
        "failed": _paths(result.failed), "left_out": _paths(result.left_out), "verified": not result.failed,
    }  # fmt: skip


def of_pull(result: pull.Result) -> moved.Pull:
    return {
        **_head("pull"), "run_id": result.run_id, "target": result.target.name, "state": result.state,
        "source": result.source, "destination": result.destination, "items": [to_json(item) for item in result.items],
        "checkpoint": result.checkpoint, "export": to_json(result.export) if result.export else None,
        "files": result.files, "same": result.same, "total_files": result.total_files,
        "total_bytes": result.total_bytes, "pulled_bytes": result.got_bytes, "resumed_bytes": result.resumed_bytes,
        "took_s": result.took_s, "sha256": result.sha256, "failed": _paths(result.failed),
        "left_out": _paths(result.left_out), "verified": not result.failed,
    }  # fmt: skip


def _paths(found: list[tuple[str, str]]) -> list[base.PathWhy]:
    return [{"path": path, "why": why} for path, why in found]


def of_prune(places: Sequence[prune.Place], *, removed: bool) -> moved.Prune:
    return {
        **_head("prune"), "removed": removed,
        "targets": [
            {
                "name": place.target.name, "reachable": place.error is None,
                "error": str(place.error) if place.error else None, "same_as": place.same_as, "live": place.live,
                "items": [to_json(item) for item in place.items], "notes": place.notes,
                "gone": [item.key for item in place.gone], "freed_bytes": sum(item.bytes for item in place.gone),
                "failed": [{"key": item.key, "why": why} for item, why in place.failed],
            }
            for place in places
        ],
    }  # fmt: skip


def of_targets(result: targets.Result, inventory: Inventory) -> moved.Targets:
    return {
        **_head("targets"), "inventory": inventory.source, "default_target": inventory.default_target,
        "groups": inventory.groups, "asked": result.asked,
        "targets": [_target(view, asked=result.asked) for view in result.views],
    }  # fmt: skip


def _target(view: targets.View, *, asked: bool) -> moved.Declared | moved.Surveyed:
    target, error = view.target, view.error
    declared: moved.Declared = {
        "name": target.name, "ssh": target.ssh, "vmid": target.vmid, "place": target.place, "user": target.user,
        "workdir": target.workdir, "python": target.python, "gpus": target.gpus, "claims_dir": target.claims_dir,
    }  # fmt: skip
    if not asked:
        return declared
    return {
        **declared, "reachable": view.reachable, "ready": view.ready, "clock_offset_s": view.clock_offset_s,
        "asked_s": view.asked_s, "found": None if view.survey is None else to_json(view.survey),
        "error": None if error is None else {"message": error.message, "hint": error.hint},
        "problems": [to_json(problem) for problem in view.problems],
    }  # fmt: skip


def of_doctor(result: doctor.Result) -> moved.Doctor:
    return {
        **_head("doctor"), "quick": result.quick, "exit_code": result.exit_code,
        "targets": [
            {
                "name": view.target.name, "place": view.target.place, "reached": view.reached,
                "fails": view.count("fail"), "warnings": view.count("warn"), "took_s": view.took_s,
                "checks": [{"check": name, **to_json(outcome)} for name, outcome in view.found],
            }
            for view in result.views
        ],
    }  # fmt: skip
