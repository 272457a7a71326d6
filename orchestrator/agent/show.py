"""`show`: all that a run directory and /proc tell of one run, beside what a probe sees; judges nothing."""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import Any

from orchestrator.agent import events, files, gpu, probe, records
from orchestrator.agent.main import Call, Refusal
from orchestrator.model import Misfit, RunPaths, RunSpec, from_json, is_run_id, to_json

TAIL_BYTES = 256 << 10
"""How much of events.jsonl is read from its end."""
FIELD_CHARS = 200
MARKER = "COMPLETE.json"
STEP = re.compile(r"step-([0-9]{1,15})")


def run(call: Call) -> None:
    """Request: `run_id`, `events` (how many of the newest), `diff` (whether the recorded diff is wanted, too)."""
    run_id = str(call.request["run_id"])
    found = probe.probe(call, [run_id], time.time()) if is_run_id(run_id) else []
    if not found:
        raise Refusal("notfound", f"no run {run_id} in {call.paths.runs}", "specctl ls lists the runs there are")
    one, paths = found[0], call.paths.run(run_id)
    known = records.spec(paths)
    spec, record = known if known is not None else (None, {})
    supervisor, stopper, stop = records.supervisor(paths), records.stopper(paths), records.stop_request(paths)
    newest, more = _events(paths, one.nonce, int(call.request.get("events") or 0))
    rows, why = gpu.rows() if one.gpus_declared or one.gpu_devices else ([], None)
    call.emit({
        "final": True, "probe": to_json(one), "host": os.uname().nodename, "root": paths.root,
        "spec": None if spec is None else described(spec, diff=bool(call.request.get("diff"))),
        "record": {key: record.get(key) for key in ("cwd", "created_at", "workdir", "host", "versions")},
        "supervisor": None if supervisor is None else to_json(supervisor),
        "stop": None if stop is None else to_json(stop), "stopper": None if stopper is None else to_json(stopper),
        "since": {str(process.pid): _started_at(process.start_ticks) for process in one.tree},
        "checkpoints": _checkpoints(paths), "events": newest, "events_before": more,
        "gpus": rows, "gpus_error": why,
    })  # fmt: skip


def described(spec: RunSpec, *, diff: bool) -> dict[str, Any]:
    """What was asked, with hash and size of the long texts; the diff itself only when it is wanted. Values of the
    environment stay where they are: their names say what was set."""
    config = None if spec.config_text is None else spec.config_text.encode("utf-8", "surrogatepass")
    return {
        "bundle": spec.bundle, "trainer": spec.trainer, "env": sorted(spec.env), "secrets": spec.secrets,
        "config_path": spec.config_path, "config_text": spec.config_text,
        "config_sha256": None if config is None else hashlib.sha256(config).hexdigest(),
        "git_commit": spec.git_commit, "diff_bytes": len((spec.git_diff or "").encode("utf-8", "surrogatepass")),
        "diff": spec.git_diff if diff else None, "env_hash": spec.env_hash, "gpus": spec.gpus,
        "patterns": spec.patterns, "specctl_version": spec.specctl_version,
    }  # fmt: skip


def _started_at(ticks: int) -> float:
    """When a process started, by the wall clock: its ticks count from the boot of the kernel, not of the container."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _events(paths: RunPaths, nonce: str, wanted: int) -> tuple[list[dict[str, Any]], bool]:
    """(the newest events of this attempt, whether there are older ones). Long fields are cut: a traceback is in its
    finding."""
    try:
        with os.fdopen(files.open_regular(paths.events), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return [], False
    whole = size <= TAIL_BYTES
    read = (
        events.read(line, nonce, chars=FIELD_CHARS, without=LONG, unsigned=True) for line in lines[0 if whole else 1 :]
    )
    found = [one for one in read if one is not None]
    return found[len(found) - wanted :] if wanted < len(found) else found, not whole or len(found) > wanted


LONG = frozenset({"traceback", "fingerprint", "argv"})


def _checkpoints(paths: RunPaths) -> list[dict[str, Any]]:
    """Every `checkpoints/step-N`, by number: its size, and what is missing for a whole one."""
    found = []
    try:
        entries = list(os.scandir(f"{paths.root}/checkpoints"))
    except OSError:
        return []
    for entry in entries:
        match = STEP.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            try:
                sizes = {
                    one.name: one.stat(follow_symlinks=False).st_size
                    for one in os.scandir(entry.path)
                    if one.is_file(follow_symlinks=False)
                }  # fmt: skip
                at = entry.stat(follow_symlinks=False).st_mtime
            except OSError:
                continue  # it is being removed
            found.append({
                "step": int(match[1]), "path": entry.path, "bytes": sum(sizes.values()), "at": at,
                "damage": _damage(entry.path, sizes),
            })  # fmt: skip
    return sorted(found, key=lambda one: int(one["step"]))


def _damage(path: str, sizes: dict[str, int]) -> str | None:
    """Why it is no whole checkpoint, by its marker and the sizes in it; hashes take too long for a look."""
    marker = files.read_json(f"{path}/{MARKER}", limit_bytes=records.RECORD_BYTES)
    if marker is None:
        return f"no {MARKER}"
    try:
        meant = from_json(dict[str, dict[str, Any]], marker.get("files"))
    except Misfit:
        return f"{MARKER} cannot be read"
    for name, item in meant.items():
        if sizes.get(name) != item.get("bytes"):
            return f"{name} is missing" if name not in sizes else f"{name} has {sizes[name]:,} bytes"
    return None
