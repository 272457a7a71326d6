"""What a supervised run costs the machine it trains on, and whether the supervisor keeps up with what it writes.

    python -m bench.supervisor [--seconds S] [--rate MB/S] [--for S] [--only idle|rate]

Idle: CPU seconds a minute and memory of the supervisor, beside programs that are quiet, that step, that hold many
threads and files; medians of three windows. Keeping up: a program writes so many MB/s of lines as trainers write them;
how far the supervisor is behind at most, and how much of a core it takes; and how much a core's time reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from bench.runs import Bench, bench, cpu_s, header, row, rss_mib, say_where, spread
from bench.texts import TEXTS, make

WINDOWS = 3
QUIET = "import time; time.sleep(3600)"
STEPPING = """
import time, itertools
for n in itertools.count(): print(f"step={n} loss=2.5 tok/s=1000.0", flush=True); time.sleep(0.1)
"""
CROWDED = """
import threading, subprocess, sys, time
files = [open(sys.executable, "rb") for _ in range(200)]
for _ in range(200): threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) for _ in range(16)]
time.sleep(3600)
"""
OWN_LOG = """
import time, itertools, sys
with open(sys.argv[1], "a") as log:
    for n in itertools.count(): print(f"step={n} loss=2.5 tok/s=1000.0", file=log, flush=True); time.sleep(0.1)
"""
WRITER = """
import sys, time
text, rate, seconds = open(sys.argv[1], "rb").read(), float(sys.argv[2]) * 1e6, float(sys.argv[3])
begun, written, at = time.monotonic(), 0, 0
while (now := time.monotonic() - begun) < seconds:
    while written < now * rate:
        piece = text[at : at + 65536]
        sys.stdout.buffer.write(piece)
        written, at = written + len(piece), (at + 65536) % len(text)
    sys.stdout.buffer.flush()
    time.sleep(0.005)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window of the idle cost")
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s that the program writes")
    parser.add_argument("--for", type=float, default=10.0, dest="how_long", help="seconds that it writes")
    parser.add_argument("--only", choices=["idle", "rate"])
    options = parser.parse_args()
    say_where("python -m bench.supervisor " + " ".join(sys.argv[1:]))
    if options.only != "rate":
        all_idle(options.seconds)
    if options.only != "idle":
        all_rates(options.rate, options.how_long)


def all_idle(seconds: float) -> None:
    windows = f"{WINDOWS} windows of {seconds:.0f} s"
    header(f"beside a program that ... ({windows})", "CPU s a minute", "% of a core", "RSS, MiB")
    for name, program in (
        ("is silent", QUIET), ("prints 10 steps a second", STEPPING), ("writes them to its own log", OWN_LOG),
        ("has 200 threads, 200 files, 16 children", CROWDED),
    ):  # fmt: skip
        with bench() as one:
            idle(one, name, program, seconds)
    print()


def all_rates(rate: float, seconds: float) -> None:
    header(
        f"{rate:.0f} MB/s for {seconds:.0f} s of ...", "behind at most", "of a core", "MB/s it reads",
        "RSS, MiB",
    )  # fmt: skip
    for name, line in TEXTS.items():
        with bench() as one:
            (one.project / "text").write_bytes(make(line, 2_000_000))
            keeping_up(one, name, rate, seconds)


def idle(one: Bench, name: str, program: str, seconds: float) -> None:
    answer = one.launch(sys.executable, "-c", program, str(one.home / "own.log"))
    supervisor = supervisor_of(one, answer["run_id"])
    time.sleep(6.0)  # the first seconds are looked at closely
    costs = []
    for _ in range(WINDOWS):
        before, begun = cpu_s(supervisor), time.monotonic()
        time.sleep(seconds)
        costs.append((cpu_s(supervisor) - before) / (time.monotonic() - begun))
    row(name, spread([60 * cost for cost in costs], ".3f"), spread([100 * cost for cost in costs], ".2f"),
        f"{rss_mib(supervisor):.1f}")  # fmt: skip
    one.stop(answer["run_id"])


def supervisor_of(one: Bench, run_id: str) -> int:
    record = one.home / "w" / "runs" / run_id / "supervisor.json"
    return int(json.loads(record.read_text())["pid"])


def keeping_up(one: Bench, name: str, rate: float, seconds: float) -> None:
    answer = one.launch(sys.executable, "-c", WRITER, "text", str(rate), str(seconds))
    supervisor, log = supervisor_of(one, answer["run_id"]), Path(answer["log"])
    index, behind, memory, used = log.with_suffix(".idx"), [0], [0.0], 0.0
    record = log.with_name("exit.json")
    while not record.exists():
        used, read = max(used, cpu_s(supervisor)), read_to(index)
        behind.append(log.stat().st_size - read)
        memory.append(rss_mib(supervisor))
        time.sleep(0.1)
    size = log.stat().st_size
    row(name, f"{max(behind) / 1e6:.0f} MB = {max(behind) / 1e6 / rate:.1f} s", f"{100 * used / seconds:.0f} %",
        f"{size / 1e6 / used:.0f}", f"{statistics.median(memory):.0f}, at most {max(memory):.0f}")  # fmt: skip


def read_to(index: Path) -> int:
    """How far the newest mark says that the log has been read."""
    try:
        with index.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    return int(json.loads(lines[-2])["offset"]) if len(lines) > 1 and lines[-2].startswith(b"{") else 0


if __name__ == "__main__":
    main()
