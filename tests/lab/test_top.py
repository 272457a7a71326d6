"""`specctl top` over real containers: one that stands still costs its own rows, and nobody else's."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from textual.pilot import Pilot

from orchestrator.tui.app import Top
from tests.driver import Specctl
from tests.lab.lab import Lab
from tests.screen import drive, row, select, shown, until

STEPS = 'n=0; while sleep 0.5; do n=$((n+1)); echo "step=$n loss=0.$n tok/s=100"; done'


@pytest.fixture
def specctl(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Specctl]:
    inventory = "defaults: {ssh: pve, workdir: /root/top}\ntargets: {ct101: {vmid: 101}, ct102: {vmid: 102}}\n"
    driver = Specctl(inventory, SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    monkeypatch.setenv("XDG_STATE_HOME", driver.environ["XDG_STATE_HOME"])
    yield driver
    for vmid in (101, 102):
        driver("stop", f"steps-{vmid}", "--now")
        script = 'tmux -S "$1/tmux-0" kill-server; for i in $(seq 50); do rm -rf "$1" && break; sleep 0.1; done'
        lab.inside(vmid, ["sh", "-c", script, "sh", "/root/top"], capture_output=True)
    driver.close()


@pytest.mark.real_lab("a freezer")
def test_a_frozen_container_keeps_its_rows_in_the_past_tense_beside_a_living_neighbour(
    specctl: Specctl, lab: Lab
) -> None:
    for vmid in (101, 102):
        launched = specctl.launch("--name", f"steps-{vmid}", "--", "sh", "-c", STEPS, target=f"ct{vmid}")
        assert launched.code == 0, launched.err

    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        for vmid in (101, 102):
            await until(pilot, lambda vmid=vmid: row(app, f"-steps-{vmid}-").startswith("RUNNING"), "a look")
        lab.freeze(101)
        try:
            await until(pilot, lambda: row(app, "-steps-101-").startswith("was RUNNING"), "silence")
            await select(app, pilot, "-steps-101-")
            await until(pilot, lambda: re.search(r"not seen for \d+ s: .*frozen", shown(app)), "why")
            assert row(app, "-steps-102-").startswith("RUNNING")
        finally:
            lab.thaw(101)
        await pilot.press("r")
        await until(pilot, lambda: row(app, "-steps-101-").startswith("RUNNING"), "an answer")

    drive(specctl, scenario, more=f"ssh_config: {lab.ssh_config}\n", every_s=1.0)
