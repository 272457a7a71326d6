"""How fast logs are read: MB/s of the scanner and of the cleaner, median of five with the spread.

    python bench/logscan.py [MEGABYTES]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable

from orchestrator.logscan import Cleaner, Scanner

CHUNK_BYTES = 1 << 20
WORDS = (  # noqa: SIM905
    "the quick model loaded tokenizer shard from cache layer attention weights were moved to device warning using slow "
    "path for kernel selection in iteration over dataset loader process finished connection reset steps"
).split()


def ordinary(rng: random.Random, _: int) -> str:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 15)))
    return f"2026-11-29 14:{rng.randint(10, 59)}:{rng.randint(10, 59)},{rng.randint(100, 999)} INFO loop: {words}\n"


def quiet(rng: random.Random, index: int) -> str:
    return f"GET /shard/{rng.randint(0, 99999)}.bin 206 {index} bytes from cache, 12 ms, ok, next one in queue\n"


def steps(rng: random.Random, index: int) -> str:
    return f"step={index} worker=drafter-{index % 3} loss={rng.random() + 2:.4f} tok/s={rng.randint(1000, 9999)}.5\n"


def mixed(rng: random.Random, index: int) -> str:
    return steps(rng, index) if index % 20 == 0 else ordinary(rng, index)


def coloured(rng: random.Random, index: int) -> str:
    return f"\x1b[32m{ordinary(rng, index)[:-1]}\x1b[0m\n"


def frames(rng: random.Random, index: int) -> str:
    return f"\r {index % 100}%|{'#' * 20:40}| {index}/10000 [00:{rng.randint(10, 59)}<00:30, 3.21it/s]"


def make(line: Callable[[random.Random, int], str], size: int) -> bytes:
    rng, block, index = random.Random(7), bytearray(), 0
    while len(block) < 2_000_000:
        block += line(rng, index).encode()
        index += 1
    return bytes(block) * max(1, size // len(block))


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
    texts = {
        "ordinary lines": make(ordinary, size),
        "lines without keywords": make(quiet, size),
        "1 step line in 20": make(mixed, size),
        "step lines only": make(steps, size),
        "coloured lines": make(coloured, size),
        "progress frames (CR)": make(frames, size),
        "one line of 64 MiB": b"x" * (64 << 20) + b"\n",
    }
    print(f"{'MB/s: median (lowest-highest) of 5':36}{'scanner':>24}{'cleaner':>24}")
    for name, data in texts.items():
        columns = []
        for work in (scan, clean):
            speeds = []
            for _ in range(5):
                begun = time.perf_counter()
                work(data)
                speeds.append(len(data) / 1e6 / (time.perf_counter() - begun))
            columns.append(f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})")
        print(f"{name:36}{columns[0]:>24}{columns[1]:>24}", flush=True)


if __name__ == "__main__":
    main()
