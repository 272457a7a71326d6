"""The verbs that say how runs are, that begin and end them, and that carry files; each with what it must answer."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.lab.chaos import oracle
from tests.lab.chaos.court import Court, Meanwhile
from tests.lab.chaos.lane import Outcome, Run
from tests.lab.chaos.laptop import Laptop
from tests.lab.chaos.oracle import NOT_WELL, Case, Finding, Lie

GRACE_S = "1"


class Verbs(Court):
    """Each verb picks its run by `rng`, from `laptop` or from either."""

    # --- runs -------------------------------------------------------------------------------------------------------

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
