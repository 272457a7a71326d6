"""What is done in a lane, one step after the other, and how each verb's answer is brought before the oracle."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.lab.chaos import faults, oracle
from tests.lab.chaos.lane import Container, Lane, Outcome, Run
from tests.lab.chaos.laptop import Laptop
from tests.lab.chaos.observer import Truth
from tests.lab.chaos.oracle import NOT_WELL, Case, Finding, Lie
from tests.lab.chaos.pool import Verb

GRACE_S = "1"
LEAVES_S = 90.0
"""How long what a verb has run in the container may outlive the verb that was killed: its deadline there."""
EPISODES = 6
"""Launches between two audits."""
Meanwhile = Callable[[Verb], None] | None


@dataclass(kw_only=True)
class Follower:
    """A `logs -f` that goes on beside other steps."""

    run: Run
    laptop: Laptop
    verb: Verb
    before: dict[str, Any]
    truth: Truth
    began: float


class Actor:
    """Does steps in one lane until enough was launched."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.followers: list[Follower] = []

    def episodes(self, launches: int) -> None:
        lane = self.lane
        while lane.launches < launches:
            for _ in range(EPISODES):
                if lane.launches < launches:
                    self.episode(random.Random(lane.rng.getrandbits(64)))
            self.audit(random.Random(lane.rng.getrandbits(64)))

    def episode(self, rng: random.Random) -> None:
        """A launch, and a few steps around what is there."""
        lane = self.lane
        lane.steps += 1
        if rng.random() < 0.25:
            self.meanwhile(rng, self.launch)
        elif rng.random() < 0.1:
            runs = [lane.new_run(rng), lane.new_run(rng)]
            self.together(rng, *(partial(self.launch, run=run) for run in runs))
        else:
            self.launch(rng)
        for _ in range(rng.randint(2, 4)):
            lane.steps += 1
            choice = rng.random()
            if choice < 0.35:
                self.any_verb(rng)
            elif choice < 0.6:
                self.under(rng)
            elif choice < 0.85:
                self.meanwhile(rng, self.any_verb)
            else:
                self.together(rng, self.any_verb, self.any_verb)

    # --- ways of doing a verb ---------------------------------------------------------------------------------------

    def meanwhile(self, rng: random.Random, action: Callable[..., None]) -> None:
        """A verb, and a fault in the middle of it, or its own end by SIGKILL."""
        lane, delay_s, lasting_s = self.lane, rng.random() ** 2 * 3.0, rng.random() * 2.5
        fault = None if rng.random() < 0.35 else rng.choice(faults.QUICK)
        theirs = random.Random(rng.getrandbits(64))
        workers = []

        def begin(verb: Verb) -> None:
            def work() -> None:
                if verb.over.wait(delay_s):
                    return
                if fault is None:
                    lane.tell(f"SIGKILL to specctl {' '.join(verb.words)}")
                    verb.kill()
                    return
                with lane.fault(fault, theirs):
                    verb.over.wait(lasting_s)

            workers.append(threading.Thread(target=work))
            workers[0].start()

        action(rng, begin)
        for worker in workers:
            worker.join()

    def under(self, rng: random.Random) -> None:
        """Verbs while one fault lasts, or two."""
        chosen = [rng.choice(faults.ALL) for _ in range(1 if rng.random() < 0.6 else 2)]
        with contextlib.ExitStack() as stack:
            for fault in dict.fromkeys(chosen):
                stack.enter_context(self.lane.fault(fault, rng))
            for _ in range(rng.randint(1, 2)):
                self.any_verb(rng)

    def together(self, rng: random.Random, *actions: Callable[..., None]) -> None:
        """Verbs in the same instant, from two laptops."""
        errors: list[BaseException] = []

        def work(action: Callable[..., None], own: random.Random, laptop: Laptop) -> None:
            try:
                action(own, None, laptop)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=(action, random.Random(rng.getrandbits(64)), laptop))
            for action, laptop in zip(actions, self.lane.laptops, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def any_verb(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        weights = {
            self.status: 3, self.status_all: 3, self.logs: 3, self.last_logs: 1, self.grep_logs: 1, self.stop: 4,
            self.show: 1, self.ls: 1, self.follow: 2, self.push: 1, self.pull: 1, self.prune: 1,
        }  # fmt: skip
        [action] = rng.choices(list(weights), list(weights.values()))
        action(rng, meanwhile, laptop)

    # --- verbs ------------------------------------------------------------------------------------------------------

    def launch(
        self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None, run: Run | None = None
    ) -> None:
        lane, laptop = self.lane, laptop or self.lane.some_laptop(rng)
        run = run or lane.new_run(rng)
        until = "step" if run.kind.steps and rng.random() < 0.15 else "process"
        words = ["launch", run.box.name, "--until", until, "--json", "--", *run.kind.argv(run.token)]
        outcome = lane.verb(laptop, *words, meanwhile=meanwhile)
        said = outcome.said
        if outcome.answered and (answer := self._answer(outcome)) is not None:
            findings: list[Finding] = []
            case = self._case(run, outcome)
            verified = bool(answer.get("verified"))
            state = answer.get("state")
            undisturbed = not outcome.hidden(run.box) and not lane.disk_was_full(run.box)
            if state is not None:
                why = str((answer.get("error") or {}).get("message", ""))
                why = why.removeprefix(f"{state}: ") if not verified else ""
                findings += self._state(state, self._why(run, outcome, state, why), case)
            findings += oracle.launched(verified, state, case, undisturbed=undisturbed)
            wanted = {0} if verified else {1}
            if "exit_code" in answer:
                wanted = {int(answer["exit_code"])}
                if undisturbed and not run.story.deeds:
                    findings += oracle.code(said.words, said.code, {0, 1})
            findings += oracle.code(said.words, said.code, wanted)
            self._known(outcome, findings, run.box)
        self._once(run, outcome)

    def _why(self, run: Run, outcome: Outcome, state: str, why: str) -> str:
        """A launch words an ending as a failure, with the failure's own text in its place: the end is then said by the
        state alone."""
        return why if not run.kind.said or run.kind.state != state else f"{why} {run.kind.said}"

    def status(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        run, laptop = self.lane.some_run(rng), laptop or self.lane.some_laptop(rng)
        run_id = self._id(run)
        if run_id is None:
            return
        outcome = self.lane.verb(laptop, "status", run_id, "--json", meanwhile=meanwhile)
        if outcome.answered and (answer := self._answer(outcome)) is not None:
            self._rows(outcome, answer, named=run)

    def status_all(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        outcome = self.lane.verb(laptop or self.lane.some_laptop(rng), "status", "--json", meanwhile=meanwhile)
        if outcome.answered and (answer := self._answer(outcome)) is not None:
            self._rows(outcome, answer)

    def _rows(self, outcome: Outcome, answer: dict[str, Any], named: Run | None = None) -> None:
        findings: list[Finding] = []
        if "error" in answer:
            self._refused(outcome, answer, findings, named)
            return
        rows = {row["run_id"]: row for row in answer["runs"]}
        findings += self._states(outcome, ((row["run_id"], row["state"], row["why"]) for row in rows.values()))
        silent = {target["name"] for target in answer["targets"] if not target["reachable"]}
        for run in self.lane.runs if named is None else [named]:
            case = self._case(run, outcome)
            if run.box.name not in silent:
                findings += oracle.exists(case.after.run_id in rows, case)
        states = {row["state"] for row in rows.values()}
        unknown = bool(silent) or "UNREACHABLE" in states
        bad = named is not None and bool(states & NOT_WELL)
        findings += oracle.code(outcome.said.words, outcome.said.code, {3 if unknown else 1 if bad else 0})
        self._known(outcome, findings, None if named is None else self._place(named, outcome))

    def ls(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        laptop = laptop or self.lane.some_laptop(rng)
        outcome = self.lane.verb(laptop, "ls", "-n", "0", "--json", meanwhile=meanwhile)
        if not outcome.answered or (answer := self._answer(outcome)) is None:
            return
        findings: list[Finding] = []
        gone = [row["run_id"] for row in answer["runs"] if row["state"] == "GONE"]
        rows = [row for row in answer["runs"] if row["state"] not in ("GONE", "UNREACHABLE")]
        findings += self._states(outcome, ((row["run_id"], row["state"], row["why"]) for row in rows))
        for run_id in gone:
            if (run := self.lane.run_of(run_id, outcome.after.values())) is not None:
                findings += oracle.exists(False, self._case(run, outcome))
        wanted = 3 if answer["unreachable"] else 0 if answer["runs"] else 1
        findings += oracle.code(outcome.said.words, outcome.said.code, {wanted})
        self._known(outcome, findings)

    def show(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        run, laptop = self.lane.some_run(rng), laptop or self.lane.some_laptop(rng)
        if (run_id := self._id(run)) is None:
            return
        outcome = self.lane.verb(laptop, "show", run_id, "--json", meanwhile=meanwhile)
        if not outcome.answered or (answer := self._answer(outcome)) is None:
            return
        findings: list[Finding] = []
        if "error" in answer:
            self._refused(outcome, answer, findings, run)
            return
        row = answer["run"]
        findings += self._states(outcome, [(row["run_id"], row["state"], row["why"])])
        findings += oracle.code(outcome.said.words, outcome.said.code, {3 if row["state"] == "UNREACHABLE" else 0})
        self._known(outcome, findings, self._place(run, outcome))

    def stop(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        self.stop_run(self.lane.some_run(rng), rng, meanwhile, laptop)

    def stop_run(
        self, run: Run, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None
    ) -> None:
        laptop, how = laptop or self.lane.some_laptop(rng), rng.choice((["--now"], ["--grace", GRACE_S]))
        if (run_id := self._id(run)) is None:
            return
        view = run.box.observer.look()
        if not run.box.observer.truth(run.token, view).dead:
            self.lane.deed("stop", run)
        outcome = self.lane.verb(laptop, "stop", run_id, *how, "--json", meanwhile=meanwhile)
        if not outcome.answered or (answer := self._answer(outcome)) is None:
            return
        findings: list[Finding] = []
        if "error" in answer:
            self._refused(outcome, answer, findings, run)
            return
        case, code = self._case(run, outcome), outcome.said.code
        findings += oracle.stopped(code, answer["remaining"], case)
        findings += self._state(answer["state"], answer["why"], case)
        live = answer["state"] in oracle.ALIVE
        findings += oracle.code(outcome.said.words, code, {1 if answer["remaining"] or live else 0})
        self._known(outcome, findings, self._place(run, outcome))

    # --- logs -------------------------------------------------------------------------------------------------------

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

    # --- files ------------------------------------------------------------------------------------------------------

    def push(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        lane, box = self.lane, self.lane.some_container(rng)
        laptop = laptop or lane.some_laptop(rng)
        name, content = f"pushed-{rng.getrandbits(32):08x}", rng.randbytes(rng.randint(0, 300_000))
        source = laptop.home / name
        source.write_bytes(content)
        outcome = lane.verb(laptop, "push", box.name, str(source), f"files/{name}", "--json", meanwhile=meanwhile)
        source.unlink()
        there = box.observer.workdir / "files" / name
        findings: list[Finding] = []
        if outcome.answered and outcome.said.code == 0 and there.read_bytes() != content:
            findings.append(Finding(lie=Lie.LOST_BYTES, text=f"{name} was pushed and verified, and is another there"))
        there.unlink(missing_ok=True)
        if outcome.answered:
            self._known(outcome, findings, box)

    def pull(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        lane, run = self.lane, self.lane.some_run(rng)
        laptop = laptop or lane.some_laptop(rng)
        if (run_id := self._id(run)) is None:
            return
        before = run.box.observer.truth(run.token, run.box.observer.look(), content=True)
        folder = Path(tempfile.mkdtemp(prefix="pulled-", dir=laptop.home))
        outcome = lane.verb(laptop, "pull", run_id, "--to", str(folder), "--json", meanwhile=meanwhile)
        after = run.box.observer.truth(run.token, outcome.after[run.box.name], content=True)
        findings: list[Finding] = []
        if outcome.answered and outcome.said.code == 0 and "cut" not in run.story.deeds and after.run_id:
            log = folder / run_id / f"{run_id}.a1.log"
            got = log.read_bytes().partition(b"\n")[2] if log.exists() else b""
            findings += oracle.own_lines(got, run.token)
            findings += oracle.whole_log(got, before.log, after.log, f"pull of {run.token}")
        shutil.rmtree(folder)
        if outcome.answered:
            if outcome.said.code == 4:
                findings += oracle.exists(False, Case(before=before, after=after, story=run.story))
            self._known(outcome, findings, self._place(run, outcome))

    def prune(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        how = ["--runs", "--older-than", "20s"] if rng.random() < 0.5 else []
        laptop = laptop or self.lane.some_laptop(rng)
        outcome = self.lane.verb(laptop, "prune", *how, "--yes", "--json", meanwhile=meanwhile)
        findings: list[Finding] = []
        for run in self.lane.runs:
            case = self._case(run, outcome)
            if case.before.run_id and not case.after.run_id and case.after.alive:
                text = f"prune has removed {case.before.run_id}, which lives"
                findings.append(Finding(lie=Lie.LOST_BYTES, text=text))
        if outcome.answered:
            self._known(outcome, findings)
        else:
            self.lane.note(findings, outcome.where)

    # --- now and then -----------------------------------------------------------------------------------------------

    def audit(self, rng: random.Random) -> None:
        """With nothing broken: every run is ended, asked for, and read; then the old ones are removed."""
        lane = self.lane
        lane.steps += 1
        lane.tell("audit")
        for run in lane.runs:
            view = run.box.observer.look()
            if view.alive(run.token):
                self.stop_run(run, rng)
        for follower in self.followers:
            self._followed(follower)
        self.followers.clear()
        for run in lane.runs:
            view = run.box.observer.look()
            outcome_free = view.alive(run.token)
            if outcome_free and view.run_ids(run.token) and "disk" not in run.story.deeds:
                text = f"{run.token} ({run.kind.name}) lives after it was stopped with nothing broken"
                lane.note([Finding(lie=Lie.ORPHAN, text=text)], "\n  ".join(lane.lines))
            truth = run.box.observer.truth(run.token, view)
            lane.note(oracle.started_once(run.token, truth.starts, view.run_ids(run.token)), "\n  ".join(lane.lines))
        self.status_all(rng)
        for run in lane.runs:
            if not run.read:
                run.read = True
                self.logs_of(run, rng)
        outcome = lane.verb(rng.choice(lane.laptops), "prune", "--runs", "--older-than", "0s", "--yes", "--json")
        self._known(outcome, [])
        lane.wire.cut()
        give_up_at = time.monotonic() + LEAVES_S
        while (left := self._left_behind()) and time.monotonic() < give_up_at:
            time.sleep(0.2)
        lane.note(left, "\n  ".join(lane.lines))
        for run in lane.runs:
            view = run.box.observer.look()
            if not view.run_ids(run.token) and not view.alive(run.token):
                run.box.observer.forget(run.token)
        lane.runs = [run for run in lane.runs if run.box.observer.look().run_ids(run.token)]
        lane.recent.clear()

    def _left_behind(self) -> list[Finding]:
        return [
            finding for view in self.lane.look().values() if not any(view.alive(run.token) for run in self.lane.runs)
            for finding in oracle.left_behind(view.processes)
        ]  # fmt: skip

    # --- before the oracle ------------------------------------------------------------------------------------------

    def _id(self, run: Run) -> str | None:
        """As the observer knows it; None while there is no such run to be asked for."""
        return next(iter(run.box.observer.look().run_ids(run.token)), None)

    def _case(self, run: Run, outcome: Outcome) -> Case:
        truth, name = run.box.observer.truth, run.box.name
        before, after = truth(run.token, outcome.before[name]), truth(run.token, outcome.after[name])
        return Case(before=before, after=after, story=run.story)

    def _states(self, outcome: Outcome, rows: Any) -> list[Finding]:
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
