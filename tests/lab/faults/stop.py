"""What can happen to a stop: trees that do not want to end, and others that ask for the same, or start, meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from tests.driver import poll_until
from tests.lab.faults.launch import done, last
from tests.lab.gate import gate
from tests.lab.matrix import Scene, fault


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
    """In place of a process that hangs in the kernel: it sees no TERM."""
    scene.start("sh", scene.specctl.program("stubborn.sh"))
    poll_until(lambda: len(scene.pids()) >= 3, what="a tree")
    group = f"/sys/fs/cgroup/{scene.run_id}"
    for pid in scene.pids()[1:]:
        scene.inside(f"mkdir -p {group}; echo {pid} >{group}/cgroup.procs")
    scene.inside(f"echo 1 >{group}/cgroup.freeze; until grep -q 'frozen 1' {group}/cgroup.events; do sleep 0.05; done")
    impatient(scene)
    yield
    scene.inside(f"rmdir {group}")


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
