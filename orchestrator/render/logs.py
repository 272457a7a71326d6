"""What the lines of a log were of: a wrong run's log is how a day was once lost."""

from __future__ import annotations

import re
from datetime import datetime

from orchestrator.health import age
from orchestrator.render.text import count, size
from orchestrator.verbs.logs import Logs, Since

NOT_ERE = re.compile(r"\\[dDnt]|[*+?}]\?|\(\?")
"""What Perl's and Python's expressions have and grep -E has not: it takes \\d for a plain d."""
DAY_S = 86400.0


def of_what(found: Logs, grep: str | None) -> str:
    """After the last line."""
    probe, verdict = found.probe, found.verdict
    assert verdict is not None
    byte_age = age(probe.observed_at - found.last_byte_at) + " ago" if found.last_byte_at else "none yet"
    text = (
        f"{probe.run_id} attempt {probe.attempt} on {found.target.name}: {verdict.state} ({verdict.why}); "
        f"{found.matched:,} of {found.total:,} lines; last byte {byte_age}"
    )
    if verdict.state == "QUEUED":
        text += "; its program has not started"
    if found.copied:
        text += f"; {size(found.copied)} of its log are older lines, which it has copied there from another file"
    others = [log for log in found.foreign if log["path"] not in found.repeats]
    whole = [log for log in others if not (log["before"] or log["restarts"] or log.get("shared"))]
    if found.repeats:
        more = f" and {len(found.repeats) - 1} more say" if len(found.repeats) > 1 else " says"
        text += f"; {found.repeats[0]}{more} the same, which is not shown again"
    for log in [log for log in others if log not in whole[1:]]:
        text += f"; also {log['path']} from byte {log['base']:,} on"
        if log in whole[:1] and len(whole) > 1:
            text += f", and {len(whole) - 1} more of its own logs"
        if log["before"]:
            text += f" ({size(log['before'])} from before are not shown)"
        if log["restarts"]:
            begun = count(log["restarts"], "time")
            text += f" (begun again {begun}: what it held before is shown as far as it is still there)"
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


def mark(log: str) -> str:
    """Before lines of another file than the ones above: as `tail` of several files has it."""
    return f"==> {log} <=="


def since(found: Since, asked: float, started_at: float, now: float) -> str:
    """From when on lines are shown, by this machine's clock: of the times in `found`, `at` is what `asked` is there."""
    ahead_s = asked - found.at

    def here(at: float) -> str:
        return clock(at + ahead_s, now)

    text = f"since {clock(asked, now)} ({age(now - asked)} ago)"
    if found.at < started_at:
        return f"{text}: the run began only {here(started_at)}; all its lines"
    written = [one for one in found.files if not one.quiet]
    if not written:
        return f"{text}: nothing has been written"
    parts = []
    for one in written:
        part = "all its lines"
        if one.mark_at is not None:
            part = f"from the mark of {here(one.mark_at)} on, so up to {age(found.at - one.mark_at)} too early"
        parts.append(part if len(found.files) == 1 else f"{one.path} {part}")
    return f"{text}: {'; '.join(parts)}"


def clock(at: float, now: float) -> str:
    """`14:00:07`; with the date when that is long ago."""
    form = "%H:%M:%S" if abs(now - at) < DAY_S / 2 else "%Y-%m-%d %H:%M:%S"
    return datetime.fromtimestamp(at).strftime(form)
