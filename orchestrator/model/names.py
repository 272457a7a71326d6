"""Run ids, and the name of every file and folder on a target: of its workdir, and of a run directory."""

from __future__ import annotations

import re
from datetime import datetime

from orchestrator.record import record

RUN_ID_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,78}[a-z0-9])?")


def slugify(text: str) -> str:
    """`text` as a part of a run id: lower-case letters, digits and single dashes, at most 40 characters."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return slug or "run"


def make_run_id(slug: str, now: datetime, entropy: str) -> str:
    """A run id that sorts by time: `20261129-143512-smollm2-cpu-3fa9`.

    `now` is UTC; `entropy` is a few hex digits that keep two launches of one second apart.
    """
    return f"{now:%Y%m%d-%H%M%S}-{slugify(slug)}-{slugify(entropy)}"


def is_run_id(text: str) -> bool:
    return RUN_ID_PATTERN.fullmatch(text) is not None


@record
class WorkPaths:
    """Every path of a target's workdir. `workdir` is absolute on the target."""

    workdir: str

    @property
    def runs(self) -> str:
        return f"{self.workdir}/runs"

    def agent(self, agent_hash: str) -> str:
        return f"{self.workdir}/agents/{agent_hash}"

    def bundle(self, bundle_hash: str) -> str:
        return f"{self.workdir}/bundles/{bundle_hash}"

    def env(self, env_hash: str) -> str:
        return f"{self.workdir}/envs/{env_hash}"

    @property
    def wheels(self) -> str:
        """Files of wheelhouses, each under the hash of its content."""
        return f"{self.workdir}/wheels"

    def tmux_socket(self, uid: int) -> str:
        """One tmux server a user: tmux refuses a socket that another user owns."""
        return f"{self.workdir}/tmux-{uid}"

    def run(self, run_id: str) -> RunPaths:
        return RunPaths(root=f"{self.runs}/{run_id}", run_id=run_id)


@record
class RunPaths:
    """Every file name of a run directory: the contract between agent, supervisor, trainer and laptop."""

    root: str
    run_id: str

    @property
    def record(self) -> str:
        return f"{self.root}/run.json"

    @property
    def events(self) -> str:
        return f"{self.root}/events.jsonl"

    @property
    def metrics(self) -> str:
        return f"{self.root}/metrics.jsonl"

    @property
    def heartbeat(self) -> str:
        return f"{self.root}/heartbeat.json"

    @property
    def exit(self) -> str:
        return f"{self.root}/exit.json"

    @property
    def supervisor(self) -> str:
        """Who supervises and what was spawned: pids with their start times."""
        return f"{self.root}/supervisor.json"

    @property
    def scan(self) -> str:
        """What the supervisor has read out of the log so far, so that a probe costs the same at any log size."""
        return f"{self.root}/scan.json"

    @property
    def stop(self) -> str:
        """The request to stop: who asked, when, with what grace period."""
        return f"{self.root}/stop.json"

    @property
    def stopper(self) -> str:
        """Who carries the stop out, and how far it is."""
        return f"{self.root}/stopper.json"

    @property
    def stop_lock(self) -> str:
        return f"{self.root}/stop.lock"

    @property
    def claim(self) -> str:
        """Taken by the supervisor before it spawns anything, or by a start that gives it up: by one of them only."""
        return f"{self.root}/claim"

    @property
    def gpus(self) -> str:
        """Which GPUs the run has asked for to itself, and which it has got."""
        return f"{self.root}/gpus.json"

    @property
    def start_lock(self) -> str:
        return f"{self.root}/start.lock"

    @property
    def env(self) -> str:
        """Mode 0600, read once by the supervisor and then deleted: it may hold secrets."""
        return f"{self.root}/env"

    @property
    def config(self) -> str:
        """The configuration as it was launched."""
        return f"{self.root}/config.yaml"

    @property
    def code(self) -> str:
        """This run's own copy of the bundle's project files: the program's working directory."""
        return f"{self.root}/code"

    def log(self, attempt: int) -> str:
        return f"{self.root}/{self.run_id}.a{attempt}.log"

    def index(self, attempt: int) -> str:
        return f"{self.root}/{self.run_id}.a{attempt}.idx"
