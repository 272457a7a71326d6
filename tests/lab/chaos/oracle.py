"""What was said against what was true: pure, so that a false word can be fed to it.

Every judgement has the truth of the moment before a verb began and of the moment after it ended. A run's life only goes
one way (not begun, alive, dead), so the two moments are enough: a claim is false only if it was true at no moment in
between. What changes while a verb runs is a race, and no lie.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.lab.chaos.kinds import KINDS, TOKEN, Kind
from tests.lab.chaos.observer import Process, Truth

ALIVE = frozenset({"RUNNING", "STARTING", "DEGRADED", "STALLED", "STOPPING"})
DEAD = frozenset({"SUCCEEDED", "FAILED", "KILLED", "STOPPED", "NEVER_STARTED", "LOST"})
NOT_WELL = frozenset({"DEGRADED", "STALLED", "FAILED", "KILLED", "NEVER_STARTED", "LOST"})
LEFT = re.compile(r"processe?s? \([\d, .]+\)[a-z ]* left|process(?:es)? \([\d, .]+\) alive")
CODES = frozenset({0, 1, 2, 3, 4, 130})
SAID_OF = re.compile(r"^([a-z0-9-]+) attempt 1 on \S+: ([A-Z_]+) \((.*)\); [\d,]+ of [\d,]+ lines", re.MULTILINE)


class Lie(Enum):
    """What is counted; the value is the head of its row."""

    FALSE_ALIVE = "false alive"
    FALSE_DEAD = "false dead"
    WRONG_END = "ended otherwise than said"
    WRONG_RUN = "lines of another run"
    LOST_BYTES = "bytes lost, or shown twice"
    DOUBLE_START = "double starts"
    ORPHAN = 'orphans after "stopped"'
    LEFT_BEHIND = "left in the container by specctl"
    LATE = "past their deadline"
    CRASH = "tracebacks, unknown exit codes"
    WRONG_CODE = "wrong exit codes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    lie: Lie
    text: str


@dataclass(kw_only=True)
class Story:
    """What was done to one run: only that may be said to have ended it. Noted before it is done."""

    kind: Kind
    deeds: set[str] = field(default_factory=set)
    """`stop`, `restart` of the container, `supervisor` and `agent` killed, `disk` full, log `cut`, SIGTERM ..."""

    def allows(self, state: str, why: str, after: Truth) -> bool:
        """Whether the run may have ended like this."""
        signals = {deed for deed in self.deeds if deed.startswith("SIG")}
        natural = after.ended or self.kind.name in ("daemon", "import", "segv")
        if state == self.kind.state and self.kind.said in why and (natural or (signals and self.kind.shell)):
            return True
        if state == "STOPPED":
            return "stop" in self.deeds
        if state == "KILLED":
            if {"stop", "agent"} <= self.deeds and ("SIGTERM" in why or "SIGKILL" in why):
                return True  # who stopped it was killed before it could put on record that it did
            return any(name in why for name in signals) or "restart" in self.deeds
        if state == "FAILED":  # a shell says of its child's signal what it can; a restart ends its child first
            return bool(self.kind.shell) and bool(signals or "restart" in self.deeds)
        if state == "SUCCEEDED":  # of a pipe the last command counts
            return bool(self.kind.shell) and bool(signals or "restart" in self.deeds) and "exit code 0" in why
        if state == "LOST":
            return bool(self.deeds & {"restart", "supervisor", "disk"})
        return state == "NEVER_STARTED" and not after.started


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run while one verb ran."""

    before: Truth
    after: Truth
    story: Story


# --- a run's state --------------------------------------------------------------------------------------------------


def state(said: str, why: str, case: Case) -> Iterator[Finding]:
    """Of any verb that names a state: status, ls, show, stop, launch, and the last word of logs."""
    before, after = case.before, case.after
    where = f"{after.run_id or before.run_id} ({case.story.kind.name}): {said} ({why})"
    if said in DEAD:
        if LEFT.search(why):  # what was started has ended, what it has started has not
            if before.dead:
                yield Finding(lie=Lie.FALSE_ALIVE, text=f"{where}, but nothing of it was alive before it was asked")
        elif after.alive:
            yield Finding(lie=Lie.FALSE_DEAD, text=f"{where}, but {sorted(after.alive)} live after that")
        elif not case.story.allows(said, why, after):
            deeds = ", ".join(sorted(case.story.deeds)) or "nothing"
            left = "has left by itself" if after.ended else "has not left by itself"
            yield Finding(lie=Lie.WRONG_END, text=f"{where}, but it had {deeds} done to it, and {left}")
    elif said == "QUEUED" or "program not started yet" in why:
        if before.starts:
            lie = Lie.FALSE_DEAD if after.alive else Lie.FALSE_ALIVE
            yield Finding(lie=lie, text=f"{where}, but it had begun before it was asked")
    elif said == "STOPPING" and "no process is left" in why:
        if after.alive:
            yield Finding(lie=Lie.FALSE_DEAD, text=f"{where}, but {sorted(after.alive)} live after that")
    elif said in ALIVE:
        if before.dead:
            yield Finding(lie=Lie.FALSE_ALIVE, text=f"{where}, but nothing of it was alive before it was asked")
        elif not after.started:
            yield Finding(lie=Lie.FALSE_ALIVE, text=f"{where}, but it has not begun even now")
        elif said == "DEGRADED" and case.story.kind.name != "worker":
            yield Finding(lie=Lie.WRONG_END, text=f"{where}, but it has no workers to lose")
    elif said != "UNREACHABLE":
        yield Finding(lie=Lie.CRASH, text=f"{where}: no such state")


def exists(said: bool, case: Case) -> Iterator[Finding]:
    """Of a verb that says whether there is such a run."""
    if not said and case.before.run_id and case.after.run_id:
        lie = Lie.FALSE_DEAD if case.after.alive else Lie.LOST_BYTES
        yield Finding(lie=lie, text=f"{case.after.run_id} is not known, but it is there")


def stopped(code: int, remaining: list[Any], case: Case) -> Iterator[Finding]:
    """Of a stop that says it is done."""
    if code == 0 and case.after.alive:
        yield Finding(
            lie=Lie.ORPHAN, text=f"{case.after.run_id} is said to be stopped, but {sorted(case.after.alive)} live"
        )
    if remaining and case.before.dead:
        yield Finding(lie=Lie.FALSE_ALIVE, text=f"{case.after.run_id} was dead, and {remaining} are said to be left")


def launched(verified: bool, said: str | None, case: Case, *, undisturbed: bool) -> Iterator[Finding]:
    """Of a launch that was answered."""
    where = f"launch of {case.after.token} ({case.story.kind.name})"
    if verified and not case.after.started:
        yield Finding(lie=Lie.FALSE_ALIVE, text=f"{where} is verified, but nothing has begun")
    if not verified and undisturbed and case.story.kind.lasting and case.after.starts and not case.story.deeds:
        yield Finding(lie=Lie.WRONG_CODE, text=f"{where} is not verified ({said}), but it lived and nothing was wrong")


def left_behind(processes: list[Process]) -> Iterator[Finding]:
    """Of what is in a container in which no run lives, and of which nobody has asked anything for a while."""
    for process in processes:
        if process.agent or process.supervises:
            what = f"the supervisor of {process.supervises}" if process.supervises else "an agent"
            yield Finding(lie=Lie.LEFT_BEHIND, text=f"{what} lives, process {process.inner} ({process.name})")


def started_once(token: str, starts: int, run_ids: list[str]) -> Iterator[Finding]:
    """Of one command line that was typed once, however often its link broke."""
    if starts > 1 or len(run_ids) > 1:
        yield Finding(lie=Lie.DOUBLE_START, text=f"{token} has begun {starts} times, as {', '.join(run_ids)}")


# --- lines ----------------------------------------------------------------------------------------------------------


def own_lines(shown: bytes, token: str) -> Iterator[Finding]:
    """No line of another run may be among them."""
    for match in TOKEN.finditer(shown):
        if match[0].decode() != token:
            yield Finding(lie=Lie.WRONG_RUN, text=f"lines of {match[0].decode()} among those of {token}")
            return


def whole_log(shown: bytes, before: bytes, after: bytes, what: str) -> Iterator[Finding]:
    """All lines of a log, as it stood at some moment in between; a last line without an end is given one."""
    text = shown[:-1] if shown.endswith(b"\n") and not after.startswith(shown) else shown
    if not after.startswith(text):
        at = next((at for at, pair in enumerate(zip(text, after, strict=False)) if pair[0] != pair[1]), len(after))
        yield Finding(
            lie=Lie.LOST_BYTES,
            text=f"{what}: byte {at:,} of {len(text):,} is {text[at:at + 60]!r}, and {after[at:at + 60]!r} in the file",
        )  # fmt: skip
    elif len(text) < len(before):
        yield Finding(lie=Lie.LOST_BYTES, text=f"{what}: {len(text):,} bytes are shown, and {len(before):,} were there")


def last_lines(shown: bytes, before: bytes, after: bytes, count: int, what: str) -> Iterator[Finding]:
    """The last lines of a log, as it stood at some moment in between."""
    lines = shown.splitlines()
    there = after.splitlines()
    for end in range(len(before.splitlines()), len(there) + 1):
        for cut in (lines, lines[:-1]):  # the last line may have grown meanwhile
            if cut == there[max(0, end - count) : end][: len(cut)] and len(lines) == min(count, end):
                return
    yield Finding(
        lie=Lie.LOST_BYTES, text=f"{what}: {len(lines)} lines, the first {lines[:1]!r}, are never the last {count}"
    )


def matching_lines(shown: bytes, before: bytes, after: bytes, word: bytes, what: str) -> Iterator[Finding]:
    """The lines of a log that hold `word`, as it stood at some moment in between."""
    lines = shown.splitlines()
    least = sum(word in line for line in before.splitlines())
    there = [line for line in after.splitlines() if word in line]
    same = lines == there[: len(lines)] or lines[:-1] == there[: len(lines) - 1]
    if not same or len(lines) < least:
        yield Finding(lie=Lie.LOST_BYTES, text=f"{what}: {len(lines)} lines with {word!r}, and {least} were there")


def placed_lines(objects: list[dict[str, Any]], case: Case) -> Iterator[Finding]:
    """`logs --json`: each line says where it stands, so each file can be put together again."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    for one in objects:
        found.setdefault(str(one["log"]), []).append((int(one["offset"]), str(one["line"]).encode()))
    own = {True: b"", False: b""}
    for path, lines in found.items():
        base = lines[0][0]
        at = base
        for offset, line in lines:
            if offset != at:
                yield Finding(lie=Lie.LOST_BYTES, text=f"{path}: a line at byte {offset:,}, and one was due at {at:,}")
                return
            at += len(line) + 1
        own[path.endswith(".a1.log")] += b"".join(line + b"\n" for _, line in lines)
    yield from own_lines(own[True] + own[False], case.after.token)
    yield from whole_log(own[True], case.before.log, case.after.log, f"{case.after.run_id}")
    yield from whole_log(own[False], case.before.own, case.after.own, f"the own log of {case.after.run_id}")


def last_word(err: str) -> tuple[str, str, str] | None:
    """(run id, state, why) that `logs` says of what it has shown."""
    found = SAID_OF.findall(err)
    return found[-1] if found else None


# --- every verb -----------------------------------------------------------------------------------------------------


def manners(words: list[str], code: int, err: str, *, killed: bool, late: bool) -> Iterator[Finding]:
    """What holds for every verb, whatever it was asked."""
    if late:
        yield Finding(lie=Lie.LATE, text=f"{' '.join(words)} was not over")
    elif "Traceback (most recent call last)" in err and "orchestrator" in err:
        yield Finding(lie=Lie.CRASH, text=f"{' '.join(words)}: a traceback of its own")
    elif code not in CODES and not (killed and code == -9):
        yield Finding(lie=Lie.CRASH, text=f"{' '.join(words)}: exit code {code}")


def code(words: list[str], got: int, wanted: set[int]) -> Iterator[Finding]:
    if got not in wanted:
        yield Finding(
            lie=Lie.WRONG_CODE, text=f"{' '.join(words)}: exit code {got}, not {' or '.join(map(str, sorted(wanted)))}"
        )


__all__ = ["ALIVE", "DEAD", "KINDS", "NOT_WELL", "Case", "Finding", "Lie", "Story"]
