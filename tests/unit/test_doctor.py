"""What the doctor says of a target, from what was printed there: each trouble by the check it belongs to, and by no
other; with what was seen, and with a command that a person can paste."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.doctor import reach, report
from orchestrator.doctor.check import RUNGS, Outcome
from orchestrator.doctor.checks import CHECKS
from orchestrator.doctor.hands import Hands, quoted
from orchestrator.inventory import Target
from tests.patients import ALONE, OF_ALONE, PATIENTS, TARGET, TOKEN, WELL, Patient, edited

ROOT = Path(__file__).parents[2]
WORDS = ("install ", "set ", "check ", "allow ", "make ", "try ", "a container ", "as root ", "accept ", "choose ",
         "change ", "log in ", "let ", "there is ", "give ", "upgrade ", "look ")  # fmt: skip
"""How a mend begins that is no command, since none does it."""


def troubles(patient: Patient) -> list[tuple[str, Outcome]]:
    return [(check, outcome) for check, outcome in patient.found() if outcome.status in ("fail", "warn")]


@pytest.mark.parametrize(
    "patient", [Patient(check=""), Patient(check="", target=ALONE, told=OF_ALONE)], ids=["container", "machine"]
)
def test_a_target_that_is_well_has_every_check_made_and_nothing_to_say(patient: Patient) -> None:
    found = patient.found()
    assert [(check, outcome.what) for check, outcome in found if outcome.status != "ok"] == []
    rungs = [rung for rung in RUNGS if patient.target.vmid or RUNGS.index(rung) < 5]
    assert [check for check, _ in found] == [*rungs, *(check.name for check in CHECKS)]


@pytest.mark.parametrize("patient", PATIENTS, ids=[f"{n}-{patient.check}" for n, patient in enumerate(PATIENTS)])
def test_each_trouble_is_told_by_its_check_with_evidence_and_a_way_to_mend_it(patient: Patient) -> None:
    found = troubles(patient)
    mine = [outcome for check, outcome in found if check == patient.check]
    assert mine, found
    # A missing device is also what torch's blindness comes from, and a user's absence that of the user's device rights.
    allowed = {patient.check, "devices"} if patient.check == "torch" else {patient.check}
    assert {check for check, _ in found} <= allowed, found
    for outcome in mine:
        assert outcome.mend and "\n" not in outcome.mend and "\n" not in outcome.what, outcome
        assert outcome.evidence or patient.broken, outcome
        command = outcome.mend.partition("   # ")[0]
        if not command.startswith(WORDS):
            assert shlex.split(command), command
            assert command.startswith(("ssh ", "specctl ")), command


def test_every_check_and_every_rung_has_a_patient() -> None:
    assert {patient.check for patient in PATIENTS} == {check.name for check in CHECKS} | set(RUNGS)


def test_a_broken_rung_ends_the_round_and_says_what_was_not_looked_at() -> None:
    patient = next(one for one in PATIENTS if one.check == "container")
    by_status: dict[str, list[str]] = {}
    for check, outcome in patient.found():
        by_status.setdefault(outcome.status, []).append(check)
    assert by_status["ok"] == ["ssh", "reachable", "host key", "login", "shell", "pct"]
    assert by_status["fail"] == ["container"]
    assert by_status["unknown"] == ["entry", *(check.name for check in CHECKS)]
    assert all("container comes first" in outcome.what for _, outcome in patient.found() if outcome.status == "unknown")


def test_a_part_that_hangs_is_named_and_what_was_told_before_it_is_judged() -> None:
    patient = Patient(check="", told={"tmux": None}, until="nvidia-smi")
    found = dict(patient.found())
    assert found["tmux"].status == "fail" and found["python"].status == "ok"
    assert found["driver"].status == "fail" and "nvidia-smi" in found["driver"].what, found["driver"]
    assert "it took too long" in found["driver"].what
    assert found["workdir"].status == "unknown" and "it took too long" in found["workdir"].what


def test_a_command_is_the_shell_words_of_the_node_and_of_the_container() -> None:
    root = Hands(target=TARGET, ssh=["ssh", "-F", "my config", "root@pve1"])
    assert root.on_node("pct start 200") == "ssh -F 'my config' root@pve1 pct start 200"
    assert root.inside("mount -o remount,rw /data") == (
        "ssh -F 'my config' root@pve1 pct exec 200 -- mount -o remount,rw /data"
    )
    assert shlex.split(root.install("tmux"))[-1] == "pct exec 200 -- sh -c 'apt-get update && apt-get install -y tmux'"
    login = Hands(target=TARGET, ssh=["ssh", "me@pve1"], login="me")
    assert login.on_node("pct start 200") == "ssh -t me@pve1 sudo pct start 200"
    assert shlex.split(login.on_node("a && b")) == ["ssh", "-t", "me@pve1", "sudo sh -c 'a && b'"]
    assert shlex.split(login.inside("a > b"))[-1] == "sudo pct exec 200 -- sh -c 'a > b'"
    local = Hands(target=Target(name="local"), ssh=[], login="me", manager="apk")
    assert local.install("python3-venv", "tmux") == "sudo apk add python3 tmux"


@pytest.mark.parametrize("text", ["plain", "it's", 'say "it\'s $HOME"', "a `b` 'c'", "bang! it's", "back\\slash 's"])
def test_a_quoted_line_is_one_word_of_the_shell(text: str) -> None:
    said = subprocess.run(["sh", "-c", f"printf %s {quoted(text)}"], capture_output=True, text=True, check=True)
    assert said.stdout == text


def test_what_a_shell_prints_beside_the_facts_is_none_of_them() -> None:
    noisy = "Welcome!\nat who\nuser root\n" + edited(WELL, {}, "").replace("\n", "\r\n") + "logout\n"
    assert report.read(noisy, TOKEN).facts == report.read(edited(WELL, {}, ""), TOKEN).facts
    silent = report.read("Welcome!\n", TOKEN, broke="why")
    assert not silent.answered and not silent.whole and silent.broke == "why"


def test_several_gpus_that_are_missing_are_passed_on_by_one_command() -> None:
    gone = {f"{key} {name}": None for name in ("nvidia1", "nvidia-uvm") for key in ("device", "opens")}
    [(_, outcome)] = troubles(Patient(check="devices", told=gone, node={"conf dev1": None, "conf dev3": None}))
    assert "/dev/nvidia1 is not there; /dev/nvidia-uvm is not there" in outcome.what
    assert "pct set 200 -dev1 /dev/nvidia1,mode=0666 -dev3 /dev/nvidia-uvm,mode=0666 && pct reboot 200" in outcome.mend
    assert "modprobe" not in outcome.mend, "the node has them"


def test_a_configuration_that_the_login_may_not_read_is_not_guessed_at() -> None:
    told = {"device nvidia-uvm": None, "opens /dev/nvidia-uvm": None}
    [(_, outcome)] = troubles(Patient(check="devices", told=told, node={"conf": None, "login": "me"}))
    command, _, then = outcome.mend.partition("   # ")
    assert shlex.split(command) == ["ssh", "-t", "root@pve1", "sudo", "pct", "config", "200"]
    assert "pct set 200 -devN /dev/nvidia-uvm,mode=0666" in then and "pct reboot 200" in then


def test_gpus_that_nobody_declared_are_a_warning() -> None:
    told = {"device nvidia-uvm": None, "opens /dev/nvidia-uvm": None}
    undeclared = Target(**{**{key: getattr(TARGET, key) for key in TARGET.__slots__}, "gpus": None})
    assert [outcome.status for _, outcome in troubles(Patient(check="", told=told))] == ["fail"]
    assert [outcome.status for _, outcome in troubles(Patient(check="", told=told, target=undeclared))] == ["warn"]


def test_which_rung_a_silent_container_broke() -> None:
    seen = reach.Seen(answered=True, tools={"pct": "/usr/sbin/pct"}, cluster=True, listens=True, here=["200"])
    assert reach.of_container(seen, frozen=False, vmid=200) == "entry"
    assert reach.of_container(seen, frozen=True, vmid=200) == "container"
    assert reach.of_container(seen, frozen=False, vmid=201) == "container"
    assert reach.of_container(reach.Seen(answered=True, cluster=True), frozen=False, vmid=200) == "pct"


def test_the_page_is_what_the_checks_say() -> None:
    page = [sys.executable, str(ROOT / "scripts" / "doctor_page.py"), "--check"]
    done = subprocess.run(page, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
