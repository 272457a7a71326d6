"""Who uses what of a workdir: the runs by their records, the living processes by what they were started with.

A run that cannot be read may use anything, so nothing that runs share goes while there is one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from orchestrator.agent import proc, records
from orchestrator.model import WorkPaths, is_run_id

HASH = re.compile(r"[0-9a-f]{16}")
GONE = ".gone"


@dataclass(kw_only=True, slots=True)
class Uses:
    bundles: set[str] = field(default_factory=set)
    envs: set[str] = field(default_factory=set)
    agents: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    """Why it is not known what is used: nothing that runs share may then go."""
    elsewhere: list[str] = field(default_factory=list)
    """Runs of other hosts that have not ended: their processes cannot be seen from here."""


def look(paths: WorkPaths, *, without: set[str]) -> Uses:
    """Everything that is in use, leaving out the runs `without`, which are about to go."""
    uses = Uses()
    try:
        names = sorted(os.listdir(paths.runs))
    except FileNotFoundError:
        names = []
    for name in names:
        if name in without or not is_run_id(name):
            continue
        run = paths.run(name)
        spec = records.spec(run)
        if spec is None:
            try:
                begun = sorted(os.listdir(run.root)) not in ([], [os.path.basename(run.start_lock)])
            except OSError:
                begun = True
            if begun:
                uses.unknown.append(f"{run.root} cannot be read, so nobody knows what that run uses")
            continue
        uses.bundles.add(spec[0].bundle)
        if spec[0].env_hash is not None:
            uses.envs.add(spec[0].env_hash)
        if records.elsewhere(spec[1]) and records.exit_record(run) is None:
            uses.elsewhere.append(name)
    _processes(paths, uses)
    return uses


def _processes(paths: WorkPaths, uses: Uses) -> None:
    """What living processes name in their command lines and environments. An agent's boot has the agent's hash as a
    word of its own; the supervisor of a run has its agent's folder in its program text."""
    folders = re.escape(os.fsencode(paths.workdir)) + rb"/(bundles|envs|agents)|/specctl-(agents)-[0-9]+"
    pattern = re.compile(rb"(?:" + folders + rb")/([0-9a-f]{16})")
    kinds = {b"bundles": uses.bundles, b"envs": uses.envs, b"agents": uses.agents}
    for pid in proc.pids():
        words = proc.read(f"/proc/{pid}/cmdline")
        for text in (words, proc.read(f"/proc/{pid}/environ")):
            for kind, outside, found in pattern.findall(text):
                kinds[kind or outside].add(found.decode("ascii"))
        for word in words.split(b"\0"):
            if len(word) == 16 and HASH.fullmatch(word.decode("ascii", "replace")):
                uses.agents.add(word.decode("ascii"))
