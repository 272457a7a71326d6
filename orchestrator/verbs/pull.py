"""`pull`: files of a run from its target to this machine, resumable, and verified by hash on both sides.

Without a path: the newest whole checkpoint, the configuration, the records, the metrics and every attempt's log. The
run may live on: a log comes as long as it was when it was listed, and the next pull brings what has been added.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.agent import space
from orchestrator.agent.parcel import SYNCED, Busy, Claim, Incoming, NoRoom
from orchestrator.agent.tree import Entry, at, decoded, encoded, entry, part_of, room, shown
from orchestrator.errors import AgentError, ConfigError, NotFound, PreflightError, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.remote import Agent
from orchestrator.resolve import resolve
from orchestrator.verbs.push import AGAIN, IDLE_S, Watcher, listing, refuse, resumable


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One of the things that are pulled: a file, or a folder with all that is in it."""

    path: str
    files: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A drafter in the form that servers load, as its contract has it; None what that does not say."""

    format: str | None
    dtype: str | None
    step: int | None
    weights: str | None
    blocks: int | None
    """That its gate looked at; None if nobody has."""
    kept: list[int] | None
    """Of those blocks, how many kept slot 1, 2, ..."""
    newest: int | None
    """The run's newest whole checkpoint."""

    @classmethod
    def of(cls, contract: dict[str, Any], newest: Any) -> Export:
        """The file is a program's: what is of another type than it should be is not believed."""

        def at(part: Any, key: str, kind: type) -> Any:
            value = part.get(key) if isinstance(part, dict) else None
            return value if type(value) is kind else None

        origin, gate = contract.get("origin"), contract.get("gate")
        kept = at(gate, "kept_by_trainer", list)
        return cls(
            format=at(contract, "format", str), dtype=at(contract, "dtype", str), step=at(origin, "step", int),
            weights=at(origin, "weights", str), blocks=at(gate, "blocks", int),
            kept=kept if kept is not None and all(type(count) is int for count in kept) else None,
            newest=newest if type(newest) is int else None,
        )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Result:
    """What was done. `failed` and `left_out` are (path, why)."""

    target: Target
    run_id: str
    state: str
    source: str
    destination: str
    items: list[Item] = field(default_factory=list)
    checkpoint: int | None = None
    """The step of the checkpoint that was chosen; None when a path was named, or there is none."""
    checkpoints: int = 0
    broken: list[int] = field(default_factory=list)
    """Steps of checkpoints that are not whole."""
    chosen: bool = False
    """No path was named."""
    export: Export | None = None
    """What was asked for, and what its contract says; None if it was not."""
    own_logs: list[str] = field(default_factory=list)
    """Logs that the program writes by itself, wherever: they are pulled by their path."""
    files: int = 0
    same: int = 0
    got_bytes: int = 0
    resumed_bytes: int = 0
    total_files: int = 0
    total_bytes: int = 0
    took_s: float = 0.0
    failed: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    sha256: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run(
    fleet: Fleet, query: str | None, path: str | None, to: Path, watcher: Watcher, show: Callable[[Result], None], *,
    export: bool = False,
) -> Result:  # fmt: skip
    """`show` is told what is about to be pulled. `export`: no path, but what a trainer has exported of the run. Raises
    as `resolve` does, and when nothing could be brought."""
    began = time.monotonic()
    found = resolve(fleet, query)
    for note in found.notes:
        watcher.note(note)
    target, run_id = found.run.target, found.run.run_id
    agent = fleet.agent(target)
    entries, final = _list(agent, run_id, path, export=export)
    result = Result(
        target=target, run_id=run_id, state=found.run.verdict.state, source=str(final["root"]), destination="",
        chosen=path is None and not export, checkpoint=final.get("checkpoint"), checkpoints=final.get("checkpoints", 0),
        broken=list(final.get("broken", [])), failed=[(str(one), str(why)) for one, why in final["unreadable"]],
        left_out=[(str(one), str(why)) for one, why in final["left_out"]], notes=found.notes,
        total_files=sum(one.kind == "file" for one in entries), total_bytes=sum(one.size for one in entries),
        export=Export.of(dict(final["export"]), final.get("newest")) if export else None,
        items=_items(entries, chosen=path is None), own_logs=[log.path for log in found.run.probe.foreign_logs],
    )  # fmt: skip
    if not entries:
        why = "; ".join(f"{shown(one)}: {said}" for one, said in result.failed + result.left_out) or "it has vanished"
        raise PreflightError(f"{shown(result.source)} cannot be pulled: {why}", target=target.name, run_id=run_id)
    root = _local_root(to, run_id if path is None else result.source.rpartition("/")[2] or run_id)
    result.destination = decoded(root)
    incoming = Incoming(root, entries, tick=lambda count: None)
    refuse(incoming.conflicts() or (_changed_here(root, entries) if path or export else []), result.destination, None)
    show(result)
    watcher.begin("comparing", result.total_files, result.total_bytes)
    claims = _claims(incoming, entries, watcher)
    have = sum(claim.have for claim in claims.values())
    _refuse_full(root, result.total_bytes - have)
    watcher.begin("pulling", result.total_files, max(0, result.total_bytes - have))
    try:
        _bring(agent, run_id, result.source, entries, claims, incoming, watcher)
    except UnreachableError as error:
        raise resumable(error) from error
    except Busy as busy:
        raise PreflightError(f"another transfer writes {shown(decoded(busy.path))} right now", hint=AGAIN) from busy
    except NoRoom as error:
        raise PreflightError(
            f"{shown(error.filename)} cannot be written: {error.strerror} "
            f"({space.problem(error.filename, error)}); {incoming.files:,} files are here",
            hint=f"make room, or choose another disk with --to; {AGAIN}",
        ) from error
    except OSError as error:
        raise PreflightError(f"{error.filename or to}: {error.strerror}", hint="choose another folder: --to") from error
    finally:
        incoming.close()
    result.files, result.same = incoming.files, incoming.same
    result.got_bytes, result.resumed_bytes = incoming.written, incoming.resumed
    result.failed += incoming.failed
    result.sha256 = incoming.hashes
    result.took_s = time.monotonic() - began
    return result


def _list(agent: Agent, run_id: str, path: str | None, *, export: bool) -> tuple[list[Entry], dict[str, Any]]:
    entries: list[Entry] = []
    final: dict[str, Any] = {}
    wanted = None if path is None else decoded(os.fsencode(path))
    with agent.stream(
        "send", deadline_s=None, idle_s=IDLE_S, ask="list", run_id=run_id, path=wanted, export=export
    ) as answers:
        for final in answers:
            try:
                entries += map(entry, final.get("entries", []))
            except (ValueError, TypeError) as error:
                raise AgentError(f"its list of files cannot be read: {error}", target=agent.target.name) from error
    if "root" not in final:
        raise NotFound("its workdir has vanished", target=agent.target.name, run_id=run_id)
    return entries, final


def _items(entries: list[Entry], *, chosen: bool) -> list[Item]:
    """What a person would call one thing: a file, or a folder; of a run directory, a checkpoint."""
    found: dict[str, list[int]] = {}
    for one in entries:
        parts = one.path.split("/")
        name = "/".join(parts[: 2 if chosen and parts[0] == "checkpoints" else 1]) if chosen else ""
        if one.kind != "dir":
            found.setdefault(name, []).append(one.size)
    return [Item(path=name, files=len(sizes), size=sum(sizes)) for name, sizes in found.items()]


def _local_root(to: Path, name: str) -> bytes:
    folder = to.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--to {to}: is not a folder", hint="--to names the folder that the files are put into")
    return os.fsencode(folder) + b"/" + encoded(name)


def _changed_here(root: bytes, entries: list[Entry]) -> list[tuple[str, str]]:
    """Files that somebody has written to since the run's own were: a script, edited after the launch."""
    found = []
    for one in entries:
        path = Path(os.fsdecode(at(root, one.path)))
        if one.kind == "file" and path.is_file() and not Path(os.fsdecode(part_of(os.fsencode(path)))).exists():
            here = path.stat()
            begun = SYNCED <= here.st_size < one.size  # by an earlier pull, as far as it came
            if here.st_mtime_ns > one.mtime_ns and not begun:
                found.append((one.path, "here was changed later than the run's"))
    return found


def _claims(incoming: Incoming, entries: list[Entry], watcher: Watcher) -> dict[int, Claim]:
    claims: dict[int, Claim] = {}
    compared = 0
    for index, one in enumerate(entries):
        if one.kind == "file" and (claim := incoming.claim(index)) is not None:
            claims[index] = claim
            compared += claim.have
            watcher.at(None, compared)
    return claims


def _refuse_full(root: bytes, needed: int) -> None:
    above, free = room(root)
    if needed > free:
        raise PreflightError(
            f"{shown(decoded(above))} has too little room: {needed:,} bytes are to be pulled, and "
            f"{free:,} are free", hint="choose another disk with --to DIR",
        )  # fmt: skip


def _bring(
    agent: Agent, run_id: str, source: str, entries: list[Entry], claims: dict[int, Claim], incoming: Incoming,
    watcher: Watcher,
) -> None:  # fmt: skip
    incoming.folders()
    parcel = secrets.token_hex(8)
    with agent.stream(
        "send", payload=listing(parcel, entries, claims), deadline_s=None, idle_s=IDLE_S, run_id=run_id, root=source,
        parcel=parcel,
    ) as answers:  # fmt: skip
        for frame in answers:
            if "events" in frame:
                incoming.accept(frame["events"], frame["raw"])
                watcher.at(*incoming.done)
    incoming.finish()
