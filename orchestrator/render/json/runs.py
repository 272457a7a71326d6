"""launch, status, ls, show, logs and stop as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.model import Finding, to_json
from orchestrator.render.json.base import head, text

if TYPE_CHECKING:  # every command would import every other's verb
    from orchestrator.answers import base, runs
    from orchestrator.plan import Plan
    from orchestrator.resolve import Run
    from orchestrator.verbs import launch, log_errors, logs, ls, show, status, stop


def of_finding(finding: Finding | None) -> Any:
    return None if finding is None else to_json(finding)


def of_plan(plan: Plan) -> runs.Plan:
    spec = plan.spec
    return {
        **head("launch"), "plan": True, "run_id": spec.run_id, "target": plan.target.name, "place": plan.target.place,
        "workdir": plan.target.workdir, "argv": spec.argv, "bundle": plan.bundle.hash,
        "files": sorted(plan.bundle.files), "git_commit": spec.git_commit, "dirty": bool(spec.git_diff),
        "python": plan.python, "requirements": plan.requirements,
        "wheelhouse": [wheel.name for wheel in plan.wheelhouse.wheels] if plan.wheelhouse else None,
        "env": spec.env, "reads": plan.reads,
        "secrets": spec.secrets, "until": plan.until, "wish": None if spec.wish is None else to_json(spec.wish),
    }  # fmt: skip


def of_launch(result: launch.Result) -> runs.Launch:
    verdict, spec = result.verdict, result.plan.spec
    error = of_finding(verdict.error) if verdict else None
    if error is None and not (result.verified or result.queued):
        error = {"type": verdict.state if verdict else "NotVerified", "message": result.why}
    return {
        **head("launch", verdict.observed_at if verdict else None),
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
        "error": of_finding(verdict.error),
        "last_words": None if verdict.last_words is None else to_json(verdict.last_words),
        "log": probe.log.path, "note": probe.note,
        "foreign_logs": [to_json(log) for log in probe.foreign_logs],
        "gpu_claim": None if probe.gpu_claim is None else to_json(probe.gpu_claim),
        "in_line": None if probe.in_line is None else to_json(probe.in_line),
    }  # fmt: skip


def _gpus(rows: list[Any]) -> list[base.Gpu]:
    return list(rows)


def of_status(result: status.Result) -> runs.Status:
    return {
        **head("status"),
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
    start = text({"run_id": found.probe.run_id, "attempt": found.probe.attempt})[:-1]
    log = json.dumps(lines.log)
    return "".join(
        f'{start}, "offset": {one.offset}, "line": {json.dumps(one.line)}, "log": {log}, '
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
        **head("stop", result.verdict.observed_at), "run_id": result.probe.run_id, "target": result.target.name,
        "state": result.verdict.state, "why": result.verdict.why,
        "remaining": [{"pid": one.pid, "name": one.name, "state": one.state} for one in result.remaining],
        "gpu_memory_kept": result.kept,
    }  # fmt: skip


def of_ls(result: ls.Result) -> runs.Ls:
    return {
        **head("ls"),
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
        **head("show", probe.observed_at), "run": of_run(result.run), "rung": result.rung,
        "evidence": [to_json(item) for item in result.evidence], "missing": result.missing, "nonce": probe.nonce,
        "argv": probe.argv, "probe": to_json(probe), **to_json(shown), "gpus": _gpus(shown.gpus),
    }  # fmt: skip
