"""How fast logs are read: MB/s of a core's time of the scanner and of the cleaner, median of five with the spread.

    python -m bench.logscan [MEGABYTES]
"""

from __future__ import annotations

import statistics
import sys
import time

from bench.texts import TEXTS, make
from orchestrator.logscan import Cleaner, Scanner

CHUNK_BYTES = 1 << 20


def scan(data: bytes) -> None:
    scanner = Scanner(sample=True)
    for at in range(0, len(data), CHUNK_BYTES):
        scanner.feed(data[at : at + CHUNK_BYTES], float(at))
    scanner.finish(0.0)


def clean(data: bytes) -> None:
    cleaner = Cleaner()
    for at in range(0, len(data), CHUNK_BYTES):
        cleaner.feed(data[at : at + CHUNK_BYTES])
    cleaner.finish()


def main() -> None:
    size = int(sys.argv[1]) * 1_000_000 if len(sys.argv) > 1 else 20_000_000
    texts = {name: make(line, size) for name, line in TEXTS.items()} | {"a line of 64 MiB": b"x" * (64 << 20) + b"\n"}
    print("| MB/s: median (lowest-highest) of 5 | lines a MB | scanner | cleaner |\n|---|---|---|---|")
    for name, data in texts.items():
        columns = []
        for work in (scan, clean):
            speeds = []
            for _ in range(5):
                begun = time.process_time()
                work(data)
                speeds.append(len(data) / 1e6 / (time.process_time() - begun))
            columns.append(f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})")
        lines = (data.count(b"\n") + data.count(b"\r")) / len(data) * 1e6
        print(f"| {name} | {lines:,.0f} | {columns[0]} | {columns[1]} |", flush=True)


if __name__ == "__main__":
    main()
