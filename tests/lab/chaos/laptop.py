"""A laptop: a home, a project and an inventory, from which verbs are typed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tests.lab.chaos.observer import WORKDIR
from tests.lab.chaos.pool import Pool, Verb
from tests.wire import ssh_config

ACT = Path(__file__).with_name("act.py")
KEPT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "SSL_CERT_FILE")


class Laptop:
    """`targets` are names with their vmids, all behind one wire."""

    def __init__(self, name: str, pool: Pool, lab_run: Path, port: int, targets: dict[str, int]) -> None:
        self.name, self.pool = name, pool
        self.home = Path(tempfile.mkdtemp(prefix="sc-laptop-", dir="/tmp"))
        self.project = self.home / "project"
        self.project.mkdir()
        shutil.copy(ACT, self.project)
        inventory = self.home / "hosts.yaml"
        rows = [f"  {target}: {{vmid: {vmid}}}\n" for target, vmid in targets.items()]
        inventory.write_text(f"defaults: {{ssh: pve, workdir: {WORKDIR}}}\ntargets:\n{''.join(rows)}")
        self.env = {name: os.environ[name] for name in KEPT if name in os.environ} | {
            "HOME": str(self.home), "XDG_STATE_HOME": str(self.home / "state"), "SPECCTL_INVENTORY": str(inventory),
            "SPECCTL_SSH_CONFIG": str(ssh_config(self.home, lab_run, port)), "NO_COLOR": "1", "COLUMNS": "160",
            "USER": name, "LOGNAME": name,
        }  # fmt: skip

    def type(self, *words: str) -> Verb:
        return self.pool.start(list(words), env=self.env, cwd=self.project)

    def close(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
