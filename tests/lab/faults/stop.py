"""What can happen to a stop: trees that do not want to end, and others that ask for the same, or start, meanwhile."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.driver import poll_until
from tests.lab.faults.disk import loop_disk
from tests.lab.faults.launch import done, last
from tests.lab.gate import gate
from tests.lab.matrix import WORKDIR, Scene, fault, flat

DISK = "/slow"


def impatient(scene: Scene) -> None:
    scene.say["stop"] = ["stop", scene.run_id, "--grace", "2"]


@fault
def the_tree_has_members_that_ignore_term_and_have_left_its_session(scene: Scene) -> Iterator[None]:
    scene.start("sh", scene.specctl.program("stubborn.sh"))
    poll_until(lambda: len(scene.pids()) >= 3, what="a tree")
    impatient(scene)
    yield


@fault
def a_part_of_the_tree_is_frozen_when_it_is_to_be_stopped(scene: Scene) -> Iterator[None]:
    """It sees no TERM, and is killed all the same."""
    scene.start("sh", scene.specctl.program("stubborn.sh"))
    poll_until(lambda: len(scene.pids()) >= 3, what="a tree")
    group = f"/sys/fs/cgroup/{scene.run_id}"
    scene.inside(f"mkdir -p {group}")
    for pid in scene.pids()[1:]:  # one of them may end by itself meanwhile
        scene.inside(f"echo {pid} >{group}/cgroup.procs || ! grep -q '^State:.[^ZX]' /proc/{pid}/status")
    assert scene.inside(f"cat {group}/cgroup.procs")
    scene.inside(f"echo 1 >{group}/cgroup.freeze; until grep -q 'frozen 1' {group}/cgroup.events; do sleep 0.05; done")
    impatient(scene)
    yield
    scene.inside(f"rmdir {group}")


@fault
def a_part_of_the_tree_hangs_in_the_kernel(scene: Scene) -> Iterator[None]:
    """State D, as over a disk or a network file system that does not answer: a KILL waits until it does."""
    loop_disk(scene, DISK)
    try:
        writes = f"echo step=1; until [ -e {WORKDIR}/go ]; do sleep 0.05; done; echo >{DISK}/file"
        scene.start("sh", "-c", writes, until="step")
        with hanging(scene, DISK):
            scene.inside(f"touch {WORKDIR}/go")
            poll_until(lambda: states(scene) == ["D"], what="state D")
            impatient(scene)
            yield
            said = scene.specctl("status", scene.run_id)
            assert said.code == 0 and "STOPPING" in said.out and "hung in the kernel: sh (" in flat(said.out), said
        poll_until(lambda: not scene.pids(), what="the end, once the disk answers")
        scene.until_state("STOPPED")
    finally:
        scene.inside(f"umount --lazy {DISK}")


def states(scene: Scene) -> list[str]:
    return [scene.inside(f"cut -d ' ' -f 3 /proc/{pid}/stat 2>/dev/null; :").strip() for pid in scene.pids()]


@contextmanager
def hanging(scene: Scene, path: str) -> Iterator[None]:
    """The file system there takes no writes, until the end of this, or of whoever runs it."""
    init = scene.on_node(f"lxc-info -n {scene.vmid} -p -H").strip()
    script = 'exec 9<"$1"; fsfreeze --freeze /dev/fd/9 && echo frozen && cat; fsfreeze --unfreeze /dev/fd/9'
    argv = ["sh", "-c", script, "sh", f"{scene.lab.root}/proc/{init}/root{path}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as frozen:
        assert frozen.stdin and frozen.stdout and frozen.stdout.readline() == "frozen\n"
        yield
        frozen.stdin.close()


@fault
def the_supervisor_was_killed_before_the_stop(scene: Scene) -> Iterator[None]:
    scene.start("sh", scene.specctl.program("stubborn.sh"))
    poll_until(lambda: len(scene.pids()) >= 3, what="a tree")
    scene.inside(f"kill -9 {scene.supervisor()}")
    impatient(scene)
    yield


@fault
def two_stops_are_asked_for_at_once(scene: Scene) -> Iterator[None]:
    scene.start("python3", scene.specctl.program("counts_terms.py"))
    with gate(scene) as at:
        at.hold("stop")
        both = [scene.specctl.start(*scene.words("stop")) for _ in range(2)]
        for _ in both:
            at.until_held("stop")
        at.open()
        answers = [done(process) for process in both]
    assert answers[1].code == 0 and "STOPPED" in answers[1].out, answers[1]
    assert scene.inside(f"cat {scene.run_dir()}/terms").strip() == "1", "TERM was sent twice"
    scene.asking = lambda verb: answers[0] if verb == "stop" else scene.ask(verb)
    yield


@fault
def a_stop_is_asked_for_while_the_run_starts(scene: Scene) -> Iterator[None]:
    with gate(scene) as at:
        at.hold("start", "after")
        launch = scene.specctl.start(*scene.words("launch"))
        at.until_held("start")
        scene.run_id = last(scene)
        stop = scene.ask("stop")
        at.open()
        answers = {"launch": done(launch), "stop": stop}
    scene.asking = lambda verb: answers.get(verb) or scene.ask(verb)
    yield
