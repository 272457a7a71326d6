"""`specctl doctor` in real containers, broken one after the other; what it says to type is typed, and is enough."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.driver import Done, Specctl
from tests.lab.lab import USER, Lab

WORKDIR = "/root/doctor"


@pytest.fixture
def specctl(lab: Lab) -> Iterator[Specctl]:
    driver = Specctl(SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    targets(driver)
    yield driver
    driver.close()
    lab.inside(101, ["rm", "-rf", WORKDIR])


def targets(driver: Specctl, **keys: str) -> None:
    entry = ", ".join(f"{key}: {value}" for key, value in {"vmid": "101", "workdir": WORKDIR, **keys}.items())
    driver.inventory.write_text(
        f"defaults: {{ssh: pve}}\ntargets:\n  ct101: {{{entry}}}\n  ct102: {{vmid: 102}}\n  ct777: {{vmid: 777}}\n"
    )


def checks(done: Done, name: str = "ct101") -> dict[str, dict[str, Any]]:
    """Check -> what it found, if that is one thing."""
    [row] = [row for row in done.json["targets"] if row["name"] == name]
    return {one["check"]: one for one in row["checks"]}


def typed(driver: Specctl, mend: str) -> None:
    """What a person does with a mend: paste it into a shell here."""
    done = subprocess.run(["sh", "-c", mend], capture_output=True, text=True, check=False, env=driver.environ)
    assert done.returncode == 0, f"{mend}\n{done.stdout}{done.stderr}"


def examined(driver: Specctl, *words: str) -> dict[str, dict[str, Any]]:
    return checks(driver("doctor", "ct101", "--quick", "--json", *words))


def test_a_container_is_examined_without_an_agent_and_each_target_by_itself(specctl: Specctl, lab: Lab) -> None:
    lab.stop(102)
    try:
        done = specctl("doctor", "--json")
        stopped = checks(done, "ct102")["container"]
        assert done.code == 3 and stopped["status"] == "fail" and "102 is not running" in stopped["what"]
        typed(specctl, stopped["mend"])
    except BaseException:
        lab.start(102)
        raise
    assert "no container 777" in checks(done, "ct777")["container"]["what"]
    found = checks(done)
    assert {one["status"] for one in found.values()} <= {"ok", "warn"}, found
    assert found["container"]["what"] == "container 101 runs there"
    assert lab.inside(101, ["test", "-e", WORKDIR]).returncode == 1, "nothing is left there"
    assert "fail" not in {one["status"] for one in checks(specctl("doctor", "ct102", "--json"), "ct102").values()}


@pytest.mark.real_lab("a freezer")
def test_a_frozen_container_is_recognised_and_thawed_by_what_is_said(specctl: Specctl, lab: Lab) -> None:
    lab.freeze(101)
    try:
        done = specctl("doctor", "ct101", "--json")
        frozen = checks(done)["container"]
        assert done.code == 3 and "is frozen" in frozen["what"] and frozen["evidence"]
        assert checks(done)["tmux"]["what"] == "not looked at: container comes first"
        typed(specctl, frozen["mend"])
    finally:
        lab.thaw(101)
    assert examined(specctl)["container"]["status"] == "ok"


@pytest.mark.real_lab("other users")
def test_a_user_who_is_missing_and_one_who_may_not_write_are_mended_by_what_is_said(
    specctl: Specctl, lab: Lab
) -> None:
    targets(specctl, user="pat", workdir="/srv/pat/w")
    try:
        found = examined(specctl)
        assert found["user"]["status"] == "fail" and found["workdir"]["what"] == "not looked at: user comes first"
        typed(specctl, found["user"]["mend"])
        found = examined(specctl)
        assert found["user"]["status"] == found["home"]["status"] == "ok", found["user"]
        assert "pat cannot write in /srv" in found["workdir"]["what"]
        typed(specctl, found["workdir"]["mend"])
        found = examined(specctl)
        assert found["workdir"]["status"] == "ok" and "pat" in found["user"]["what"]
    finally:
        lab.inside(101, ["sh", "-c", "userdel -r pat; rm -rf /srv/pat"], capture_output=True)


def test_a_tmux_that_lost_its_socket_is_told_with_the_pid_that_makes_it_anew(specctl: Specctl, lab: Lab) -> None:
    run = specctl.launch("--until", "process", "--", "sleep", "600", target="ct101").json["run_id"]
    try:
        socket = f"{WORKDIR}/tmux-0"
        assert examined(specctl)["tmux socket"]["what"] == f"{socket}, its server answers"
        lab.inside(101, ["rm", socket], check=True)
        lost = examined(specctl)["tmux socket"]
        assert lost["status"] == "fail" and "its runs go on" in lost["what"], lost
        typed(specctl, lost["mend"])
        assert examined(specctl)["tmux socket"]["what"] == f"{socket}, its server answers"
        lab.inside(101, ["sh", "-c", f"rm {socket}; echo >{socket}"], check=True)
        assert "is no socket" in examined(specctl)["tmux socket"]["what"]
    finally:
        specctl("stop", run, "--now")


def test_programs_that_are_missing_are_told_each_by_its_check(specctl: Specctl, lab: Lab) -> None:
    away = "for f in /usr/bin/tmux /usr/bin/python3 /usr/lib/locale/C.utf8; do mv $f $f.away; done"
    try:
        lab.inside(101, ["sh", "-c", away], check=True)
        done = specctl("doctor", "ct101", "--json")
        found = checks(done)
        assert done.code == 1 and found["python"]["what"] == "python3 is not there"
        assert "set `python: /usr/bin/python3.11` of this target" in found["python"]["mend"], "another one is there"
        assert "tmux not found" in found["tmux"]["what"] and "apt-get install -y tmux" in found["tmux"]["mend"]
        lab.inside(101, ["mv", "/usr/bin/tmux.away", "/usr/bin/tmux"], check=True)
        found = examined(specctl)
        assert found["locale"]["status"] == "fail" and "LC_ALL" in found["locale"]["evidence"], found["locale"]
        assert found["tmux"]["status"] == "unknown"
    finally:
        lab.inside(101, ["sh", "-c", "for f in /usr/bin/*.away /usr/lib/locale/*.away; do mv $f ${f%.away}; done"])
    assert {examined(specctl)[name]["status"] for name in ("tmux", "locale")} == {"ok"}


@pytest.mark.real_lab("a second user of the node")
def test_a_login_without_sudo_is_told_at_the_last_rung(specctl: Specctl, lab: Lab) -> None:
    specctl.inventory.write_text(f"targets:\n  ct101: {{ssh: {USER}@pve, vmid: 101, workdir: {WORKDIR}}}\n")
    lab.set_sudo("")
    done = specctl("doctor", "--json")
    entry = checks(done)["entry"]
    assert done.code == 3 and entry["status"] == "fail" and f"the login is {USER}" in entry["what"]
    assert f"{USER} ALL=(root) NOPASSWD:" in entry["mend"] and entry["evidence"].startswith("sudo -n -l there says: ")
    lab.set_sudo(f"{USER} ALL=(root) NOPASSWD: /usr/local/sbin/pct exec 101 -- *")
    try:
        done = specctl("doctor", "--quick", "--json")
    finally:
        lab.set_sudo("")
    found = checks(done)
    assert done.code == 0 and found["entry"]["what"] == f"{USER}, through sudo"
    assert found["user"]["what"].startswith("root ")


@pytest.mark.real_lab("mounts of its own")
def test_disks_that_are_closed_full_or_run_no_programs_are_told_apart(specctl: Specctl, lab: Lab) -> None:
    lab.inside(101, ["mkdir", "-p", WORKDIR], check=True)

    def mounted(options: str) -> dict[str, Any]:
        lab.inside(101, ["mount", "-t", "tmpfs", "-o", options, "disk", WORKDIR], check=True)
        try:
            return examined(specctl)
        finally:
            lab.inside(101, ["umount", WORKDIR], check=True)

    closed = mounted("ro,size=64m")["workdir"]
    assert closed["status"] == "fail" and f"the file system at {WORKDIR} is read-only" in closed["what"]
    assert f"mount -o remount,rw {WORKDIR}" in closed["mend"]
    noexec = mounted("noexec,size=64m")["workdir"]
    assert noexec["status"] == "fail" and "noexec" in noexec["what"]
    full = mounted("size=64k")["workdir"]
    assert full["status"] == "fail" and "too little room" in full["what"]
    crowded = mounted("size=64m,nr_inodes=1")["workdir"]
    assert crowded["status"] == "fail" and "no free inodes" in crowded["what"]
    memory = mounted("size=64m")
    assert memory["workdir"]["status"] == "warn" and "in memory" in memory["workdir"]["what"]
    assert memory["disk"]["status"] == "warn"


@pytest.mark.skipif(os.geteuid() != 0, reason="device files are root's to make")
def test_gpus_of_a_container_are_judged_by_what_its_user_can_open(specctl: Specctl, lab: Lab) -> None:
    targets(specctl, gpus="[0]", user="gina")
    smi = "0, NVIDIA H200, 37, 1024, 143771"
    make = """
        useradd -m gina; groupadd gpus
        for n in nvidia0 nvidiactl nvidia-uvm; do mknod -m 660 /dev/$n c 1 3; chgrp gpus /dev/$n; done
    """
    lab.inside(101, ["sh", "-c", make], check=True)
    lab.nvidia_smi(101, smi)
    try:
        found = examined(specctl)
        assert found["driver"]["status"] == "ok" and "gina cannot open /dev/nvidia0" in found["devices"]["what"]
        typed(specctl, found["devices"]["mend"])
        assert examined(specctl)["devices"]["status"] == "ok", "a member of the group can"
        lab.inside(101, ["rm", "/dev/nvidia-uvm"], check=True)
        missing = examined(specctl)["devices"]
        assert missing["status"] == "fail" and missing["what"] == "/dev/nvidia-uvm is not there"
        assert "pct set 101 -dev0 /dev/nvidia-uvm,mode=0666 && pct reboot 101" in missing["mend"]
        assert "nvidia-smi lists 1 GPU" in missing["evidence"]
        lab.nvidia_smi(101, "Failed to initialize NVML: Unknown Error", 255)
        lost = examined(specctl)["driver"]
        assert "has lost its access" in lost["what"] and lost["mend"].endswith("pct reboot 101")
    finally:
        undo = "rm -f /dev/nvidia* /usr/local/bin/nvidia-smi; userdel -r gina; groupdel gpus"
        lab.inside(101, ["sh", "-c", undo], capture_output=True)
