"""What can happen to the disk of a run, and to who may write there."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.driver import poll_until
from tests.lab.faults.program import start
from tests.lab.matrix import PAGE, WORKDIR, Scene, fault

SECRET = "hunter2-Zq9x-tulip"
STUBBORN = (
    "lost = 0\n"
    "for n in range(1, 100000):\n"
    "    try: step(n)\n"
    "    except OSError: time.sleep(0.05)\n"
)  # fmt: skip
"""A program that goes on although its output cannot be written."""


def mounted(scene: Scene, options: str) -> None:
    """A disk of its own for the workdir; the scene's end unmounts it."""
    scene.inside(f"mkdir -p {WORKDIR} && mount -t tmpfs -o {options} disk {WORKDIR}")


def fill(scene: Scene) -> None:
    scene.inside(f"cat /dev/zero >{WORKDIR}/filler 2>/dev/null; :")


def push_says(scene: Scene, *words: str) -> None:
    done = scene.specctl("push", scene.target, str(PAGE), f"{WORKDIR}/pushed")
    assert done.code == 1 and all(word in done.err for word in words), done.err


@fault
def the_disk_was_full_before_the_launch(scene: Scene) -> Iterator[None]:
    mounted(scene, "size=24m")
    fill(scene)
    yield


@fault
def the_disk_fills_up_and_the_program_goes_on(scene: Scene) -> Iterator[None]:
    mounted(scene, "size=24m")
    start(scene, STUBBORN, until="step")
    fill(scene)
    push_says(scene, f"the file system at {WORKDIR} has 0.0 of 24.0 MiB free", "make room")
    yield


@fault
def the_disk_fills_up_and_the_program_dies_of_it(scene: Scene) -> Iterator[None]:
    mounted(scene, "size=24m")
    start(scene, "for n in range(1, 100000): step(n)\n", until="step")
    fill(scene)
    poll_until(lambda: not scene.pids(), what="its end")
    scene.until_state("FAILED")
    yield


@fault
def a_checkpoint_found_no_room(scene: Scene) -> Iterator[None]:
    mounted(scene, "size=24m")
    start(scene, "for n in range(1, 100000):\n"
          "    step(n)\n"
          "    if os.path.exists('go'):\n"
          "        folder = RUN + f'/checkpoints/step-{n}.tmp'\n"
          "        os.makedirs(folder)\n"
          "        with open(folder + '/model.bin', 'wb', buffering=0) as file:\n"
          "            while True: file.write(bytes(1 << 20))\n", until="step")  # fmt: skip
    scene.let_go()
    scene.until_state("FAILED")
    yield


@fault
def the_disk_has_no_inodes_left(scene: Scene) -> Iterator[None]:
    mounted(scene, "size=64m,nr_inodes=2000")
    scene.start(until="step")
    many = "[open(str(number), \"w\").close() for number in range(9999)]"
    scene.inside(f"mkdir {WORKDIR}/many; cd {WORKDIR}/many; python3 -c '{many}' 2>/dev/null; :")
    push_says(scene, f"the file system at {WORKDIR} has no free inodes", "make room")
    yield


def loop_disk(scene: Scene, where: str, options: str = "rw") -> Path:
    """Mounts a real disk, of an image on a loop device, in the container; its device."""
    image = scene.lab.run / "disk.img"
    subprocess.run(["truncate", "-s", "32M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    found = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no loop device can be had here: {found.stderr.strip()}")
    device = Path(found.stdout.strip())
    node = f"b {os.major(device.stat().st_rdev)} {os.minor(device.stat().st_rdev)}"
    try:
        init = scene.on_node(f"lxc-info -n {scene.vmid} -p -H").strip()
        mount = f"rm -f /disk; mknod /disk {node}; mount -t ext4 -o {options} /disk {where}"
        scene.on_node(f"nsenter --target {init} --mount sh -ec 'mkdir -p {where}; {mount}'")
    finally:  # it goes by itself when it is unmounted
        subprocess.run(["losetup", "--detach", device], check=False)
        image.unlink()
    return device


@fault
def the_disk_becomes_read_only(scene: Scene) -> Iterator[None]:
    device = loop_disk(scene, WORKDIR, "errors=remount-ro")
    scene.kept = False
    start(scene, STUBBORN, until="step")
    Path(f"/sys/fs/ext4/{device.name}/trigger_fs_error").write_text("the lab")
    yield


# --- who may write --------------------------------------------------------------------------------------------------


def another_user(scene: Scene) -> None:
    """From now on verbs are asked by a user of the container who is not root."""
    scene.inside("id trainer >/dev/null 2>&1 || useradd -m trainer")
    text = scene.specctl.inventory.read_text()
    scene.specctl.inventory.write_text(text.replace("{vmid: 101}", "{vmid: 101, user: trainer}"))


@fault
def the_workdir_belongs_to_somebody_else(scene: Scene) -> Iterator[None]:
    scene.inside(f"mkdir -p {WORKDIR} && chmod 755 /root {WORKDIR}")
    another_user(scene)
    yield


@fault
def the_run_belongs_to_somebody_else(scene: Scene) -> Iterator[None]:
    scene.start(until="step")
    scene.inside("chmod 755 /root")
    before = scene.specctl.inventory.read_text()
    another_user(scene)
    yield
    scene.specctl.inventory.write_text(before)


# --- secrets --------------------------------------------------------------------------------------------------------


@fault
def the_run_has_a_secret(scene: Scene) -> Iterator[None]:
    text = scene.specctl.inventory.read_text()
    scene.specctl.inventory.write_text(text.replace("{vmid: 101}", "{vmid: 101, secrets: [API_KEY]}"))
    scene.specctl.environ["API_KEY"] = SECRET
    said = []
    with command_lines_that_show(SECRET) as shown:
        start(scene, f"assert os.environ['API_KEY'] == {SECRET[:4]!r} + {SECRET[4:]!r}\n"
              "for n in range(1, 100000): step(n)\n", until="step")  # fmt: skip
        holders = scene.inside(f"grep -l {SECRET} /proc/[0-9]*/environ 2>/dev/null; :").split()
        assert holders == [f"/proc/{pid}/environ" for pid in scene.pids()], "only the program has it"
        failing = ["--until", "process", "--", "python3", "-c", "import os; os.environ['API_KEY'].bad"]
        for verb in (["launch", scene.target, "--plan"], ["launch", scene.target]):
            for words in (verb, [*verb, "--json"]):
                done = scene.specctl(*words, *failing)
                said.append(done.out + done.err)
        assert "AttributeError" in said[-1], said[-1]
        failed = json.loads(done.out)["run_id"]
        for verb in (
            ["status"], ["ls"], ["show", scene.run_id], ["show", failed], ["logs", scene.run_id], ["logs", failed],
            ["logs", failed, "--errors"], ["targets"],
        ):  # fmt: skip
            for words in (verb, [*verb, "--json"]):
                done = scene.specctl(*words)
                assert done.code == 0 and (done.out or "--json" in words), (words, done)
                said.append(done.out + done.err)
        tmux = f"tmux -S {WORKDIR}/tmux-0"
        asked = "show-environment -g", f"show-environment -t ={scene.run_id}", "list-panes -aF '#{pane_start_command}'"
        for words in (*asked, f"capture-pane -p -S - -t ={scene.run_id}:"):
            said.append(scene.inside(f"{tmux} {words}"))
        assert "step=" in said[-1], "the pane shows the run"
        yield
    assert not shown, f"it stood in command lines: {shown}"
    assert not [text for text in said if SECRET in text]
    there = scene.inside(f"grep -rl {SECRET} {WORKDIR} /root /tmp /run /var /etc /dev/shm 2>/dev/null; :")
    assert not there, f"in the container: {there}"
    here = subprocess.run(["grep", "-rl", SECRET, scene.specctl.home], capture_output=True, text=True)
    assert not here.stdout, f"on the laptop: {here.stdout}"
    assert not scene.on_node(f"grep -rl {SECRET} /root /tmp /run/pve /var/log /etc/pve 2>/dev/null; :")


@contextmanager
def command_lines_that_show(text: str) -> Iterator[list[str]]:
    """The command lines of any process of laptop, node and container that hold it: this machine sees them all."""
    found: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    if text.encode() in (line := path.read_bytes()) and b"grep" not in line:
                        found.append(line.replace(b"\0", b" ").decode(errors="replace"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
