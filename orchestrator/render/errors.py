"""How the exceptions of many runs look, and the ends without any: one heading each, and the runs below it."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.health import age
from orchestrator.render.log_errors import heading, in_workers
from orchestrator.render.text import count, one_line
from orchestrator.verbs.errors import Alike, Kind, Result, Seen


def texts(result: Result, now: float, *, tracebacks: bool) -> Iterator[str]:
    """One text an exception, then one for each way in which runs failed without any, ready for stdout."""
    total = len(result.kinds) + len(result.alike)
    for number, kind in enumerate(result.kinds, 1):
        lines = [
            heading(number, total, kind.newest),
            f"   {count(kind.count, 'time')} in {count(len(kind.seen), 'run')}, {_when(kind, now)}; "
            f"fingerprint {kind.fingerprint}",
            *([f"   hint: {kind.hint}"] if kind.hint else []),
            *(f"   {_run(one)}" for one in kind.seen),
        ]
        yield "\n".join([*lines, *([kind.traceback] if tracebacks else []), "", ""])
    for number, alike in enumerate(result.alike, len(result.kinds) + 1):
        lines = [
            f"-- {number} of {total}: {one_line(alike.ending.told)}",
            f"   {count(len(alike.failed), 'run')} without an exception, {_ended(alike, now)}",
            *(f"   {one.run.run_id} on {one.run.target.name}: {one.ending.state}" for one in alike.failed),
        ]
        yield "\n".join([*lines, "", ""])


def _ended(alike: Alike, now: float) -> str:
    newest, oldest = (f"{age(now - alike.failed[at].at)} ago" for at in (0, -1))
    return newest if len(alike.failed) == 1 else f"first {oldest}, last {newest}"


def _when(kind: Kind, now: float) -> str:
    last = f"{age(now - kind.last_at)} ago"
    return last if kind.count == 1 else f"first {age(now - kind.first_at)} ago, last {last}"


def _run(one: Seen) -> str:
    group, probe = one.judged.group, one.result.probe
    often = "" if group.count == 1 else f"{group.count:,} times"
    said = f"{often}{in_workers(group)}".strip()
    state = one.result.verdict.state
    why = {"run": f"{state}, the run ended with it", "worker": f"{state}, {one.judged.why}"}.get(
        one.judged.ended or "", one.judged.why
    )
    return f"{probe.run_id} on {one.result.target.name}{f', {said}' if said else ''}: {why}"


def of_what(result: Result) -> str:
    """After the last of them."""
    total = sum(kind.count for kind in result.kinds)
    failed = sum(len(alike.failed) for alike in result.alike)
    said = f"{count(total, 'exception')}, {len(result.kinds)} different," if result.kinds else "no exception"
    without = f"; {count(failed, 'run')} ended badly without one" if failed else ""
    older = f"; {count(result.older, 'older run')} not looked at: --all" if result.older else ""
    more = ""
    if result.kinds:
        more = "; specctl logs RUN --errors has the tracebacks of one, --traceback of all"
    elif failed:
        more = "; specctl logs RUN -n 20 has the last lines of one"
    return f"{said} in {count(result.runs, 'run')}{without}{older}{more}"
