"""`history`: what a run was made of and how it trained, as far as another one can be compared with it.

Two things are told: the files of its code, each by its hash, and its curves. `texts` then gives the files that differ.
"""

from __future__ import annotations

import glob
import hashlib
import os
from typing import Any

from orchestrator.agent import curves, prepare, put, records, show
from orchestrator.agent.main import Call, Refusal
from orchestrator.model import RunSpec, WorkPaths, is_run_id, to_json

METRICS = ["loss", "tok_s"]


def run(call: Call) -> None:
    """Request: `run_id`."""
    spec, record = asked_for(call)
    bundle = call.paths.bundle(spec.bundle)
    versions = record.get("versions")
    there = os.path.exists(os.path.join(bundle, put.COMPLETE))
    curves_ = curves.read(call.paths.run(spec.run_id).metrics, spec.nonce, METRICS, workers=False)
    call.emit({
        "final": True, "spec": show.described(spec, diff=False), "host": os.uname().nodename,
        "env": {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in spec.env.items()},
        "versions": {str(key): str(one) for key, one in (versions if isinstance(versions, dict) else {}).items()},
        "packages": _packages(call.paths, spec), "series": curves_["series"], "whole": curves_["whole"],
        "files": [to_json(one) for one in put.scan(bundle)] if there else None,
    })  # fmt: skip


def asked_for(call: Call) -> tuple[RunSpec, dict[str, Any]]:
    """The record of the run that a request names. Raises `Refusal` where there is none that can be read."""
    run_id = str(call.request["run_id"])
    known = records.spec(call.paths.run(run_id)) if is_run_id(run_id) else None
    if known is None:
        raise Refusal("notfound", f"no run {run_id} that can be read in {call.paths.runs}", "specctl ls lists the runs")
    return known


def _packages(workdir: WorkPaths, spec: RunSpec) -> dict[str, str] | None:
    """Name -> version of what is installed in the environment that was made for it; None where none was."""
    home = None if spec.env_hash is None else workdir.env(spec.env_hash)
    if home is None or not os.path.exists(os.path.join(home, prepare.COMPLETE)):
        return None
    found = {}
    for path in glob.glob(f"{glob.escape(home)}/lib/python*/site-packages/*.dist-info"):
        name, _, version = os.path.basename(path).removesuffix(".dist-info").rpartition("-")
        found[name.lower().replace("_", "-")] = version
    return found
