"""What can happen to a launch: reply, link and laptop may go at any moment, and one program runs or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.driver import Done, poll_until
from tests.lab.faults.link import another_way, port_of, sessions, signal_sessions, until_nobody_is_left
from tests.lab.gate import gate
from tests.lab.matrix import DEADLINE_S, Scene, fault
from tests.wire import DOWN, UP, Wire, ssh_config

POINTS = 10
"""Moments in each direction of the link."""


def done(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert "Traceback (most recent call last)" not in err, err
    return Done(code=process.returncode, out=out, err=err)


def launches(scene: Scene) -> list[str]:
    """The run ids of all launches, as this machine has noted them."""
    lines = (scene.specctl.home / "state" / "specctl" / "launches.jsonl").read_text().splitlines()
    return [str(json.loads(line)["run_id"]) for line in lines]


def last(scene: Scene) -> str:
    return launches(scene)[-1]


def programs(scene: Scene) -> dict[str, int]:
    """Run id -> how many programs of it are alive, as seen from outside; each of these is one process."""
    found: dict[str, int] = {}
    script = (
        "for p in /proc/[0-9]*; do grep -q '^State:.[ZX]' $p/status || tr '\\0' '\\n' <$p/environ; done 2>/dev/null "
        "| grep ^SPECCTL_RUN_ID=; :"
    )
    for line in scene.inside(script).splitlines():
        found[line.partition("=")[2]] = found.get(line.partition("=")[2], 0) + 1
    return found


@fault
def two_launches_of_the_same_name_in_the_same_instant(scene: Scene) -> Iterator[None]:
    words = [*scene.words("launch")[:2], "--name", "twin", *scene.words("launch")[2:]]
    with gate(scene) as at:
        at.hold("put")
        both = [scene.specctl.start(*words) for _ in range(2)]
        for _ in both:
            at.until_held("put")
        at.open()
        answers = [done(process) for process in both]
    assert answers[1].code == 0, answers[1]
    twins = programs(scene)
    assert len(twins) == 2 and set(twins.values()) == {1} and all("-twin-" in run_id for run_id in twins), twins
    scene.say["status"] = ["status", scene.target]
    scene.asking = lambda verb: answers[0] if verb == "launch" else scene.ask(verb)
    yield


@fault
def the_reply_to_a_start_was_lost(scene: Scene) -> Iterator[None]:
    with gate(scene) as at:
        at.hold("start", "after")
        process = scene.specctl.start(*scene.words("launch"))
        at.until_held("start")
        scene.run_id = last(scene)
        assert programs(scene) == {scene.run_id: 1}
        at.hold("start", "after")
        signal_sessions(scene, sessions(scene), "KILL")
        at.until_held("start")  # it has been asked again
        at.open()
        answer = done(process)
    assert programs(scene) == {scene.run_id: 1}
    scene.asking = lambda verb: answer if verb == "launch" else scene.ask(verb)
    yield


@fault
def the_link_is_gone_for_good_when_a_start_has_been_asked_for(scene: Scene) -> Iterator[None]:
    with gate(scene) as at, Wire(port_of(scene)) as wire, another_way(scene, port=wire.port):
        at.hold("start")
        process = scene.specctl.start(*scene.words("launch"))
        at.until_held("start")
        wire.refuse()
        wire.cut()
        answer = done(process)
        at.open()
        until_nobody_is_left(scene)
    scene.run_id = last(scene)
    assert programs(scene) == {scene.run_id: 1}
    scene.asking = lambda verb: answer if verb == "launch" else scene.ask(verb)
    yield


@fault
def specctl_is_killed_at_any_moment_of_a_launch(scene: Scene) -> Iterator[None]:
    scene.start("sleep", "600", options=("--no-source",))  # brings the agent: from now on all launches are alike
    with Wire(port_of(scene)) as wire, another_way(scene, port=wire.port):
        scene.start("sleep", "600", options=("--no-source",))
        whole = dict(wire.bytes)
    moments = [(way, whole[way] * point // POINTS + 1) for way in (UP, DOWN) for point in range(POINTS)]
    with ThreadPoolExecutor(max_workers=4) as pool:
        launched = list(pool.map(lambda moment: killed_at(scene, *moment), moments))
    until_nobody_is_left(scene)
    alive = programs(scene)
    shown = {run["run_id"]: run["state"] for run in scene.specctl("status", scene.target, "--json").json["runs"]}
    for run_id in launched:
        assert alive.get(run_id, 0) <= 1, f"{run_id} has {alive[run_id]} programs"
        assert (shown.get(run_id) == "STARTING") == (run_id in alive), f"{run_id}: {shown.get(run_id)}, {alive}"
    met = sum(run_id in alive for run_id in launched)
    assert 0 < met < len(launched), f"{met} of {len(launched)} launches got as far as to start: all moments are alike"
    yield


def killed_at(scene: Scene, direction: str, count: int) -> str:
    """A launch whose specctl is killed at that byte; its run id."""
    known, pids = threading.Event(), list[int]()

    def kill() -> None:
        known.wait()
        os.kill(pids[0], signal.SIGKILL)

    folder = scene.specctl.home / f"{direction}-{count}"
    folder.mkdir()
    words = [*scene.words("launch")[:2], "--name", folder.name, *scene.words("launch")[2:]]
    with Wire(port_of(scene)) as wire:
        wire.at(direction, count, kill)
        way = str(ssh_config(folder, scene.lab.run, wire.port))
        process = scene.specctl.start(*words, SPECCTL_SSH_CONFIG=way)
        pids.append(process.pid)
        known.set()
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL, f"{folder.name}: it came to its end: {process.returncode}"
    [run_id] = [noted for noted in launches(scene) if f"-{folder.name}-" in noted]
    return run_id


@fault
def a_launch_is_repeated_while_the_first_one_is_under_way(scene: Scene) -> Iterator[None]:
    """By its user, who gets a run of its own; nothing of the first is touched."""
    with gate(scene) as at:
        at.hold("start")
        first = scene.specctl.start(*scene.words("launch"))
        at.until_held("start")
        first.send_signal(signal.SIGINT)
        assert done(first).code == 130
        earlier = last(scene)
        at.open()
        answer = done(scene.specctl.start(*scene.words("launch")))
        until_nobody_is_left(scene)
    scene.run_id = last(scene)
    poll_until(lambda: programs(scene) == {earlier: 1, scene.run_id: 1}, what=f"{earlier} and {scene.run_id}")
    scene.say["status"] = ["status", scene.target]
    scene.asking = lambda verb: answer if verb == "launch" else scene.ask(verb)
    yield
