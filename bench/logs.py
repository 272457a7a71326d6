"""How fast `specctl logs` shows lines, end to end: a real run's log, the real command, its output to a file.

    python bench/logs.py [MILLION_LINES] [--ssh NODE]

Median and spread of several goes: lines a second for the whole log, as JSON, for a pattern that every line matches and
for one that ten match; the time to the first line; the most memory that the command and its agent took. `--ssh`: the
same over an SSH host, which must be this machine, since the log is written here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LINE = "2026-11-29 14:{:02}:00,123 INFO loop: step={} worker=drafter-{} loss={}.{:04} tok/s={}.5 of the whole run\n"
GOES = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("millions", type=float, nargs="?", default=1.0)
    parser.add_argument("--ssh")
    options = parser.parse_args()
    count = int(options.millions * 1e6)
    with tempfile.TemporaryDirectory(prefix="specctl-bench-") as folder:
        home = Path(folder)
        environ = {**os.environ, "HOME": folder, "XDG_STATE_HOME": f"{folder}/state", "NO_COLOR": "1"}
        environ["SPECCTL_INVENTORY"] = str(home / "hosts.yaml")
        ssh = f"ssh: {options.ssh}, " if options.ssh else ""
        (home / "hosts.yaml").write_text(f"targets: {{box: {{{ssh}workdir: {folder}/w, python: {sys.executable}}}}}\n")
        (home / "project").mkdir()
        with (home / "lines").open("w") as file:
            file.writelines(
                LINE.format(n % 60, n, n % 3, n % 7, n % 9973, 1000 + n % 9000) for n in range(count)
            )  # fmt: skip

        def specctl(*words: str) -> list[str]:
            return [sys.executable, "-m", "orchestrator", *words]

        launched = subprocess.run(
            specctl("launch", "--until", "process", "--json", "--", "sleep", "1000"), cwd=home / "project",
            env=environ, capture_output=True, check=False,
        )  # fmt: skip
        answer = json.loads(launched.stdout)
        try:
            with Path(answer["log"]).open("ab") as log, (home / "lines").open("rb") as lines:
                while piece := lines.read(1 << 20):
                    log.write(piece)
            read_by_supervisor(Path(answer["log"]))
            run, size = str(answer["run_id"]), (home / "lines").stat().st_size
            print(f"{count:,} lines, {size / 1e6:,.0f} MB; median (lowest-highest) of {GOES}")
            for name, words, lines_out in (
                ("whole log", [], count), ("--json", ["--json"], count),
                ("--grep, all match", ["--grep", "step="], count),
                ("--grep, ten match", ["--grep", f"step={str(count - 1)[:-1]}[0-9] "], 10),
                ("-n 100", ["-n", "100"], 100),
            ):  # fmt: skip
                took_s, first_s = [], []
                for _ in range(GOES):
                    took, first, found = go(specctl("logs", run, *words), home, environ)
                    assert found == lines_out, (name, found)
                    took_s.append(took)
                    first_s.append(first)
                speeds = [count / took / 1e3 for took in took_s]
                print(
                    f"{name:18} {spread(speeds, '.0f'):>18} thousand lines/s {spread(took_s, '.2f'):>18} s, "
                    f"first line after {spread(first_s, '.2f')} s",
                    flush=True,
                )
            peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            print(f"most memory of a process (an agent behind --ssh not counted): {peak_kib / 1024:.0f} MiB")
        finally:
            subprocess.run(specctl("stop", answer["run_id"], "--now"), env=environ, capture_output=True, check=False)
            for socket in home.glob("w/tmux-*"):
                subprocess.run(["tmux", "-S", str(socket), "kill-server"], capture_output=True, check=False)


def read_by_supervisor(log: Path) -> None:
    """Waits until the supervisor has read all of it: it would take a core from what is measured."""
    index = log.with_suffix(".idx")
    while max((json.loads(mark)["offset"] for mark in index.read_text().splitlines()), default=0) < log.stat().st_size:
        time.sleep(0.5)


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def go(argv: list[str], home: Path, environ: dict[str, str]) -> tuple[float, float, int]:
    """(seconds, seconds until the first line, lines)."""
    begun, first = time.perf_counter(), 0.0
    out = home / "out"
    with out.open("wb") as file:
        process = subprocess.Popen(argv, cwd=home / "project", env=environ, stdout=file, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            if not first and out.stat().st_size:
                first = time.perf_counter() - begun
            time.sleep(0.005)
    took = time.perf_counter() - begun
    with out.open("rb") as file:
        return took, first or took, sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))


if __name__ == "__main__":
    main()
