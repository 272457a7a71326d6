"""The ladder of evidence: how much of a launch has been seen to be true.

accepted -> session -> process -> log -> gpu -> step; a rung counts only when all below it do. Pure; `health` decides
the state, this says how far up a run is.
"""

from __future__ import annotations

from orchestrator.logscan import settled
from orchestrator.model import RUNGS, Evidence, Probe, Rung, Verdict

BEAT_S = 120.0
"""An older heartbeat is no evidence of a step."""


def rung(probe: Probe, verdict: Verdict) -> tuple[Rung, list[Evidence]]:
    """The highest rung reached without a gap, and the evidence of each rung up to it.

    What is missing for the next one is in the verdict's `why`.
    """
    at = probe.observed_at
    values = [
        ("accepted", f"run directory of {probe.run_id}"),
        ("session", _session(probe)),
        ("process", _process(probe, verdict)),
        ("log", _log(probe)),
        ("gpu", _gpu(probe)),
        ("step", _step(probe, verdict)),
    ]
    reached: Rung = "none"
    evidence = []
    for name, (what, value) in zip(RUNGS[1:], values, strict=True):
        if name == "gpu" and not probe.gpus_declared:
            continue  # nobody asked for one
        if value is None:
            break
        reached = name
        evidence.append(Evidence(what=what, value=value, observed_at=at))
    return reached, evidence


def missing(probe: Probe, verdict: Verdict) -> str:
    """What the next rung wants, and was not seen."""
    reached, _ = rung(probe, verdict)
    following = [name for name in RUNGS[RUNGS.index(reached) + 1 :] if name != "gpu" or probe.gpus_declared]
    step = "no step was printed"
    if verdict.step is not None:
        step = f"{', '.join(verdict.workers_gone)} died" if verdict.workers_gone else "not every worker has stepped"
        if not _figure_is_good(probe):
            step = "tok/s is not a number" if probe.summary.tok_s is None else f"tok/s is {probe.summary.tok_s:g}"
        elif not _is_fresh(probe):
            step = "no step was printed, and its heartbeat is old"
        elif (tail := settled(probe.summary).tail) and not verdict.workers_gone:
            step = f"no step after {tail[-1].type}"
    device = f"none of its processes holds one of the GPUs {probe.gpus_declared} open"
    if probe.gpu_devices:
        device = f"it holds {', '.join(probe.gpu_devices)} open, and its heartbeat names no memory there"
    wants = {
        "session": "no supervisor", "process": "no living process with the run's mark", "log": "no output yet",
        "gpu": device, "step": step,
    }  # fmt: skip
    return wants.get(following[0], "nothing") if following else "nothing is missing"


def _session(probe: Probe) -> str | None:
    if probe.supervisor_alive:
        return f"{probe.run_id}, supervisor alive"
    return f"{probe.run_id}, its supervisor had started the program" if probe.program_seen else None


def _process(probe: Probe, verdict: Verdict) -> str | None:
    candidates = ([probe.program] if probe.program else []) + probe.tree
    process = next((one for one in candidates if one.alive and one.marked), None)
    if process is not None:
        return f"pid {process.pid} ({process.name}), alive, its environment carries the run's mark"
    own = probe.program
    if own is not None and own.alive:
        # Known by pid and start time: `env -i` empties an environment, and a program may write its title over it.
        return f"pid {own.pid} ({own.name}), alive, the process that was started; its environment shows no mark"
    heir = next((one for one in probe.tree if one.alive), None) if probe.supervisor_alive else None
    if heir is not None:
        return f"pid {heir.pid} ({heir.name}), alive, descends from what was started; its environment shows no mark"
    if verdict.state == "SUCCEEDED" and probe.summary.steps_seen:
        return f"ran to its end, exit code 0, after step {probe.summary.step}"
    return None


def output_seen(probe: Probe) -> str | None:
    """What shows that the program itself has written something, or None."""
    log = probe.log
    beyond = log.size - log.header_bytes
    if (beyond > 0) if log.header_bytes else probe.summary.lines > 1:
        return f"{log.size:,} bytes"
    for other in probe.foreign_logs:
        if other.own_bytes:
            kept = f" after the {other.before:,} that were there before" if other.before and not other.truncated else ""
            return f"{other.path}, {other.own_bytes:,} bytes{kept}"
    return None


def _log(probe: Probe) -> str | None:
    output = output_seen(probe)
    return f"header and nonce agree, {output}" if probe.log.verified and output else None


def _gpu(probe: Probe) -> str | None:
    if not probe.gpu_devices:
        return None
    memory = sum(probe.heartbeat.gpu_memory_bytes.values()) if probe.heartbeat else 0
    if probe.heartbeat and not memory:
        return None  # it keeps a heartbeat, which names no memory yet: an open device alone is no work on it
    said = f", {memory / 2**30:.1f} GiB by its heartbeat" if memory else ""
    return f"holds {', '.join(probe.gpu_devices)}{said}"


def _step(probe: Probe, verdict: Verdict) -> str | None:
    """Every known worker has stepped, none is gone, no exception was printed since, and tok/s, if printed, is > 0."""
    if verdict.step is None or verdict.workers_gone or verdict.error is not None or not probe.log.verified:
        return None
    if settled(probe.summary).tail:
        return None  # a rank that died: its launcher takes seconds to notice, and the others may hang until then
    if not _figure_is_good(probe) or not _is_fresh(probe):
        return None
    named = any(worker.step is not None for worker in probe.summary.workers)
    for worker in probe.summary.workers if named else ():
        # A target thread feeds the drafters and takes no optimizer step itself; its own figure shows that it works.
        if worker.seen and worker.step is None and not worker.tok_s and not worker.name.startswith("target"):
            return None
    tok_s = f", {verdict.tok_s:,.{0 if verdict.tok_s >= 10 else 2}f} tok/s" if verdict.tok_s is not None else ""
    workers = f", {verdict.workers_alive} of {verdict.workers_total} workers" if verdict.workers_total else ""
    by = " by its heartbeat" if probe.summary.step is None else ""
    return f"step {verdict.step}{by}{tok_s}{workers}"


def _figure_is_good(probe: Probe) -> bool:
    summary = probe.summary
    return summary.tok_s > 0 if summary.tok_s is not None else not summary.tok_s_printed


def _is_fresh(probe: Probe) -> bool:
    """Whether the step is known from the log, or from a heartbeat that was not long before the look, or the end."""
    if probe.summary.step is not None or probe.heartbeat is None:
        return True
    return abs((probe.exit.at if probe.exit else probe.observed_at) - probe.heartbeat.at) <= BEAT_S

