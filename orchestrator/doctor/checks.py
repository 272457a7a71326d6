"""Every check of the doctor's in its order, and the round that makes them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.doctor import gpus, machine, reach, resources
from orchestrator.doctor.check import Check, Examined, Outcome

CHECKS: list[Check] = [*machine.CHECKS, *resources.CHECKS, *gpus.CHECKS]


def examine(examined: Examined) -> Iterator[tuple[str, Outcome]]:
    """(name of the check or rung, what it found) of all there is to say of a target."""
    yield from reach.rungs(examined)
    for check in CHECKS:
        if check.full and examined.quick:
            continue
        for outcome in _made(check, examined):
            yield check.name, outcome


def _made(check: Check, examined: Examined) -> Iterator[Outcome]:
    report = examined.report
    if report is None:
        yield Outcome(status="unknown", what=f"not looked at: {examined.broken} comes first")
    elif check.personal and not {"user-missing", "user-other"}.isdisjoint(report.facts):
        yield Outcome(status="unknown", what="not looked at: user comes first")
    elif report.looked_at(check.part):
        yield from check.look(examined)
    elif report.busy == check.part:
        yield Outcome(
            status="fail", what=f"it hangs at the look at {report.busy}, as a launch would: {report.broke}",
            evidence="everything before that was told, and nothing after it",
            mend=examined.hands.inside("ps axo stat,pid,wchan:32,args | grep '^D'"),
        )  # fmt: skip
    else:
        yield Outcome(status="unknown", what=f"not looked at: {report.broke}, at {report.busy or 'the beginning'}")
