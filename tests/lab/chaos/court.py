"""What every verb's answer goes through on its way to the oracle: which run it is of, and what was true of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.lab.chaos import oracle
from tests.lab.chaos.lane import Container, Lane, Outcome, Run
from tests.lab.chaos.oracle import Case, Finding, Lie
from tests.lab.chaos.pool import Verb

Meanwhile = Callable[[Verb], None] | None
"""What is done while the verb runs."""


class Court:
    """Of one lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def _id(self, run: Run) -> str | None:
        """As the observer knows it; None while there is no such run to be asked for."""
        return next(iter(run.box.observer.look().run_ids(run.token)), None)

    def _case(self, run: Run, outcome: Outcome) -> Case:
        truth, name = run.box.observer.truth, run.box.name
        before, after = truth(run.token, outcome.before[name]), truth(run.token, outcome.after[name])
        return Case(before=before, after=after, story=run.story)

    def _states(self, outcome: Outcome, rows: Iterable[tuple[str, str, str]]) -> list[Finding]:
        findings: list[Finding] = []
        for run_id, state, why in rows:
            run = self.lane.run_of(run_id, [*outcome.before.values(), *outcome.after.values()])
            if run is not None:
                findings += self._state(state, why, self._case(run, outcome))
        return findings

    def _state(self, state: str, why: str, case: Case) -> list[Finding]:
        self.lane.ledger.judge(state)
        return list(oracle.state(state, why, case))

    def _once(self, run: Run, outcome: Outcome) -> None:
        view = outcome.after[run.box.name]
        truth = run.box.observer.truth(run.token, view)
        self.lane.note(oracle.started_once(run.token, truth.starts, view.run_ids(run.token)), outcome.where)

    def _answer(self, outcome: Outcome) -> dict[str, Any] | None:
        answer = outcome.said.answer
        if answer is None:
            text = f"{' '.join(outcome.said.words)}: exit code {outcome.said.code}, and no JSON on stdout"
            self.lane.note([Finding(lie=Lie.CRASH, text=text)], outcome.where)
        return answer

    def _refused(self, outcome: Outcome, answer: dict[str, Any], findings: list[Finding], run: Run | None) -> None:
        findings += oracle.code(outcome.said.words, outcome.said.code, {int(answer["exit_code"])})
        if outcome.said.code == 4 and run is not None:
            findings += oracle.exists(False, self._case(run, outcome))
        self._known(outcome, findings, None if run is None else self._place(run, outcome))

    def _place(self, run: Run, outcome: Outcome) -> Container | None:
        """The only container that need answer for a run, as long as it is there: else each is asked for it."""
        case = self._case(run, outcome)
        return run.box if case.before.run_id and case.after.run_id else None

    def _known(self, outcome: Outcome, findings: list[Finding], box: Container | None = None) -> None:
        """Notes what was found; to say that it cannot be known is true only while something hides it."""
        if outcome.said.code == 3:
            if outcome.hidden(box):
                self.lane.ledger.count_unknown()
            else:
                words = " ".join(outcome.said.words)
                findings.append(Finding(lie=Lie.WRONG_CODE, text=f"{words}: exit code 3, and nothing was broken"))
        if outcome.said.code == 2:
            findings.append(Finding(lie=Lie.WRONG_CODE, text=f"{' '.join(outcome.said.words)}: exit code 2"))
        self.lane.note(findings, outcome.where)
