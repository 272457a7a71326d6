"""What is true in a container, seen from the host: its processes by their cgroup, its files by the node's own paths.

Nothing of specctl takes part. A run's processes are known by the token in their arguments, not by specctl's mark; a
program's start and end by the witness that it writes; a log by the run's directory and its own first line.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.chaos.kinds import TOKEN
from tests.lab.lab import Lab

WORKDIR = "/root/w"
AGENT = b"find or install the agent"
"""Words of what a verb has run in the container."""
SUPERVISOR = re.compile(rb"orchestrator\.agent\.supervise.*/runs/([a-z0-9-]+)'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """`pid` as the host counts, `inner` as the container does."""

    pid: int
    inner: int
    name: str
    token: str | None
    supervises: str | None
    """The run that it is the supervisor of."""
    agent: bool
    """It answers for the container, or carries out a stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """What was so of one run at one moment."""

    token: str
    run_id: str | None
    """None: no run directory carries the token."""
    starts: int
    """How often its program has begun."""
    ended: bool
    """Whether the program has said that it is about to leave by itself."""
    alive: frozenset[int]
    """Its living processes, as the container counts."""
    whole: bool = True
    """Whether the log still begins with the supervisor's line."""
    log: bytes = b""
    """What stands in the log after that line."""
    own: bytes = b""
    """What stands in the log that the program writes by itself."""

    @property
    def started(self) -> bool:
        return self.starts > 0 or bool(self.alive)

    @property
    def dead(self) -> bool:
        """It lived, and nothing of it does any more: nothing can bring it back."""
        return self.starts > 0 and not self.alive


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One look at one container."""

    processes: list[Process]
    runs: dict[str, str]
    """Run id -> token of every run directory there is; one whose record cannot be read is none."""
    witnesses: dict[str, bytes] = field(default_factory=dict)

    def alive(self, token: str) -> frozenset[int]:
        return frozenset(one.inner for one in self.processes if one.token == token)

    def run_ids(self, token: str) -> list[str]:
        return sorted(run_id for run_id, found in self.runs.items() if found == token)


class Observer:
    """Looks into one container of a node. Its workdir is a small disk that outlives the container's restarts."""

    def __init__(self, lab: Lab, vmid: int, disk: str) -> None:
        self.vmid = vmid
        root = lab.root
        self.cgroup = root / f"sys/fs/cgroup/lxc/{vmid}"
        self.workdir = root / disk.lstrip("/")
        self.witness = root / f"run/lab/run/ct/{vmid}/upper/root/witness"
        self._tokens: dict[str, str] = {}

    # --- one look ---------------------------------------------------------------------------------------------------

    def look(self) -> View:
        return View(processes=list(self.processes()), runs=self._runs(), witnesses=dict(self._witnesses()))

    def processes(self) -> Iterator[Process]:
        """All that lives in the container. A process that is forked meanwhile is found as well: what has begun it was
        there when its list was read, so the lists are read until they name nobody new."""
        seen: set[int] = set()
        while new := set(self._pids()) - seen:
            seen |= new
            for pid in new:
                if (found := read_process(pid)) is not None:
                    yield found

    def _pids(self) -> Iterator[int]:
        for path in [self.cgroup, *self._groups(self.cgroup)]:
            with contextlib.suppress(OSError):
                yield from map(int, (path / "cgroup.procs").read_text().split())

    def _groups(self, path: Path) -> Iterator[Path]:
        try:
            below = [entry for entry in path.iterdir() if entry.is_dir()]
        except OSError:
            return
        for entry in below:
            yield entry
            yield from self._groups(entry)

    def _runs(self) -> dict[str, str]:
        found = {}
        try:
            names = [path.name for path in (self.workdir / "runs").iterdir()]
        except OSError:
            return {}
        for name in names:
            token = self._tokens.get(name) or self._token_of(name)
            if token is not None and (self.workdir / "runs" / name / "run.json").exists():
                self._tokens[name] = token
                found[name] = token
        return found

    def _token_of(self, run_id: str) -> str | None:
        try:
            record = json.loads((self.workdir / "runs" / run_id / "run.json").read_bytes())
            match = TOKEN.search(" ".join(record["spec"]["argv"]).encode())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return match[0].decode() if match else None

    def _witnesses(self) -> Iterator[tuple[str, bytes]]:
        try:
            paths = list(self.witness.iterdir())
        except OSError:
            return
        for path in paths:
            with contextlib.suppress(OSError):
                yield path.name, path.read_bytes()

    def forget(self, token: str) -> None:
        """Nothing is left of the run, and nobody will ask for it again."""
        with contextlib.suppress(OSError):
            (self.witness / token).unlink()

    # --- one run ----------------------------------------------------------------------------------------------------

    def truth(self, token: str, view: View, *, content: bool = False) -> Truth:
        """What `view` says of one run; `content`: with what stands in its logs now."""
        words = [line.split()[0] for line in view.witnesses.get(token, b"").splitlines() if line.strip()]
        run_ids = view.run_ids(token)
        whole, log, own = True, b"", b""
        if content and run_ids:
            folder = self.workdir / "runs" / run_ids[0]
            whole, log = self._log(folder, run_ids[0])
            with contextlib.suppress(OSError):
                own = (folder / "code" / "own.log").read_bytes()
        return Truth(
            token=token, run_id=run_ids[0] if run_ids else None, starts=words.count(b"start"), ended=b"end" in words,
            alive=view.alive(token), whole=whole, log=log, own=own,
        )  # fmt: skip

    def _log(self, folder: Path, run_id: str) -> tuple[bool, bytes]:
        try:
            header, newline, rest = (folder / f"{run_id}.a1.log").read_bytes().partition(b"\n")
        except FileNotFoundError:
            return True, b""
        return bool(newline) and header.startswith(f"# specctl run={run_id} attempt=1 nonce=".encode()), rest


def read_process(pid: int) -> Process | None:
    """None when there is none, or only what the kernel keeps of one that has ended."""
    try:
        folder = Path(f"/proc/{pid}")
        head, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
        command = (folder / "cmdline").read_bytes()
        inner = re.search(r"^NSpid:.*?(\d+)$", (folder / "status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    if rest.split()[0] in "ZX" or inner is None:
        return None
    token, supervises = TOKEN.search(command), SUPERVISOR.search(command)
    return Process(
        pid=pid, inner=int(inner[1]), name=head.partition("(")[2],
        token=token[0].decode() if token and not supervises else None,
        supervises=supervises[1].decode() if supervises else None, agent=AGENT in command,
    )  # fmt: skip
