"""docs/recipes.md and docs/foreign-trainers.md: typed in containers as they stand, and their files are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.inventory import parse_inventory
from tests.driver import Specctl
from tests.lab.lab import Lab
from tests.lab.typed import DOCS, laptop_of, type_page
from trainer.config import load_config

RECIPES = (DOCS / "recipes.md").read_text(encoding="utf-8")
FOREIGN = (DOCS / "foreign-trainers.md").read_text(encoding="utf-8")
CONFIG = (DOCS.parent / "configs" / "smollm2-cpu.yaml").read_text(encoding="utf-8")
INVENTORIES = [text for text in re.findall(r"```yaml\n(.*?)```", RECIPES, re.DOTALL) if "targets:" in text]


@pytest.fixture
def laptop(lab: Lab, tmp_path: Path) -> Iterator[Specctl]:
    """Containers 200 and 201 of the node `pve`, with a folder that both of them see."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for vmid in (200, 201):
        lab.container(vmid, mp0=f"{lab.host(str(shared))},mp=/shared")
    driver = laptop_of(lab)
    yield driver
    for vmid in (200, 201):
        lab.remove(vmid)
    driver.close()


def test_a_start_script_is_typed_as_the_page_has_it(laptop: Specctl) -> None:
    (laptop.project / "hosts.yaml").write_text("targets: {gpu1: {ssh: pve, vmid: 200, workdir: /workspace/specctl}}\n")
    assert type_page(laptop, FOREIGN) == 4


def test_what_one_container_is_sent_the_other_has_and_a_jump_host_is_gone_through(laptop: Specctl, lab: Lab) -> None:
    (laptop.project / "hosts.yaml").write_text(INVENTORIES[1])
    assert type_page(laptop, RECIPES) == 3
    [way] = re.findall(r"```sshconfig\n(.*?)```", RECIPES, re.DOTALL)
    here = lab.ssh_config.read_text().partition("\n")[2]
    config = laptop.home / "jump_config"
    config.write_text(re.sub(r"^  (?:HostName|User) .*\n", "", way, flags=re.MULTILINE) + f"Host *\n{here}")
    assert config.read_text().count("ProxyJump jump") == 1
    (laptop.project / "hosts.yaml").write_text(INVENTORIES[0])
    log = lab.run / "ssh" / "sshd.log"
    logins = log.read_text().count("Accepted publickey")
    done = laptop("status", "--json", SPECCTL_SSH_CONFIG=str(config))
    assert done.json["targets"][0]["reachable"], done.out
    assert log.read_text().count("Accepted publickey") == logins + 2, "the jump host's and the node's"


def test_every_inventory_and_configuration_of_the_page_is_read(tmp_path: Path) -> None:
    assert len(INVENTORIES) == 4 and all(parse_inventory(text).targets for text in INVENTORIES)
    [devices] = re.findall(r"```yaml trainer\n(.*?)```", RECIPES, re.DOTALL)
    rest = re.sub(r"^(?:devices|batch_size):.*\n(?:  .*\n)*", "", CONFIG, flags=re.MULTILINE)
    (tmp_path / "four.yaml").write_text(devices + rest)
    assert len(load_config(str(tmp_path / "four.yaml")).devices.drafter) == 4
