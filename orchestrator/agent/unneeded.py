"""What of a workdir nobody needs: bundles, environments and agents that no run uses, broken uploads, old runs; and of
this user's folders outside it the agents that went there while the workdir was full.

Only what specctl makes is looked at, by its place and the form of its name, and it must be this user's own, where it
seems to be, and without a mount in it. What else is there is named, and stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.agent import boot, disk, files, lease, proc, pushes, records, send, uses
from orchestrator.agent.prepare import COMPLETE as ENV_MARKER
from orchestrator.agent.put import COMPLETE as BUNDLE_MARKER
from orchestrator.agent.tree import PART, encoded
from orchestrator.agent.uses import GONE, HASH, Uses
from orchestrator.model import WorkPaths, is_run_id

DAY_S = 86400.0
ASIDE = re.compile(r"[0-9a-f]{16}\.[0-9]+(\.tmp|\.broken)?|[0-9a-f]{16}\.wheels|[a-z0-9-]+\.[0-9]+\.gone")
LOCK = re.compile(r"([0-9a-f]{16})\.lock")


@dataclass(kw_only=True, slots=True)
class Item:
    """One thing that may go. `paths[0]` is the thing itself, the others only go with it."""

    kind: str
    name: str
    paths: list[str]
    why: str
    at: float
    """When it was last used, as far as that is known."""
    bytes: int = 0
    hold: str | None = None
    """A lock that somebody who still needs it would hold."""
    marker: str | None = None
    """What a launch would mark."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(kw_only=True, slots=True)
class Found:
    items: list[Item] = field(default_factory=list)
    kept: list[dict[str, str]] = field(default_factory=list)
    """Runs and the like that stay although one might have expected otherwise: what, and why."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """`ended`: the runs that are judged to have ended, None when no run is to go."""

    ended: set[str] | None
    older_than_s: float
    keep_checkpoints: bool


def look(paths: WorkPaths, asked: Asked, now: float) -> Found:
    found = Found()
    runs = list(_runs(paths, asked, now, found)) if asked.ended is not None else []
    used = uses.look(paths, without={item.name for item in runs})
    found.notes += used.unknown
    kinds: tuple[tuple[str, str, str, set[str], str, float], ...] = (
        ("bundle", "bundles", BUNDLE_MARKER, used.bundles, "no run uses it", lease.LEASE_S),
        ("env", "envs", ENV_MARKER, used.envs, "no run uses it", lease.LEASE_S),
        ("wheel", "wheels", "", set(), "the environments that were made of it do not need it", lease.LEASE_S),
        *(
            ("agent", folder, "", used.agents | {_own()}, "another version of specctl took its place", DAY_S)
            for folder in ("agents", *_outside(paths))
        ),
    )  # fmt: skip
    for kind, folder, marker, in_use, why, age_s in kinds:
        for name in _names(paths, folder, found):
            path = os.path.join(paths.workdir, folder, name)
            if ASIDE.fullmatch(name):
                item = Item(kind="left over", name=f"{folder}/{name}", paths=[path], why="", at=_touched(path))
                item.why = "a removal that was broken off" if name.endswith(GONE) else "never became whole"
                if name.endswith(GONE) or now - item.at > lease.LEASE_S:
                    found.items.append(item)
            elif HASH.fullmatch(name):
                if name in in_use or _blocked(kind, used):
                    continue
                shown = path if os.path.isabs(folder) else name
                item = Item(kind=kind, name=shown, paths=[path], why=why, at=_touched(path, marker), marker=marker)
                if kind == "env":
                    item.paths.append(f"{path}.wheels")
                    item.hold = f"{path}.lock"
                if not os.path.isabs(folder):
                    item.paths.append(_bytecode(paths, f"{folder}/{name}"))
                if now - item.at > age_s and not disk.held(item.hold):
                    found.items.append(item)
            elif not LOCK.fullmatch(name):
                found.notes.append(f"{path} is not specctl's, and stays")
    found.items += runs
    for name in _names(paths, "runs", found):
        path = f"{paths.runs}/{name}"
        if ASIDE.fullmatch(name):
            found.items.append(Item(
                kind="left over", name=f"runs/{name}", paths=[path], why="a removal that was broken off",
                at=_touched(path),
            ))  # fmt: skip
        elif not is_run_id(name):
            found.notes.append(f"{path} is not specctl's, and stays")
    found.items += _uploads(paths, now)
    found.items += _orphaned_bytecode(paths)
    found.items = list(_own_items(paths, found.items, found))
    return found


def _blocked(kind: str, used: Uses) -> bool:
    """What is not known to be unused stays."""
    return (kind != "wheel" and bool(used.unknown)) or (kind == "agent" and bool(used.elsewhere))


def _outside(paths: WorkPaths) -> list[str]:
    """The folders outside the workdir in which this user's agents may be."""
    _, *homes = boot.agent_homes(paths.workdir, "any", True, False)
    return [os.path.dirname(home) for home in homes]


def _own() -> str:
    return os.path.basename(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _names(paths: WorkPaths, folder: str, found: Found) -> list[str]:
    path = os.path.join(paths.workdir, folder)
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            found.notes.append(f"{path} is a link or no folder: what is behind it stays")
            return []
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def _runs(paths: WorkPaths, asked: Asked, now: float, found: Found) -> Iterator[Item]:
    """Runs that have ended long enough ago, of which nothing lives."""
    assert asked.ended is not None
    marked = proc.marked_runs(paths.runs)
    for name in _names(paths, "runs", found):
        if name not in asked.ended or not is_run_id(name):
            continue
        run = paths.run(name)
        spec, ending = records.spec(run), records.exit_record(run)
        at = ending.at if ending is not None else _newest(run.root)
        if spec is None or records.elsewhere(spec[1]) or now - at <= asked.older_than_s:
            continue
        supervisor = records.supervisor(run)
        nonce = spec[0].nonce
        if name in marked or proc.trees({nonce: proc.roots_of(supervisor)})[nonce]:
            continue
        if supervisor is not None and proc.same(supervisor.pid, supervisor.start_ticks) is not None:
            continue
        whole, _ = send.checkpoints(run)
        if whole and asked.keep_checkpoints:
            found.kept.append({"what": name, "why": f"it has checkpoints, the newest of step {whole[-1]}"})
            continue
        why = "ended" if ending is None or ending.never_started is None else "never started"
        if whole:
            why += f"; checkpoints: {len(whole)}, the newest is step-{whole[-1]}"
        yield Item(
            kind="run", name=name, paths=[run.root, _bytecode(paths, f"runs/{name}")], why=why, at=at,
            hold=run.start_lock,
        )  # fmt: skip


def _uploads(paths: WorkPaths, now: float) -> Iterator[Item]:
    """Parts that broken pushes have left wherever they went."""
    folder = pushes.folder(paths.workdir)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        path = f"{folder}/{name}"
        if not name.endswith(".json") or now - _touched(path) <= DAY_S or disk.held(path):
            continue
        parts = [part for part in pushes.parts_of(path) if os.path.basename(encoded(part)).startswith(PART)]
        to = (files.read_json(path) or {}).get("dst")
        yield Item(
            kind="upload", name=name.removesuffix(".json"), paths=[path, *parts], hold=path, at=_touched(path),
            why=f"a push to {to} that was broken off",
        )  # fmt: skip


def _orphaned_bytecode(paths: WorkPaths) -> Iterator[Item]:
    """Python's cache for code that has gone."""
    for folder in ("runs", "bundles", "envs"):
        root = _bytecode(paths, folder)
        for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
            if not os.path.lexists(f"{paths.workdir}/{folder}/{name}"):
                yield Item(
                    kind="bytecode", name=f"{folder}/{name}", paths=[f"{root}/{name}"], why="its code is gone",
                    at=_touched(f"{root}/{name}"),
                )  # fmt: skip


def _bytecode(paths: WorkPaths, name: str) -> str:
    return f"{paths.workdir}/pycache{paths.workdir}/{name}"


def _touched(path: str, marker: str = "") -> float:
    for one in (f"{path}/{marker}" if marker else path, path):
        with contextlib.suppress(OSError):
            return os.lstat(one).st_mtime
    return 0.0


def _newest(root: str) -> float:
    with os.scandir(root) as entries:
        return max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=0.0)


def _own_items(paths: WorkPaths, items: list[Item], found: Found) -> Iterator[Item]:
    """Those that are plain things of this user's, where they seem to be, and with nothing mounted in them."""
    mounts = disk.mounts()
    for item in items:
        whys = {path: _not_ours(paths, path, mounts) for path in item.paths if os.path.lexists(encoded(path))}
        if item.kind == "upload":
            item.paths = item.paths[:1] + [path for path in item.paths[1:] if os.path.isfile(encoded(path))]
            whys = {item.paths[0]: whys.get(item.paths[0])}
        if why := whys.get(item.paths[0]):
            found.notes.append(f"{item.paths[0]} {why}, and stays")
            continue
        item.paths = [path for path in item.paths if not whys.get(path)]
        yield item


def _not_ours(paths: WorkPaths, path: str, mounts: list[str]) -> str | None:
    inside = path.startswith(f"{paths.workdir}/")
    base = paths.workdir if inside else os.path.dirname(os.path.dirname(path))
    try:
        status = os.lstat(path)
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        return "belongs to somebody else"
    real = os.path.realpath(path)
    if real != os.path.join(os.path.realpath(base), path[len(base) + 1 :]):
        return f"lies behind a link, in {os.path.dirname(real)}"
    if any(mount == real or mount.startswith(f"{real}/") for mount in mounts):
        return "has something mounted in it"
    return None
