"""`specctl targets`: the first thing to type on a new setup; what is missing is said with what mends it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver import Specctl
from tests.sshd import LoopbackSshd

NVIDIA_SMI = """#!/bin/sh
echo '0, NVIDIA H200, 37, 1024, 143771'
echo '1, NVIDIA H200, 0, 4, 143771'
"""


@pytest.fixture
def specctl(sshd: LoopbackSshd) -> Iterator[Specctl]:
    """Targets of every kind on this machine and one behind a real sshd; a stand-in nvidia-smi is in PATH."""
    driver = Specctl(SPECCTL_SSH_CONFIG=str(sshd.ssh_config))
    (driver.home / "bin").mkdir()
    (driver.home / "bin/nvidia-smi").write_text(NVIDIA_SMI)
    (driver.home / "bin/nvidia-smi").chmod(0o755)
    driver.environ["PATH"] = f"{driver.home}/bin:{driver.environ['PATH']}"
    (driver.home / "file").write_text("")
    driver.inventory.write_text(f"""
default_target: good
targets:
  good: {{workdir: {driver.home}/deep/w, gpus: []}}
  box: {{ssh: node1, workdir: {driver.workdir}, python: {sys.executable}}}
  lacking: {{workdir: {driver.home}/file/w, python: /no/such/python, gpus: [0, 7]}}
  away: {{ssh: 'root@127.0.0.1:1', workdir: /w}}
groups: {{mine: [good, box]}}
""")
    yield driver
    driver.close()


def test_each_target_says_what_was_found_and_what_mends_what_was_not(specctl: Specctl, sshd: LoopbackSshd) -> None:
    done = specctl("targets", "--json")
    assert done.code == 3, "one of them cannot be reached"
    rows = {row["name"]: row for row in done.json["targets"]}
    assert {name: (row["reachable"], row["ready"]) for name, row in rows.items()} == {
        "good": (True, True), "box": (True, True), "lacking": (True, False), "away": (False, False),
    }  # fmt: skip
    good = rows["good"]["found"]
    assert good["python"]["path"] == sys.executable and good["tmux"]["version"].startswith("3.")
    assert good["free_bytes"] > 0 and not good["workdir_there"] and not good["agent"] and good["runs"] == 0
    assert [gpu["utilization_percent"] for gpu in good["gpus"]] == [37, 0]
    assert abs(rows["good"]["clock_offset_s"]) <= rows["good"]["asked_s"] + 1
    assert rows["box"]["found"]["own_python"]["version"] and rows["box"]["found"]["user"]
    problems = {problem["what"]: problem["mend"] for problem in rows["lacking"]["problems"] if problem["fatal"]}
    assert "GPU 0, 7 is declared in `gpus:`; nvidia-smi lists 2 GPUs, but /dev/nvidia" in " ".join(problems)
    assert all(problems.values()), "nothing is said to be missing without a word on how to mend it"
    said = " ".join(problems)
    assert "file is not a directory" in said and "/no/such/python does not run" in said
    assert "refused" in rows["away"]["error"]["message"] and rows["away"]["error"]["hint"]
    assert not (specctl.home / "deep").exists() and not specctl.workdir.exists(), "to ask leaves nothing there"


def test_the_page_has_a_block_for_each_and_the_exit_code_sums_up(specctl: Specctl) -> None:
    run = specctl.launch("--until", "process", "--", sys.executable, specctl.program("steps.py"), target="box")
    done = specctl("targets", "mine")
    assert done.code == 0, done.out
    assert "good  ready  this machine" in done.out and "box  ready  node1" in done.out
    assert "agent there · 1 live run of 1" in done.out, done.out
    assert "GPU 0 NVIDIA H200: 37 % busy, 1,024 of" in done.out
    assert "default good" in done.out and "mine = good, box" in done.out and "2 targets, each is ready." in done.out
    specctl("stop", run.json["run_id"], "--now")
    lacking = specctl("targets", "lacking", "good")
    assert lacking.code == 1 and "lacking  NOT READY" in lacking.out and "1 of 2 targets ready." in lacking.out
    assert specctl("targets", "nope").code == 4


def test_offline_nobody_is_asked(specctl: Specctl, sshd: LoopbackSshd) -> None:
    before = sshd.log
    done = specctl("targets", "--offline")
    assert done.code == 0 and [line.split()[0] for line in done.out.splitlines()[2:6]] == [
        "good", "box", "lacking", "away",
    ]  # fmt: skip
    assert specctl("targets", "--offline", "--json").json["targets"][3]["ssh"] == "root@127.0.0.1:1"
    assert sshd.log == before


def test_a_machine_whose_python_does_not_run_is_reached(specctl: Specctl, tmp_path: Path) -> None:
    specctl.inventory.write_text(
        f"targets:\n  box: {{ssh: node1, workdir: {specctl.workdir}, python: {tmp_path}/python}}\n"
    )
    done = specctl("targets")
    assert done.code == 1 and "box  NOT READY  node1" in done.out, "it was reached: what it lacks is another matter"
    assert "python" in done.out and "in hosts.yaml" in done.out
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho \"SyntaxError: of an old Python\" >&2; exit 1\n")
    old.chmod(0o755)
    done = specctl("targets", "--json")
    assert done.code == 1 and done.json["targets"][0]["reachable"] and done.json["targets"][0]["error"]["hint"]
    assert not specctl.workdir.exists()
