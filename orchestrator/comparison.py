"""Did the fix work? Two runs as they were just seen in, one answer out. Pure; `verbs/compare` gathers, `render` words.

The question is asked of a point: where the first run failed. The second one says something about it only once it has
been past that point, or has failed in the same way. Everything short of that is no answer, and is said to be none.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from orchestrator.record import record

Kind = Literal["same", "printed", "different", "new", "gone", "fine", "not_yet", "no_answer"]
Fate = Literal["same", "printed", "gone", "not reached", "new"]

EXIT_CODES: dict[Kind, int] = {
    "gone": 0, "fine": 0, "same": 1, "printed": 1, "different": 1, "new": 1, "not_yet": 3, "no_answer": 3,
}  # fmt: skip
HEADLINES: dict[Kind, str] = {
    "same": "SAME FAILURE", "printed": "NOT GONE", "different": "ANOTHER FAILURE", "new": "NEW FAILURE", "gone": "GONE",
    "fine": "NO FAILURE", "not_yet": "NOT YET KNOWN", "no_answer": "NO ANSWER",
}  # fmt: skip


@record
class Failure:
    """What a run, or workers of it, ended with."""

    fingerprint: str
    """Of an exception, its type and frames; of an end without one, how it ended."""
    text: str
    """`RuntimeError: boom`, `exit code 3`, `SIGKILL for memory`."""
    workers: list[str] = field(default_factory=list)
    """Those that ended with it; none: the run as a whole."""
    step: int | None = None
    """The last step before it, of these workers or of the run; None: before the first."""
    traceback: str = ""

    @property
    def who(self) -> str:
        return ", ".join(self.workers) or "the run"

    @property
    def place(self) -> str:
        return "before the first step" if self.step is None else f"after step {self.step:,}"


@record
class Side:
    """One of the two runs, as far as a comparison goes. `failures` are in the order in which they came, the one that
    the run ended with first."""

    run_id: str
    state: str
    why: str
    live: bool
    step: int | None
    phase: str | None
    workers: dict[str, int | None]
    failures: list[Failure]
    printed: list[str] = field(default_factory=list)
    """Fingerprints of exceptions that were printed and ended nothing."""


@record
class Told:
    """What became of one failure."""

    failure: Failure
    fate: Fate
    of: Literal["a", "b"]
    """Whose it is."""
    seen: str
    """By what that is known."""


@record
class Answer:
    kind: Kind
    sentence: str
    told: list[Told]

    @property
    def headline(self) -> str:
        return HEADLINES[self.kind]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.kind]


def answer(a: Side, b: Side, *, changed: bool) -> Answer:
    """Of run `a`, which came first, and `b`. `changed`: whether anything is known that was done differently."""
    told = [_fate(failure, b) for failure in a.failures]
    known = {failure.fingerprint for failure in a.failures}
    told += [
        Told(failure=failure, fate="new", of="b", seen=f"{failure.who}, {failure.place}")
        for failure in b.failures
        if failure.fingerprint not in known
    ]
    new = [one.failure for one in told if one.fate == "new"]
    if not a.failures:
        kind: Kind = "new" if new else "fine"
        sentence = f"A did not fail, B did: {_what(new[0])}" if new else f"neither failed; B: {b.state}, {b.why}"
        return Answer(kind=kind, sentence=sentence, told=told)
    point, first = a.failures[0], told[0]
    if first.fate == "same":
        kind, sentence = "same", f"B failed as A did: {point.text} (A: {point.who} {point.place}; B: {first.seen})"
    elif first.fate == "printed":
        kind, sentence = (
            "printed",
            f"B printed the exception that A ended with ({point.text}), and has not ended with it",
        )
    elif first.fate == "gone":
        if new:
            kind = "different"
            sentence = f"B got past where A failed ({first.seen}), and failed elsewhere: {_what(new[0])}"
        else:
            kind, sentence = "gone", f"B got past where A failed ({first.seen}), and shows nothing of {point.text}"
    elif b.live:
        kind, sentence = "not_yet", f"B has not got to where A failed: {first.seen}; ask again later"
    else:
        own = f" ({b.failures[0].text})" if b.failures else ""
        kind = "no_answer"
        ended = f"never started ({b.why})" if b.state == "NEVER_STARTED" else f"ended{own} before {_point(point)}"
        sentence = f"B {ended}: it says nothing about {'the fix' if changed else 'what A failed with'}"
    if not changed:
        if kind in ("gone", "different"):
            sentence += "; but nothing is known to have changed between them, so that this may be chance"
        elif kind in ("same", "printed"):
            sentence += "; nothing is known to have changed between them: no fix was in it"
    return Answer(kind=kind, sentence=sentence, told=told)


def _what(failure: Failure) -> str:
    return f"{failure.text} ({failure.who}, {failure.place})"


def _point(failure: Failure) -> str:
    """Where A failed, as something that B has to be past."""
    who = failure.workers[0] if failure.workers else "it"
    if failure.step is None:
        return f"{who} made its first step"
    return f"{who} was past step {failure.step:,}"


def _fate(failure: Failure, b: Side) -> Told:
    """What became of a failure of A's in B."""
    again = next((one for one in b.failures if one.fingerprint == failure.fingerprint), None)
    if again is not None:
        return Told(failure=failure, fate="same", of="a", seen=f"{again.who} {again.place}")
    if failure.fingerprint in b.printed:
        return Told(failure=failure, fate="printed", of="a", seen="it stands in B's logs; nothing ended with it")
    past, seen = _past(failure, b)
    return Told(failure=failure, fate="gone" if past else "not reached", of="a", seen=seen)


def _past(failure: Failure, b: Side) -> tuple[bool, str]:
    """Whether B got past the point of a failure, and by what that is seen.

    Every worker that failed has to be past it; of one that B does not have, or that takes no steps (a target thread),
    the run as a whole.
    """
    needed = 1 if failure.step is None else failure.step + 1
    least: tuple[int, str] | None = None
    for worker in failure.workers:
        step = b.workers.get(worker)
        if step is not None and (least is None or step < least[0]):
            least = step, worker
        elif worker in b.workers and step is None and not worker.startswith("target"):
            least = 0, worker
    step, who = least if least is not None else (b.step or 0, "it")
    if not step:
        phase = f", phase {b.phase}" if b.phase else ""
        return False, f"{'B' if who == 'it' else who} has made no step{phase}"
    return step >= needed, f"{'B' if who == 'it' else who} is at step {step:,}"
