"""What the lines of a log were of: a wrong run's log is how a day was once lost."""

from __future__ import annotations

import re

from orchestrator.health import age
from orchestrator.render.text import size
from orchestrator.verbs.logs import Logs

NOT_ERE = re.compile(r"\\[dDnt]|[*+?}]\?|\(\?")
"""What Perl's and Python's expressions have and grep -E has not: it takes \\d for a plain d."""


def of_what(found: Logs, grep: str | None) -> str:
    """After the last line."""
    probe, verdict = found.probe, found.verdict
    assert verdict is not None
    byte_age = age(probe.observed_at - found.last_byte_at) + " ago" if found.last_byte_at else "none yet"
    text = (
        f"{probe.run_id} attempt {probe.attempt} on {found.target.name}: {verdict.state} ({verdict.why}); "
        f"{found.matched:,} of {found.total:,} lines; last byte {byte_age}"
    )
    for log in found.foreign:
        text += f"; also {log['path']} from byte {log['base']:,} on"
        if log["before"]:
            text += f" ({size(log['before'])} from before are not shown)"
        if log.get("shared"):
            text += f", to byte {log['until']:,}: {log['shared']} writes it too, and nobody can tell whose the rest is"
    if grep is not None and not found.matched and (unknown := NOT_ERE.search(grep)):
        text += (
            f"; --grep is an extended regular expression as grep -E reads it, which does not know {unknown.group()}: "
            "write [0-9] for a digit, and repeat without ?"
        )
    return text


def broken_off(found: Logs, now: float, because: str) -> str:
    """After the last line that was shown, when there is no last word of the agent."""
    probe = found.probe
    return (
        f"{probe.run_id} attempt {probe.attempt} on {found.target.name}: last seen {found.seen.state} "
        f"{age(now - found.seen_at)} ago; {found.shown:,} lines shown; {because}"
    )
