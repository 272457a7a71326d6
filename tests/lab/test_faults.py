"""Every fault of docs/faults.md is made in the lab, and every verb is asked what it says."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

from tests.driver import Specctl
from tests.lab import faults
from tests.lab.lab import Lab
from tests.lab.matrix import FAULTS, PAGE, WORKDIR, Cell, Scene, ask, rows

for found in pkgutil.iter_modules(faults.__path__):
    importlib.import_module(f"{faults.__name__}.{found.name}")
ROWS = rows(PAGE.read_text())
REAL = {"in_the_middle_of_a_verb": "a sshd that runs on its node", "have_their_pids": "pids that can be chosen"}


@pytest.fixture
def scene(lab: Lab) -> Iterator[Scene]:
    inventory = f"""
defaults: {{ssh: pve, workdir: {WORKDIR}}}
targets:
  ct101: {{vmid: 101}}
  ct102: {{vmid: 102}}
"""
    specctl = Specctl(inventory, SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    scene = Scene(specctl=specctl, lab=lab)
    yield scene
    for vmid in (101, 102):
        lab.clear(vmid, WORKDIR)
    specctl.close()


def test_every_row_of_the_page_is_a_fault_that_is_made_and_every_fault_has_its_row() -> None:
    assert set(ROWS) == set(FAULTS)
    assert all(row.do_next for row in ROWS.values()), "each row says what one does next"


def test_a_cell_is_an_exit_code_and_words_in_their_order() -> None:
    cell = Cell.parse("`3` **UNREACHABLE** … frozen")
    assert cell == Cell(code=3, words=("UNREACHABLE", "frozen"))


def faults_here() -> Iterator[object]:
    """All of them; those that a user's lab cannot have are marked with what they need."""
    for name in sorted(FAULTS):
        needs = [why for words, why in REAL.items() if name.endswith(words)]
        yield pytest.param(name, marks=[pytest.mark.real_lab(why) for why in needs])


@pytest.mark.parametrize("name", list(faults_here()))
def test_under_a_fault_every_verb_says_what_the_page_says_and_nothing_is_lost(name: str, scene: Scene) -> None:
    row = ROWS[name]
    making = FAULTS[name](scene)
    next(making)
    try:
        wrong = ask(scene, row)
    finally:
        next(making, None)  # also after an error: the lab is for the faults that come next
    assert not wrong, "\n".join(wrong)
    if row.then:
        state = scene.specctl.status(scene.run_id)["state"]
        assert state == row.then, f"{name}: {state} when all is mended"
        alive = state in ("STARTING", "RUNNING", "DEGRADED", "STALLED", "STOPPING")
        assert alive == bool(scene.pids()), f"{name}: {state}, but its processes are {scene.pids()}"
    if row.then and scene.kept:
        scene.check_nothing_is_lost()
