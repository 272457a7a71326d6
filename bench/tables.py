"""Ways measured side by side, and the rows of a markdown table that says what came of it."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

HEAD = "| what | median (lowest-highest) | found | wanted | reached |\n|---|---|---|---|---|"


def side_by_side(goes: int, **ways: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each way, its goes between those of the others; a first go of each is not counted."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for go in range(goes + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if go:
                took[name].append(time.perf_counter() - begun)
    return took


def ratio(what: str, ours: list[float], theirs: list[float], most: float) -> str:
    found = statistics.median(ours) / statistics.median(theirs)
    return row(what, f"{shown(ours)} : {shown(theirs)}", f"{found:.2f} x", f"<= {most:g} x", found <= most)


def shown(seconds: list[float]) -> str:
    unit, factor = ("ms", 1e3) if max(seconds) < 2 else ("s", 1.0)
    median, *ends = (f"{factor * value:.{0 if unit == 'ms' else 2}f}" for value in (
        statistics.median(seconds), min(seconds), max(seconds)))  # fmt: skip
    return f"{median} {unit}" if len(seconds) == 1 else f"{median} ({'-'.join(ends)}) {unit}"


def row(what: str, times: str, found: str, wanted: str = "", reached: bool = True) -> str:
    return f"| {what} | {times} | {found} | {wanted} | {'' if not wanted else 'yes' if reached else '**no**'} |"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"
