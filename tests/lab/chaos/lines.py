"""`logs` in its forms, each held against the files it is of."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass

from tests.lab.chaos import oracle
from tests.lab.chaos.court import Court, Meanwhile
from tests.lab.chaos.lane import Lane, Run
from tests.lab.chaos.laptop import Laptop
from tests.lab.chaos.observer import Truth, View
from tests.lab.chaos.oracle import NOT_WELL, Case, Finding, Lie
from tests.lab.chaos.pool import Verb


@dataclass(kw_only=True)
class Follower:
    """A `logs -f` that goes on beside other steps."""

    run: Run
    laptop: Laptop
    verb: Verb
    before: dict[str, View]
    truth: Truth
    began: float


class Lines(Court):
    """Each verb picks its run by `rng`, from `laptop` or from either."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self.followers: list[Follower] = []

    def logs(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        self.logs_of(self.lane.some_run(rng), rng, meanwhile, laptop)

    def logs_of(
        self, run: Run, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None
    ) -> None:
        if run.kind.name == "two_logs" or rng.random() < 0.3:
            self._logs(run, ["--json"], rng, meanwhile, laptop)
        else:
            self._logs(run, [], rng, meanwhile, laptop)

    def last_logs(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        self._logs(self.lane.some_run(rng), ["-n", str(rng.randint(1, 40))], rng, meanwhile, laptop)

    def grep_logs(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        self._logs(self.lane.some_run(rng), ["--grep", "tok-"], rng, meanwhile, laptop)

    def _logs(self, run: Run, how: list[str], rng: random.Random, meanwhile: Meanwhile, laptop: Laptop | None) -> None:
        laptop = laptop or self.lane.some_laptop(rng)
        if (run_id := self._id(run)) is None:
            return
        observer = run.box.observer
        before = observer.truth(run.token, observer.look(), content=True)
        outcome = self.lane.verb(laptop, "logs", run_id, *how, meanwhile=meanwhile)
        after = observer.truth(run.token, outcome.after[run.box.name], content=True)
        if not outcome.answered:
            return
        said, case, findings = outcome.said, Case(before=before, after=after, story=run.story), list[Finding]()
        shown = said.out
        if said.code in (0, 1):
            word = oracle.last_word(said.err)
            if word is None:
                if "error:" not in said.err:
                    findings.append(Finding(lie=Lie.CRASH, text=f"{' '.join(said.words)}: no last word about the run"))
            else:
                findings += self._state(word[1], word[2], case)
            findings += oracle.code(said.words, said.code, {0 if shown else 1})
            findings += self._lines(run, how, shown, case)
        elif said.code == 4:
            findings += oracle.exists(False, case)
        elif said.code == 3 and not (before.whole and after.whole):
            self.lane.ledger.count_unknown()  # nothing shows whose what is left of the log is
            self.lane.note(findings, outcome.where)
            return
        self._known(outcome, findings, self._place(run, outcome))

    def _lines(self, run: Run, how: list[str], shown: bytes, case: Case) -> list[Finding]:
        before, after, what = case.before, case.after, f"{' '.join(['logs', *how])} of {run.token}"
        self.lane.ledger.compare(len(shown))
        if after.run_id is None or ("cut" in run.story.deeds and not after.log.startswith(before.log)):
            return list(oracle.own_lines(shown, run.token))
        if how == ["--json"]:
            return list(oracle.placed_lines([json.loads(line) for line in shown.splitlines()], case))
        findings = list(oracle.own_lines(shown, run.token))
        if run.kind.name == "two_logs":
            return findings
        if not how:
            findings += oracle.whole_log(shown, before.log, after.log, what)
        elif how[0] == "-n":
            findings += oracle.last_lines(shown, before.log, after.log, int(how[1]), what)
        else:
            findings += oracle.matching_lines(shown, before.log, after.log, how[1].encode(), what)
        return findings

    def follow(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        """Begins to follow; its lines are judged at the audit, when the run is over."""
        lane, run = self.lane, self.lane.some_run(rng)
        laptop = laptop or lane.some_laptop(rng)
        if (run_id := self._id(run)) is None:
            return
        before, began = lane.look(), time.monotonic()
        truth = run.box.observer.truth(run.token, before[run.box.name], content=True)
        lane.tell(f"{laptop.name}: begins logs {run_id} -f")
        verb = laptop.type("logs", run_id, "-f", "--patience", "60")
        self.followers.append(Follower(run=run, laptop=laptop, verb=verb, before=before, truth=truth, began=began))
        if meanwhile is not None:
            meanwhile(verb)

    def end_followers(self) -> None:
        """Waits for all who follow; each ends when its run has."""
        for follower in self.followers:
            self._followed(follower)
        self.followers.clear()

    def _followed(self, follower: Follower) -> None:
        lane, run = self.lane, follower.run
        outcome = lane.outcome(follower.laptop, follower.verb, follower.before, follower.began)
        if not outcome.answered:
            return
        after = run.box.observer.truth(run.token, outcome.after[run.box.name], content=True)
        case, said, findings = Case(before=follower.truth, after=after, story=run.story), outcome.said, list[Finding]()
        lane.ledger.compare(len(said.out))
        findings += oracle.own_lines(said.out, run.token)
        if said.code in (0, 1):
            word = oracle.last_word(said.err)
            if word is not None:
                findings += self._state(word[1], word[2], case)
                findings += oracle.code(said.words, said.code, {1 if word[1] in NOT_WELL else 0})
            if run.kind.name != "two_logs" and "cut" not in run.story.deeds and after.run_id is not None:
                least = after.log if after.dead else follower.truth.log
                findings += oracle.whole_log(said.out, least, after.log, f"logs -f of {run.token}")
        elif said.code == 3 and "cut" in run.story.deeds:
            self.lane.ledger.count_unknown()
            self.lane.note(findings, outcome.where)
            return
        self._known(outcome, findings, self._place(run, outcome))
