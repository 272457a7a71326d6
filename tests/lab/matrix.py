"""The fault matrix: docs/faults.md says what every verb says under every fault, and this asks whether it does.

A row of that page and a function of `tests/lab/faults/` are one fault: the function's name is the row's first cell, in
lower case, with an underscore for all that is no letter or figure. The function breaks something, yields while the
verbs are asked, and mends it. A cell is an exit code and words that are said in that order, with `…` for what lies
between: `3 UNREACHABLE … frozen`; a dash is a verb that is not asked. In the column *the others* are those that have no
column, by name: `show, ls: 0 LOST; attach: 1 it has ended`. The column *then* is the run's state once all is mended;
whatever the run wrote must be there, byte for byte, as seen from outside.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.driver import Done, Specctl, poll_until
from tests.lab.lab import Lab
from tests.terminal import typed

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
WORKDIR = "/root/w"
OTHERS = ("show", "ls", "targets", "prune", "attach")
VERBS = ("status", "logs", "logs_f", "show", "ls", "targets", "prune", "push", "pull", "attach", "launch", "stop")
"""In the order in which they are asked."""
EVERY, THE_OTHERS = "every_verb", "the_others"
"""A column for all of them that have none of their own, and one in which they are named."""
NOT_ASKED = "–"
TMUX_IS_UP, LEAVE = b"\x1b[?1049h", "\x02d"
DEADLINE_S = 120.0
"""No verb takes longer, whatever is broken; no figure of speed, but a bound on being stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What a verb must say."""

    code: int
    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Cell | None:
        if text in (NOT_ASKED, ""):
            return None
        code, _, rest = re.sub(r"[*`]", "", text).partition(" ")
        return cls(code=int(code), words=tuple(filter(None, (words.strip() for words in rest.split("…")))))

    def missing(self, done: Done) -> str | None:
        """The first thing that `done` does not say, None if it says it all."""
        if done.code != self.code:
            return f"exit code {self.code}"
        said, at = flat(done.out + "\n" + done.err), 0
        for words in self.words:
            found = said.find(flat(words), at)
            if found < 0:
                return repr(words)
            at = found + len(flat(words))
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One fault as the page has it."""

    name: str
    cells: dict[str, Cell | None]
    then: str
    """The run's state when all is mended, empty if there is no run."""
    do_next: str


def flat(text: str) -> str:
    return " ".join(text.split())


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def rows(page: str) -> dict[str, Row]:
    """Fault -> row, of all tables of the page whose head names the verbs."""
    found: dict[str, Row] = {}
    head: list[str] = []
    for line in page.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = [slug(cell) for cell in cells]
        elif "then" in head and not set(line) <= set("|-: "):
            row = dict(zip(head, cells, strict=True))
            name = slug(row["what_was_done"])
            assert name not in found, f"two rows of docs/faults.md are {name}"
            said = dict.fromkeys(VERBS, row.get(EVERY, NOT_ASKED)) | named(row.get(THE_OTHERS, NOT_ASKED))
            said |= {verb: row[verb] for verb in VERBS if verb in row}
            found[name] = Row(
                name=name, cells={verb: Cell.parse(text) for verb, text in said.items()}, then=row["then"].strip("*–"),
                do_next=row["what_you_do"],
            )  # fmt: skip
    return found


def named(text: str) -> dict[str, str]:
    """Verb -> cell, of `show, ls: 0 LOST; attach: 1 it has ended`; `all` are those that have no column."""
    found: dict[str, str] = {}
    for part in re.split(r"; (?=[a-z, ]+: \d)", text) if text != NOT_ASKED else ():
        names, _, cell = part.partition(": ")
        found.update(dict.fromkeys(OTHERS if names == "all" else names.split(", "), cell))
    assert found.keys() <= set(OTHERS), text
    return found


@dataclass(kw_only=True)
class Scene:
    """Where a fault happens: a lab, a user, and the run that the fault is about.

    A fault may give a verb other words than the usual ones (`say`), and replace inventory, run or target.
    """

    specctl: Specctl
    lab: Lab
    vmid: int = 101
    target: str = "ct101"
    run_id: str = ""
    say: dict[str, list[str]] = field(default_factory=dict)
    asking: Callable[[str], Done] | None = None
    """How a verb is asked, where something happens in the middle of it."""
    together: bool = False
    """Whether all verbs are asked at the same time: where each takes long, and none changes what another sees."""
    kept: bool = True
    """Whether the run's log is as it was written; a fault that damages it says no, and checks what is left itself."""

    def start(self, *command: str, until: str = "process", options: tuple[str, ...] = ()) -> str:
        """Launches the run that the fault is about; the default is a program that prints a step every 0.1 s."""
        argv = command or ("python3", self.specctl.program("steps.py"))
        done = self.specctl.launch("--until", until, *options, "--", *argv, target=self.target)
        assert done.code == 0, f"{done.out}{done.err}"
        self.run_id = str(done.json["run_id"])
        return self.run_id

    def words(self, verb: str) -> list[str]:
        usual = {
            "status": ["status", self.run_id or self.target],
            "logs": ["logs", self.run_id, "-n", "3"],
            "logs_f": ["logs", self.run_id, "-f", "-n", "3", "--patience", "0"],
            "show": ["show", self.run_id],
            "ls": ["ls"],
            "targets": ["targets", self.target],
            "prune": ["prune", self.target, "--runs", "--older-than", "0m"],
            "push": ["push", self.target, str(PAGE), f"{WORKDIR}/pushed"],
            "pull": ["pull", self.run_id, "--to", "pulled"],
            "attach": ["attach", self.run_id],
            "launch": ["launch", self.target, "--until", "process", "--no-source", "--", "sleep", "600"],
            "stop": ["stop", self.run_id],
        }
        return self.say.get(verb) or usual[verb]

    def ask(self, verb: str) -> Done:
        """What a verb says; `attach` is typed into a terminal, which must be given back as it was, and left at once."""
        if verb != "attach":
            return self.specctl(*self.words(verb), timeout_s=DEADLINE_S)
        with typed(self.specctl, *self.words(verb)) as terminal:
            before = terminal.settings
            code = terminal.end(timeout_s=DEADLINE_S, keys=LEAVE, at=TMUX_IS_UP)
            assert terminal.settings == before, "the terminal was not given back as it was"
            return Done(code=code, out=terminal.text, err="")

    def inside(self, script: str) -> str:
        """What a shell in the container prints, asked past ssh, pct and specctl."""
        done = self.lab.inside(self.vmid, ["sh", "-c", script])
        assert done.returncode == 0, f"{script}: {done.stderr}"
        return str(done.stdout)

    def on_node(self, script: str) -> str:
        """What a shell on the node prints, asked past ssh and specctl."""
        done = self.lab.on_node(["sh", "-c", script])
        assert done.returncode == 0, f"{script}: {done.stderr}"
        return str(done.stdout)

    def run_dir(self) -> str:
        return f"{WORKDIR}/runs/{self.run_id}"

    def let_go(self) -> None:
        """Makes the file `go`, for which the run's program waits."""
        self.inside(f"touch {self.run_dir()}/code/go")

    def pid(self) -> int:
        """The program's pid in the container, from the environment that only the run's processes carry."""
        return self.pids()[0]

    def pids(self) -> list[int]:
        """All living processes of the run, the oldest first, seen from outside."""
        script = (
            f"for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/environ 2>/dev/null | grep -qx SPECCTL_RUN_ID={self.run_id} "
            "&& ! grep -q '^State:.[ZX]' $p/status 2>/dev/null && echo ${p#/proc/}; done; :"
        )
        return sorted(int(line) for line in self.inside(script).split())

    def supervisor(self) -> int:
        return int(self.inside(f"cat {self.run_dir()}/supervisor.json").partition('"pid":')[2].split(",")[0])

    def check_nothing_is_lost(self) -> None:
        """`logs` prints every byte that the run has written, and none besides."""
        written = self.inside(f"tail -n +2 {self.run_dir()}/{self.run_id}.a1.log")
        shown = self.specctl("logs", self.run_id).out
        assert shown.startswith(written), f"{self.run_id} wrote {len(written)} bytes, and logs shows {len(shown)}"

    def until_state(self, *states: str, timeout_s: float = 30.0) -> None:
        poll_until(
            lambda: self.specctl.status(self.run_id)["state"] in states, timeout_s=timeout_s, what=" or ".join(states)
        )


Fault = Callable[[Scene], Iterator[None]]
FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    """Puts a function of `tests/lab/faults/` into the matrix."""
    assert function.__name__ not in FAULTS
    FAULTS[function.__name__] = function
    return function


def ask(scene: Scene, row: Row) -> list[str]:
    """Asks every verb that has a cell; what was not said, in words for who mends it."""
    asked = [(verb, cell) for verb in VERBS if (cell := row.cells[verb]) is not None]
    with ThreadPoolExecutor(max_workers=len(VERBS) if scene.together else 1) as pool:
        found = [pool.submit(_ask, scene, row, verb, cell) for verb, cell in asked]
    return [wrong for one in found if (wrong := one.result()) is not None]


def _ask(scene: Scene, row: Row, verb: str, cell: Cell) -> str | None:
    began = time.monotonic()
    done = (scene.asking or scene.ask)(verb)
    took_s = time.monotonic() - began
    if verb == "launch" and done.code in (0, 1):
        scene.specctl("stop", "@last", "--now")
    if (missing := cell.missing(done)) is None:
        return None
    return f"{row.name}: {verb} does not say {missing}, but (exit {done.code}, {took_s:.1f} s):\n{done.out}{done.err}"
