"""What can happen to the log of a run while its program goes on."""

from __future__ import annotations

from collections.abc import Iterator

from tests.driver import poll_until
from tests.lab.matrix import Scene, fault


def stepping(scene: Scene) -> str:
    """A run that steps; its log."""
    scene.start(until="step")
    return f"{scene.run_dir()}/{scene.run_id}.a1.log"


def lines_go_on(scene: Scene, path: str) -> None:
    """Until the program has written to the file again, as seen from outside."""
    size = int(scene.inside(f"stat -Lc %s {path}"))
    poll_until(lambda: int(scene.inside(f"stat -Lc %s {path}")) > size, what=f"a line in {path}")


@fault
def the_log_was_deleted(scene: Scene) -> Iterator[None]:
    log = stepping(scene)
    scene.kept = False
    scene.inside(f"rm {log}")
    lines_go_on(scene, f"/proc/{scene.pid()}/fd/1")
    shown = scene.specctl("logs", scene.run_id).out
    written = scene.inside(f"tail -n +2 /proc/{scene.pid()}/fd/1")
    assert shown.startswith("step=1 ") and written.startswith(shown)
    yield


@fault
def the_log_was_truncated(scene: Scene) -> Iterator[None]:
    log = stepping(scene)
    scene.kept = False
    scene.inside(f": >{log}")
    lines_go_on(scene, log)
    yield


@fault
def the_log_was_rotated_by_copying_and_truncating_it(scene: Scene) -> Iterator[None]:
    log = stepping(scene)
    scene.kept = False
    scene.inside(f"cp {log} {log}.1; : >{log}")
    lines_go_on(scene, log)
    yield
    assert scene.inside(f"sed -n 2p {log}.1").startswith("step=1 "), "what was copied stays where it was copied to"


@fault
def the_log_was_rotated_by_renaming_it(scene: Scene) -> Iterator[None]:
    log = stepping(scene)
    scene.inside(f"mv {log} {log}.1")
    lines_go_on(scene, f"{log}.1")
    yield
    scene.kept = False
    poll_until(lambda: not scene.pids(), what="the end")
    assert scene.specctl("logs", scene.run_id).out == scene.inside(f"tail -n +2 {log}.1")


@fault
def the_log_was_replaced_by_that_of_another_run(scene: Scene) -> Iterator[None]:
    other = stepping(scene)
    scene.specctl("stop", scene.run_id, "--now")
    log = stepping(scene)
    scene.kept = False
    scene.inside(f"cp {other} {log}.new; mv {log}.new {log}")
    yield


@fault
def the_log_was_overwritten_with_lines_of_another_run(scene: Scene) -> Iterator[None]:
    other = stepping(scene)
    scene.specctl("stop", scene.run_id, "--now")
    log = stepping(scene)
    scene.kept = False
    scene.inside(f"cp {other} {log}")
    lines_go_on(scene, log)
    yield


OWN = 'exec >>"$0" 2>&1; n=0; while :; do n=$((n + 1)); echo "step=$n loss=0.5 tok/s=700"; sleep 0.05; done'


@fault
def a_log_that_the_program_itself_writes_was_rotated_by_renaming_it(scene: Scene) -> Iterator[None]:
    scene.start("sh", "-c", OWN, "/root/w/train.log", until="step")
    scene.inside("mv /root/w/train.log /root/w/train.log.1")
    lines_go_on(scene, "/root/w/train.log.1")
    yield
    assert scene.specctl("logs", scene.run_id).out == scene.inside("cat /root/w/train.log.1")


@fault
def a_log_that_the_program_itself_writes_was_rotated_by_copying_and_truncating_it(scene: Scene) -> Iterator[None]:
    scene.start("sh", "-c", OWN, "/root/w/train.log", until="step")
    scene.inside("cp /root/w/train.log /root/w/train.log.1; : >/root/w/train.log")
    lines_go_on(scene, "/root/w/train.log")
    poll_until(lambda: scene.specctl.status(scene.run_id)["foreign_logs"][0]["restarts"], what="the restart")
    yield
    assert scene.specctl("logs", scene.run_id).out == scene.inside("cat /root/w/train.log")
