"""A lane: a node of its own with two containers, two laptops and one link, on which a seeded sequence of steps is done.

What is done next depends on the seed alone, so that a seed can be done again; when it happens depends on the machine.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.lab.chaos import faults
from tests.lab.chaos.kinds import KINDS, Kind
from tests.lab.chaos.laptop import Laptop
from tests.lab.chaos.ledger import Ledger
from tests.lab.chaos.observer import WORKDIR, Observer, View
from tests.lab.chaos.oracle import Finding, Story, manners
from tests.lab.chaos.pool import Pool, Said, Verb
from tests.lab.lab import Lab
from tests.wire import Wire

DISK_MB = 96
DEADLINE_S = 180.0
"""No figure of speed: no verb may be stuck for so long, whatever is broken (`stop` waits for its grace period of 1 s,
a follower for a run's 40 s)."""
REMEMBERED = 12
"""Lines of the transcript that are shown with a finding."""
HIDING = frozenset(fault.__name__ for fault in faults.HIDING)
NEWEST = 4
"""Verbs and faults choose among so many of the newest runs."""


@dataclass(frozen=True, kw_only=True)
class Container:
    name: str
    vmid: int
    observer: Observer


@dataclass(kw_only=True, eq=False)
class Run:
    """One launch. `run_id` is known once the observer or a verb has named it."""

    token: str
    box: Container
    kind: Kind
    story: Story
    launched: threading.Event = field(default_factory=threading.Event)
    read: bool = False
    """Its logs have been compared after its end."""


@dataclass(kw_only=True)
class Trouble:
    """A fault, and from when to when it lasted."""

    name: str
    began: float
    over: float | None = None
    box: Container | None = None
    """The only one that it touches."""

    def hides(self, box: Container | None) -> bool:
        """Whether it may keep `box`, or anything (None), from being asked."""
        return self.name in HIDING and (box is None or self.box in (None, box))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One verb, and what was so before and after it."""

    laptop: Laptop
    said: Said
    before: dict[str, View]
    after: dict[str, View]
    troubles: list[Trouble]
    """The faults that were there meanwhile."""
    where: str

    @property
    def answered(self) -> bool:
        return not (self.said.killed or self.said.late)

    def hidden(self, box: Container | None) -> bool:
        """Whether it may be said that it cannot be known."""
        return any(one.hides(box) for one in self.troubles)


class Lane:
    """`with Lane(...) as lane:` has its node up inside."""

    def __init__(self, number: int, *, seed: int, pool: Pool, ledger: Ledger, transcript: Path | None = None) -> None:
        self.number, self.seed, self.pool, self.ledger = number, seed, pool, ledger
        self.rng = random.Random(f"{seed}/{number}")
        self.runs: list[Run] = []
        """All that may still be there."""
        self.recent: list[Run] = []
        """Those since the last audit: the same for the same seed, whatever has become of them."""
        self.chosen: Run | None = None
        self.steps = self.launches = 0
        self.lines: deque[str] = deque(maxlen=REMEMBERED)
        self.transcript = transcript
        self._trouble: list[Trouble] = []
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Lane:
        with contextlib.ExitStack() as stack:
            self.lab = stack.enter_context(Lab())
            self.wire = stack.enter_context(Wire(_port(self.lab)))
            self.boxes = []
            for name, vmid in (("cta", 101), ("ctb", 102)):
                disk = f"/run/lab/disk{vmid}"
                size = ["-o", f"size={DISK_MB}m", "disk", disk]
                for argv in (["mkdir", disk], ["mount", "-t", "tmpfs", *size]):
                    self.lab.on_node(argv, check=True)
                entry = f"{disk} {WORKDIR.lstrip('/')} none bind,create=dir"
                self.lab.container(vmid, **{"lxc.mount.entry": entry})
                self.boxes.append(Container(name=name, vmid=vmid, observer=Observer(self.lab, vmid, disk)))
            targets = {box.name: box.vmid for box in self.boxes}
            self.laptops = [
                Laptop(f"laptop-{name}", self.pool, self.lab.run, self.wire.port, targets) for name in "ab"
            ]
            for laptop in self.laptops:
                stack.callback(laptop.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    # --- who is meant -----------------------------------------------------------------------------------------------

    def some_laptop(self, rng: random.Random) -> Laptop:
        return rng.choice(self.laptops)

    def some_container(self, rng: random.Random) -> Container:
        return rng.choice(self.boxes)

    def some_run(self, rng: random.Random) -> Run:
        """One of the newest, and often the one that was chosen last: so that a fault meets the run of its verb. Which
        one it is, depends on the seed and on nothing that has happened."""
        chosen, again = rng.choice(self.recent[-NEWEST:]), rng.random() < 0.5
        if not again or self.chosen not in self.recent:
            self.chosen = chosen
        assert self.chosen is not None
        return self.chosen

    def its_container(self, rng: random.Random) -> Container:
        """That of one of the newest runs, for a fault."""
        return self.some_run(rng).box

    def new_run(self, rng: random.Random) -> Run:
        [name] = rng.choices(sorted(KINDS), [3 if KINDS[name].lasting else 1 for name in sorted(KINDS)])
        kind, box = KINDS[name], self.some_container(rng)
        with self._lock:
            self.launches += 1
            token = f"tok-{self.seed & 0xFFFF:04x}-{self.number}-{self.launches}-{rng.getrandbits(24):06x}"
            run = Run(token=token, box=box, kind=kind, story=Story(kind=kind))
            self.runs.append(run)
            self.recent.append(run)
            self.chosen = run
        return run

    def deed(self, name: str, *runs: Run) -> None:
        for run in runs:
            run.story.deeds.add(name)

    def befalls(self, name: str, box: Container) -> None:
        """A deed that is done to all runs of a container, but for those that are over with all their records."""
        view = box.observer.look()
        supervised = {view.runs.get(one.supervises) for one in view.processes if one.supervises}
        for run in self.runs:
            if run.box is box and (run.token in supervised or not box.observer.truth(run.token, view).dead):
                self.deed(name, run)

    def run_of(self, run_id: str, views: Iterable[View]) -> Run | None:
        token = next((view.runs[run_id] for view in views if run_id in view.runs), None)
        return next((run for run in self.runs if run.token == token), None)

    # --- what is done -----------------------------------------------------------------------------------------------

    def look(self) -> dict[str, View]:
        return {box.name: box.observer.look() for box in self.boxes}

    def verb(
        self, laptop: Laptop, *words: str, meanwhile: Callable[[Verb], None] | None = None
    ) -> Outcome:
        """Types a command and waits for it; `meanwhile` is done while it runs."""
        before, began = self.look(), time.monotonic()
        verb = laptop.type(*words)
        if meanwhile is not None:
            meanwhile(verb)
        return self.outcome(laptop, verb, before, began)

    def outcome(self, laptop: Laptop, verb: Verb, before: dict[str, View], began: float) -> Outcome:
        """Waits for a verb that was typed at `began`, and looks again."""
        said = verb.wait(DEADLINE_S)
        self.ledger.time(said.verb, said.took_s)
        after, ended = self.look(), time.monotonic()
        with self._lock:
            troubles = [
                one for one in self._trouble if one.began <= ended and (one.over is None or one.over >= began)
            ]
        ends = " (killed by SIGKILL)" if said.killed else ""
        self.tell(f"{laptop.name}: specctl {' '.join(said.words)} -> {said.code}{ends} after {said.took_s:.1f} s")
        self.ledger.count(said.verb)
        where = self.where(said)
        for finding in manners(said.words, said.code, said.err, killed=said.killed, late=said.late):
            self.ledger.note(finding, where)
        return Outcome(laptop=laptop, said=said, before=before, after=after, troubles=troubles, where=where)

    @contextlib.contextmanager
    def fault(self, fault: faults.Fault, rng: random.Random) -> Iterator[None]:
        """The fault is there inside, and is undone after."""
        name = fault.__name__
        trouble = Trouble(name=name, began=time.monotonic())
        with self._lock:
            self._trouble = [*self._trouble[-20:], trouble]
        self.tell(f"fault: {name}")
        self.ledger.count(f"-{name}")
        heal = fault(self, rng)
        if fault in faults.OF_ONE and self.chosen is not None:
            trouble.box = self.chosen.box
        try:
            yield
        finally:
            heal()
            self.tell(f"undone: {name}")
            trouble.over = time.monotonic()

    def disk_was_full(self, box: Container) -> bool:
        """Of late: what that leaves behind may keep a run from starting."""
        return any(one.name == "disk_full" and one.box is box for one in self._trouble)

    # --- what is written down ---------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        line = f"lane {self.number} step {self.steps} {time.strftime('%H:%M:%S')} {text}"
        self.lines.append(line)
        if self.transcript is not None:
            with self.transcript.open("a") as file:
                file.write(line + "\n")

    def where(self, said: Said) -> str:
        """Where a finding was made: the seed, the steps before it, and the end of what was said."""
        out, err = said.out[-1500:].decode(errors="replace"), said.err[-1500:]
        steps = "\n  ".join(self.lines)
        return f"seed {self.seed}:\n  {steps}\n  stdout: {out}\n  stderr: {err}"

    def note(self, findings: Iterable[Finding], where: str) -> None:
        for finding in findings:
            self.ledger.note(finding, where)
            if self.transcript is not None:
                with self.transcript.open("a") as file:
                    file.write(f"LIE {finding.lie.value}: {finding.text}\n{where}\n")


def _port(lab: Lab) -> int:
    words = lab.ssh_config.read_text().split()
    return int(words[words.index("Port") + 1])
