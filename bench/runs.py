"""What the benchmarks of logs and of the supervisor share: runs of real programs under the real command, and tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
SPECCTL = [sys.executable, "-m", "orchestrator"]


class Bench:
    """A place of its own for specctl: inventory, project, workdir."""

    def __init__(self, home: Path, ssh: str | None) -> None:
        """`ssh`: a host that must be this machine, since what runs there is looked at from here."""
        self.home, self.project = home, home / "project"
        self.project.mkdir()
        way = f"ssh: {ssh}, " if ssh else ""
        (home / "hosts.yaml").write_text(f"targets: {{box: {{{way}workdir: {home}/w, python: {sys.executable}}}}}\n")
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self.environ = {
            **os.environ, "HOME": str(home), "XDG_STATE_HOME": f"{home}/state", "NO_COLOR": "1", "PYTHONPATH": path,
            "SPECCTL_INVENTORY": str(home / "hosts.yaml"),
        }  # fmt: skip
        self.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed starts from bytecode
        if ssh:
            self.environ["HOME"] = os.environ["HOME"]

    def specctl(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*SPECCTL, *words], cwd=self.project, env=self.environ, capture_output=True, check=False)

    def launch(self, *argv: str) -> dict[str, Any]:
        done = self.specctl("launch", "--until", "process", "--json", "--", *argv)
        answer: dict[str, Any] = json.loads(done.stdout)
        if "run_id" not in answer:
            raise SystemExit(f"launch: {done.stdout.decode()} {done.stderr.decode()}")
        return answer

    def state(self, run_id: str) -> str:
        return str(json.loads(self.specctl("status", "--json", run_id).stdout)["runs"][0]["state"])

    def wait_for_end(self, run_id: str) -> None:
        record = self.home / "w" / "runs" / run_id / "exit.json"
        while not record.exists():
            time.sleep(0.2)

    def stop(self, run_id: str) -> None:
        self.specctl("stop", run_id, "--now")

    def close(self) -> None:
        for socket in self.home.glob("w/tmux-*"):
            subprocess.run(["tmux", "-S", str(socket), "kill-server"], capture_output=True, check=False)


@contextmanager
def bench(ssh: str | None = None) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="specctl-bench-") as folder:
        one = Bench(Path(folder), ssh)
        try:
            yield one
        finally:
            one.close()


def spread(values: Sequence[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def say_where(command: str) -> None:
    """What stands above a table: command, date, machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    print(
        f"`{command}`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} x {model}, Linux {platform.release()}, "
        f"Python {platform.python_version()}; load when it began {os.getloadavg()[0]:.1f}\n"
    )


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def header(*cells: str) -> None:
    row(*cells)
    row(*["---"] * len(cells))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its threads so far, to the microsecond where the kernel counts them so."""
    try:
        return sum(
            int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
        ) / 1e9  # fmt: skip
    except (OSError, IndexError):
        return 0.0


def rss_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)
