"""targets, doctor, push, pull and prune as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.model import to_json
from orchestrator.render.json.base import head

if TYPE_CHECKING:
    from orchestrator.answers import base, moved
    from orchestrator.inventory import Inventory
    from orchestrator.verbs import doctor, prune, pull, push, targets


def of_push(result: push.Result) -> moved.Push:
    return {
        **head("push"), "target": result.target.name, "source": result.source, "destination": result.destination,
        "files": result.files, "same": result.same, "total_files": result.total_files,
        "total_bytes": result.total_bytes, "sent_bytes": result.sent_bytes, "resumed_bytes": result.resumed_bytes,
        "took_s": result.took_s, "sha256": result.sha256,
        "failed": _paths(result.failed), "left_out": _paths(result.left_out), "verified": not result.failed,
    }  # fmt: skip


def of_pull(result: pull.Result) -> moved.Pull:
    return {
        **head("pull"), "run_id": result.run_id, "target": result.target.name, "state": result.state,
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
        **head("prune"), "removed": removed,
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
        **head("targets"), "inventory": inventory.source, "default_target": inventory.default_target,
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
        **head("doctor"), "quick": result.quick, "exit_code": result.exit_code,
        "targets": [
            {
                "name": view.target.name, "place": view.target.place, "reached": view.reached,
                "fails": view.count("fail"), "warnings": view.count("warn"), "took_s": view.took_s,
                "checks": [{"check": name, **to_json(outcome)} for name, outcome in view.found],
            }
            for view in result.views
        ],
    }  # fmt: skip
