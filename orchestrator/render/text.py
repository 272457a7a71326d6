"""Small texts: ages, sizes, states with their colours. Nothing here knows where it is printed."""

from __future__ import annotations

from orchestrator.model import Finding, Verdict

COLOURS = {
    "RUNNING": "green", "SUCCEEDED": "green", "STARTING": "cyan", "QUEUED": "cyan", "STOPPING": "yellow",
    "STOPPED": "yellow", "DEGRADED": "bold red", "STALLED": "bold red", "FAILED": "bold red", "KILLED": "bold red",
    "NEVER_STARTED": "bold red", "LOST": "bold red", "UNREACHABLE": "bold magenta",
}  # fmt: skip
BAD = frozenset({"DEGRADED", "STALLED", "FAILED", "KILLED", "NEVER_STARTED", "LOST"})


def age(seconds: float | None) -> str:
    """`12 s`, `3 m 5 s`, `2 h 10 m`, `4 d 3 h`; a dash for what is not known."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def colour(state: str) -> str:
    return COLOURS.get(state, "white")


def workers(verdict: Verdict) -> str:
    return f"{verdict.workers_alive}/{verdict.workers_total}" if verdict.workers_total else "-"


def headline(finding: Finding) -> str:
    """`RuntimeError: out of memory (drafter-0)` on one line."""
    text = f"{finding.type}: {finding.message}" if finding.message else finding.type
    first = text.splitlines()[0] if text else finding.type
    return f"{first} ({finding.worker})" if finding.worker else first
