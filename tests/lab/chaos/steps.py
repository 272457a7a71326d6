"""What is done in a lane, one step after the other."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from functools import partial

from tests.lab.chaos import faults, oracle
from tests.lab.chaos.court import Court, Meanwhile
from tests.lab.chaos.lane import Lane
from tests.lab.chaos.laptop import Laptop
from tests.lab.chaos.lines import Lines
from tests.lab.chaos.oracle import Finding, Lie
from tests.lab.chaos.pool import Verb
from tests.lab.chaos.verbs import Verbs

LEAVES_S = 90.0
"""How long what a verb has run in the container may outlive the verb that was killed: its deadline there."""
EPISODES = 6
"""Launches between two audits."""


class Crew:
    """Threads that are waited for at the end of the block; the first error of one is raised there."""

    def __enter__(self) -> Crew:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        return self

    def do(self, action: Callable[[], None]) -> None:
        def work() -> None:
            try:
                action()
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.wait()
        if self._errors and kind is None:
            raise self._errors[0]


class Actor(Court):
    """Does steps in one lane until enough was launched."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self.verbs, self.lines = Verbs(lane), Lines(lane)

    def episodes(self, launches: int) -> None:
        lane = self.lane
        while lane.launches < launches and not lane.ledger.enough.is_set():
            for _ in range(EPISODES):
                if lane.launches < launches and not lane.ledger.enough.is_set():
                    self.episode(random.Random(lane.rng.getrandbits(64)))
            self.audit(random.Random(lane.rng.getrandbits(64)))

    def episode(self, rng: random.Random) -> None:
        """A launch, and a few steps around what is there."""
        lane = self.lane
        lane.steps += 1
        if rng.random() < 0.25:
            self.meanwhile(rng, self.verbs.launch)
        elif rng.random() < 0.1:
            runs = [lane.new_run(rng), lane.new_run(rng)]
            self.together(rng, *(partial(self.verbs.launch, run=run) for run in runs))
        else:
            self.verbs.launch(rng)
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

        def work(verb: Verb) -> None:
            if verb.over.wait(delay_s):
                return
            if fault is None:
                lane.tell(f"SIGKILL to specctl {' '.join(verb.words)}")
                verb.kill()
                return
            with lane.fault(fault, theirs):
                verb.over.wait(lasting_s)

        with Crew() as crew:
            action(rng, lambda verb: crew.do(partial(work, verb)))

    def under(self, rng: random.Random) -> None:
        """Verbs while one fault lasts, or two."""
        first, second, both = rng.choice(faults.ALL), rng.choice(faults.ALL), rng.random() < 0.4
        if second is first or {first, second} <= set(faults.CONTAINER):
            both = False  # a container that is stopped cannot be frozen
        with contextlib.ExitStack() as stack:
            for fault in (first, second) if both else (first,):
                stack.enter_context(self.lane.fault(fault, rng))
            for _ in range(rng.randint(1, 2)):
                self.any_verb(rng)

    def together(self, rng: random.Random, *actions: Callable[..., None]) -> None:
        """Verbs in the same instant, from two laptops."""
        with Crew() as crew:
            for action, laptop in zip(actions, self.lane.laptops, strict=True):
                crew.do(partial(action, random.Random(rng.getrandbits(64)), None, laptop))

    def any_verb(self, rng: random.Random, meanwhile: Meanwhile = None, laptop: Laptop | None = None) -> None:
        weights = {
            self.verbs.status: 3, self.verbs.status_all: 3, self.verbs.stop: 4, self.verbs.show: 1, self.verbs.ls: 1,
            self.verbs.push: 1, self.verbs.pull: 1, self.verbs.prune: 1, self.lines.logs: 3, self.lines.last_logs: 1,
            self.lines.grep_logs: 1, self.lines.follow: 2,
        }  # fmt: skip
        [action] = rng.choices(list(weights), list(weights.values()))
        action(rng, meanwhile, laptop)

    # --- now and then -----------------------------------------------------------------------------------------------

    def audit(self, rng: random.Random) -> None:
        """With nothing broken: every run is ended, asked for, and read; then the old ones are removed."""
        lane = self.lane
        lane.steps += 1
        lane.tell("audit")
        for run in lane.runs:
            view = run.box.observer.look()
            if view.alive(run.token):
                self.verbs.stop_run(run, rng)
        self.lines.end_followers()
        where = "\n  ".join(lane.lines)
        for run in lane.runs:
            view = run.box.observer.look()
            if view.alive(run.token):
                text = f"{run.token} ({run.kind.name}) lives after it was stopped with nothing broken"
                lane.note([Finding(lie=Lie.ORPHAN, text=text)], where)
            truth = run.box.observer.truth(run.token, view)
            lane.note(oracle.started_once(run.token, truth.starts, view.run_ids(run.token)), where)
        self.verbs.status_all(rng)
        for run in lane.runs:
            if not run.read:
                run.read = True
                self.lines.logs_of(run, rng)
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
