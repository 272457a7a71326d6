"""How the exceptions of many runs look: one heading each, the runs below it, and the traceback if it is wanted."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.health import age
from orchestrator.render.log_errors import heading, in_workers
from orchestrator.render.text import count
from orchestrator.verbs.errors import Kind, Result, Seen


def texts(result: Result, now: float, *, tracebacks: bool) -> Iterator[str]:
    """One text an exception, ready for stdout."""
    for number, kind in enumerate(result.kinds, 1):
        lines = [
            heading(number, len(result.kinds), kind.newest),
            f"   {count(kind.count, 'time')} in {count(len(kind.seen), 'run')}, {_when(kind, now)}; "
            f"fingerprint {kind.fingerprint}",
            *([f"   hint: {kind.hint}"] if kind.hint else []),
            *(f"   {_run(one)}" for one in kind.seen),
        ]
        yield "\n".join([*lines, *([kind.traceback] if tracebacks else []), "", ""])


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
    said = f"{count(total, 'exception')}, {len(result.kinds)} different," if result.kinds else "no exception"
    older = f"; {count(result.older, 'older run')} not looked at: --all" if result.older else ""
    more = "" if result.kinds == [] else "; specctl logs RUN --errors has the tracebacks of one, --traceback of all"
    return f"{said} in {count(result.runs, 'run')}{older}{more}"
