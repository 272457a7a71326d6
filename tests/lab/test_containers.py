"""Containers as people have them: unprivileged, of several users, without a network, with half of a Python.

Two containers for all of it: 131 is unprivileged and stays whole, 132 is taken apart piece by piece.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from tests.driver import Done, Specctl
from tests.lab.lab import Lab
from tests.wheels import make_wheel, wheel_of_pip

WHO = "import os; print('is', os.getuid(), os.getgroups(), os.environ['HOME'], os.environ['USER'], oct(os.umask(0)))\n"
STEPS = "import time\nn = 0\nwhile True: n += 1; print(f'step={n} tok/s=1', flush=True); time.sleep(.1)"
INVENTORY = """
defaults: {ssh: pve}
targets:
  root: {vmid: 131, workdir: /srv/root}
  train: {vmid: 131, user: train, workdir: /srv/not/yet/there}
  closed: {vmid: 131, user: train, workdir: /root/w}
  python: {vmid: 131, user: train, workdir: ~/w, python: /root/python3}
  gpu: {vmid: 131, user: train, workdir: ~/w, gpus: [0]}
  half: {vmid: 132, workdir: /srv/half}
"""


@pytest.fixture(scope="module")
def containers(lab: Lab) -> Iterator[Lab]:
    # A GPU as Proxmox passes it on: the node's device file, whose owner the container does not know.
    made = lab.on_node(["mknod", "-m", "660", "/run/nvidia0", "c", "1", "3"])
    assert made.returncode == 0, made.stderr
    device = {"lxc.mount.entry": "/run/nvidia0 dev/nvidia0 none bind,create=file"}
    lab.container(131, unprivileged="1", **device)
    lab.container(132)
    inside(lab, 131, "useradd -m train; usermod -aG video train")
    yield lab
    for vmid in (131, 132):  # with whatever still runs in them
        lab.stop(vmid)
        lab.undefine(vmid)


@pytest.fixture
def specctl(containers: Lab) -> Iterator[Specctl]:
    driver = Specctl(INVENTORY, SPECCTL_SSH_CONFIG=str(containers.ssh_config))
    yield driver
    driver.close()


def inside(lab: Lab, vmid: int, script: str) -> str:
    done = lab.inside(vmid, ["sh", "-ec", script])
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@contextlib.contextmanager
def without(lab: Lab, path: str) -> Iterator[None]:
    """The container 132 while `path` is not there."""
    inside(lab, 132, f"mv {path} {path}.away")
    try:
        yield
    finally:
        inside(lab, 132, f"mv {path}.away {path}")


def refused(specctl: Specctl, target: str) -> Done:
    done = specctl("launch", target, "--no-source", "--", "true")
    assert done.code == 1 and done.out == "" and done.err.count("error:") == 1, done.err
    return done


def test_two_users_of_an_unprivileged_container_have_runs_that_leave_each_other_alone(
    specctl: Specctl, containers: Lab
) -> None:
    assert "100000" in inside(containers, 131, "cat /proc/self/uid_map")
    runs = {}
    for target in ("root", "train"):
        done = specctl.launch("--no-source", "--", "python3", "-c", WHO + STEPS, target=target)
        assert done.code == 0, done.err
        runs[target] = done.json["run_id"]
    assert specctl.status("root")["run_id"] == runs["root"] and specctl.status("train")["run_id"] == runs["train"]
    said = {target: specctl("logs", run_id, "--grep", "^is ").out.strip() for target, run_id in runs.items()}
    assert said["root"].startswith("is 0 ") and said["root"].endswith("/root root 0o22")
    uid, video = inside(containers, 131, "id -u train; getent group video | cut -d: -f3").split()
    assert said["train"].startswith(f"is {uid} [") and video in said["train"]
    assert said["train"].endswith("/home/train train 0o22")
    assert inside(containers, 131, "stat -c %U /srv/not /srv/not/yet/there/tmux-*").split() == ["train", "train"]
    assert specctl("stop", runs["train"]).code == 0
    assert specctl.status("train")["state"] == "STOPPED" and specctl.status("root")["state"] == "RUNNING"
    assert "sleep" not in inside(containers, 131, "ps -u train -o comm= || true")


def test_what_the_runs_user_may_not_use_is_told_before_anything_is_sent(specctl: Specctl, containers: Lab) -> None:
    done = refused(specctl, "closed")
    assert "/root/w cannot be written by train" in done.err and "Permission denied" in done.err
    inside(containers, 131, "ln -sf /usr/bin/python3 /root/python3")
    done = refused(specctl, "python")
    assert "train may not run /root/python3" in done.err and "set `python: /usr/bin/python3`" in done.err
    done = refused(specctl, "gpu")
    assert "train cannot open /dev/nvidia0: it belongs to nobody:nogroup, mode 0660" in done.err
    assert "No such file" in containers.inside(131, ["ls", "/home/train/w/runs"]).stderr


def test_without_a_network_and_without_ensurepip_an_environment_comes_out_of_a_wheelhouse(specctl: Specctl) -> None:
    (specctl.project / "run.yaml").write_text("requirements: [outer]\n")
    house = specctl.project / "wheels"
    make_wheel(house, "outer", requires=("inner",), text="import inner")
    pip = wheel_of_pip(house)
    words = ("--config", "run.yaml", "--until", "process", "--no-source")
    program = ("--", "python", "-c", "import outer, time; time.sleep(600)")

    done = specctl.launch(*words, *program, target="root")
    said = done.json["error"]["message"]
    assert done.code == 1 and "has no ensurepip" in said and "--wheelhouse" in said
    assert "pip download -d wheels" in said and "--python-version=3.11" in said and "manylinux_2_28_x86_64" in said

    done = specctl.launch(*words, "--wheelhouse", "wheels", *program, target="root")
    said = done.json["error"]["message"]
    assert done.code == 1 and "No matching distribution found for inner" in said and "pip outer" in said

    make_wheel(house, "inner")
    done = specctl.launch(*words, "--wheelhouse", "wheels", *program, target="root")
    assert done.code == 0, done.out
    assert "sending 1 of 3 files" in done.err and "2 there already" in done.err
    pip.unlink()  # another wheelhouse is another environment
    assert "no wheel of pip" in specctl.launch(*words, "--wheelhouse", "wheels", *program, target="root").out


def test_what_a_container_lacks_is_named_with_what_it_has_and_the_key_that_mends_it(
    specctl: Specctl, containers: Lab
) -> None:
    inside(containers, 132, "mkdir -p /opt/conda/bin")
    with without(containers, "/usr/lib/python3.11/json"):  # as in Debian's python3-minimal
        done = refused(specctl, "half")
        assert "No module named 'json'" in done.err and "apt-get install python3" in done.err
        assert specctl("status", "half").code == 3
    with without(containers, "/usr/lib/python3.11/ctypes"):
        assert "has no module ctypes" in refused(specctl, "half").err
    with without(containers, "/usr/lib/python3.11/tarfile.py"):
        done = refused(specctl, "half")
        assert "has no module tarfile" in done.err and "apt-get install python3" in done.err
    with without(containers, "/usr/bin/python3"):
        inside(containers, 132, "ln -sf /usr/bin/python3.11 /opt/conda/bin/python3")
        assert "there is Python 3.11 at /opt/conda/bin/python3: set `python:" in refused(specctl, "half").err
    with without(containers, "/usr/lib/locale/C.utf8"):
        done = refused(specctl, "half")
        assert "/usr/bin/tmux does not start" in done.err and "UTF-8 locale" in done.err
        inside(containers, 132, "cp -r /usr/lib/locale/C.utf8.away /usr/lib/locale/de_DE.utf8")
        assert specctl("launch", "half", "--no-source", "--until", "process", "--", "sleep", "60").code == 0
        assert specctl("stop", "@last", "--now").code == 0
    with without(containers, "/usr/bin/tmux"):
        done = refused(specctl, "half")
        assert "tmux not found (searched /usr/local/sbin:" in done.err and "/opt/conda/bin" in done.err
        inside(containers, 132, "cp /usr/bin/tmux.away /opt/conda/bin/tmux")
        done = specctl.launch("--no-source", "--until", "process", "--", "sleep", "60", target="half")
        assert done.code == 0, done.err
    versions = json.loads(inside(containers, 132, f"cat /srv/half/runs/{done.json['run_id']}/run.json"))["versions"]
    assert versions["tmux"].startswith("tmux 3.")
    with without(containers, "/usr/lib/python3.11/ctypes"):
        assert specctl.status(done.json["run_id"])["state"] == "STARTING", "to look takes less than to launch"
    assert specctl("stop", "@last", "--now").code == 0
