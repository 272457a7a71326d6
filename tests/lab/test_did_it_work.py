"""The story that this project began with, with a real race in a real container: run 6 fails, run 7 never starts, run 8
fails elsewhere. docs/did-it-work.md tells it, typed as it stands; and each comparison tells the truth on one screen."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.driver import Specctl, poll_until
from tests.lab.kinds import KINDS, WORKDIR
from tests.lab.lab import Lab
from tests.lab.typed import DOCS, Command, laptop_of, type_page
from tests.terminal import Typed

pytest.importorskip("torch")
PAGE = (DOCS / "did-it-work.md").read_text(encoding="utf-8")
COLUMNS, ROWS = 80, 24
FX = "Detected that you are using FX"


@pytest.fixture
def laptop(lab: Lab) -> Iterator[Specctl]:
    keys = {"ssh": "pve", "vmid": "200", "workdir": WORKDIR, **KINDS["torch"].make(lab, 200)}
    driver = laptop_of(lab)
    entry = ", ".join(f"{key}: {value}" for key, value in keys.items())
    (driver.project / "hosts.yaml").write_text(f"targets:\n  gpu1: {{{entry}}}\n")
    yield driver
    lab.remove(200)
    driver.close()


def screen(laptop: Specctl, a: str, b: str) -> tuple[list[str], int]:
    """What `compare` leaves on a terminal of 80 columns and 24 rows, and its exit code."""
    typed = Typed(
        [sys.executable, "-m", "orchestrator", "compare", a, b], cwd=laptop.project,
        environ={**{k: v for k, v in laptop.environ.items() if k != "COLUMNS"}, "TERM": "xterm-256color"},
        columns=COLUMNS, rows=ROWS,
    )  # fmt: skip
    code = typed.end()
    return typed.text.replace("\r", "").splitlines(), code


@pytest.mark.timeout(900)  # torch is imported four times
def test_the_story_is_typed_as_it_stands_and_each_answer_is_on_one_screen(laptop: Specctl) -> None:
    def settle(command: Command) -> None:
        """A worker's death is seen a moment before the program's end."""
        if command.typed.startswith("specctl launch") and "run-9" not in command.typed:
            poll_until(lambda: laptop.status()["state"] in ("FAILED", "NEVER_STARTED"), timeout_s=300, what="its end")

    assert type_page(laptop, PAGE, after=settle) >= 12
    for b, code, answer, fates in (
        ("run-7", 3, "NO ANSWER. B never started", ("not reached   RuntimeError", "new           NEVER_STARTED")),
        ("run-8", 1, "ANOTHER FAILURE. B got past where A failed (drafter-0 is at step 1",
         ("gone          RuntimeError", "new           IndexError")),
    ):  # fmt: skip
        rows, seen = screen(laptop, "run-6", b)
        text = "\n".join(rows)
        assert seen == code and answer in text and all(fate in text for fate in fates), text
        assert len(rows) < ROWS and all(len(row) < COLUMNS for row in rows), text
        assert "in drafter-0" in text and "drafter.py  +1 -2" in text and FX in text, text
        assert ("B: drafter-1, after step 12" in text) == (b == "run-8"), text
