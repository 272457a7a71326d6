"""How the exceptions of a run look: one heading each, then the traceback as Python printed it."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.logscan import settled
from orchestrator.render.logs import clock
from orchestrator.render.text import count, size
from orchestrator.verbs.log_errors import Group, Place, Result


def texts(result: Result, now: float) -> Iterator[str]:
    """One text a group, ready for stdout."""
    for number, one in enumerate(result.found, 1):
        group = one.group
        head = heading(number, len(result.found), group)
        lines = [head, f"   {count(group.count, 'time')}{in_workers(group)}; {one.why}", *_places(group, result, now)]
        lines += [f"   hint: {group.hint}"] if group.hint else []
        yield "\n".join([*lines, group.traceback, "", ""])


def heading(number: int, total: int, group: Group) -> str:
    first = group.message.partition("\n")[0]
    return f"-- {number} of {total}: {group.type}{f': {first}' if first else ''}"


def in_workers(group: Group) -> str:
    """` in drafter-0, drafter-1 (3)`; nothing where none is known."""
    if not group.workers:
        return ""
    return " in " + ", ".join(name if times == 1 else f"{name} ({times})" for name, times in group.workers.items())


def _places(group: Group, result: Result, now: float) -> list[str]:
    def said(place: Place) -> str:
        when = clock(place.at + now - result.probe.observed_at, now)
        log = "its own log" if place.log == result.probe.log.path else place.log
        return f"{when if place.exact else f'by {when}'} at byte {place.offset:,} of {log}"

    if group.count == 1:
        return [f"   {said(group.first)}; fingerprint {group.fingerprint}"]
    return [f"   first {said(group.first)}", f"   last {said(group.last)}; fingerprint {group.fingerprint}"]


def of_what(result: Result) -> str:
    """After the last of them."""
    probe, verdict = result.probe, result.verdict
    total = sum(one.group.count for one in result.found)
    said = f"{count(total, 'exception')}, {len(result.found)} different" if result.found else "no exception"
    if result.left_out:
        said += f", and {result.left_out:,} of further kinds that are not shown"
    if result.gone and result.since is None and settled(probe.summary).findings_total > total + result.left_out:
        said += f" (the supervisor has seen more: {count(result.gone, 'file')} of its logs can no longer be read)"
    return (
        f"{probe.run_id} attempt {probe.attempt} on {result.target.name}: {verdict.state} ({verdict.why}); "
        f"{said} in {size(result.searched_bytes)} of its logs"
    )
