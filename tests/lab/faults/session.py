"""What can happen to a run's session, to its supervisor, to its records, and to what specctl put into the container."""

from __future__ import annotations

from collections.abc import Iterator

from tests.driver import poll_until
from tests.lab.matrix import WORKDIR, Scene, fault

SERVER = "for p in /proc/[0-9]*; do grep -q '^Name:.tmux: server' $p/status 2>/dev/null && echo ${p#/proc/}; done; :"
SOCKET = f"{WORKDIR}/tmux-0"
PYTHON = "/usr/bin/python3.11"
ENDS = f"""
import itertools, os, time
for step in itertools.count(1):
    print(f"step={{step}} tok/s=10", flush=True)
    time.sleep(0.1)
    if os.path.exists("{WORKDIR}/end"):
        break
"""
"""A program that steps until it is let end."""


def kill_supervisor(scene: Scene) -> None:
    pid = scene.supervisor()
    scene.inside(f"kill -KILL {pid}")
    poll_until(lambda: not scene.inside(f"[ ! -e /proc/{pid}/cwd ] || echo alive"), what="the supervisor's end")


def let_end(scene: Scene) -> None:
    scene.inside(f"touch {WORKDIR}/end")
    poll_until(lambda: not scene.pids(), what="the end of the program")


@fault
def the_tmux_server_was_killed(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"kill -KILL $({SERVER})")
    yield


@fault
def the_socket_of_tmux_was_deleted(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"rm {SOCKET}")
    yield


@fault
def the_session_was_killed(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"tmux -S {SOCKET} kill-session -t ={scene.run_id}")
    yield


@fault
def the_supervisor_was_killed(scene: Scene) -> Iterator[None]:
    scene.start()
    kill_supervisor(scene)
    yield


@fault
def the_supervisor_was_killed_and_the_program_ended_after(scene: Scene) -> Iterator[None]:
    scene.start("python3", "-c", ENDS)
    kill_supervisor(scene)
    let_end(scene)
    yield


@fault
def the_supervisor_was_killed_and_the_program_failed_after(scene: Scene) -> Iterator[None]:
    scene.start("python3", "-c", f"{ENDS}raise RuntimeError('the loader is gone')\n")
    kill_supervisor(scene)
    let_end(scene)
    yield


@fault
def the_supervisor_is_frozen(scene: Scene) -> Iterator[None]:
    scene.start()
    pid = scene.supervisor()
    scene.inside(f"kill -STOP {pid}")
    yield
    scene.inside(f"kill -CONT {pid} 2>/dev/null; :")


@fault
def supervisor_and_program_were_killed_and_others_have_their_pids(scene: Scene) -> Iterator[None]:
    scene.start()
    pids = [scene.supervisor(), scene.pid()]
    scene.inside(f"kill -KILL {pids[0]} {pids[1]}")
    poll_until(lambda: not scene.pids(), what="the end of the program")
    poll_until(lambda: not scene.inside(f"ls -d /proc/{pids[0]} 2>/dev/null; :"), what="the supervisor's end")
    for pid in pids:
        take_pid(scene, pid)
    yield
    for pid in pids:
        assert scene.inside(f"tr '\\0' ' ' </proc/{pid}/cmdline") == "sleep 600 ", "somebody else's process was killed"


def take_pid(scene: Scene, pid: int) -> None:
    """Lets a process that has nothing to do with the run have this pid in the container."""
    for _ in range(20):
        if scene.inside(f"tr '\\0' ' ' </proc/{pid}/cmdline 2>/dev/null; :") == "sleep 600 ":
            return
        scene.on_node(
            f"init=$(lxc-info -n {scene.vmid} -pH); nsenter --target=$init --pid --cgroup sh -c '"
            f"echo {pid - 1} >/proc/sys/kernel/ns_last_pid; "
            f"nsenter --mount=/proc/'$init'/ns/mnt setsid sleep 600 >/dev/null 2>&1 &'"
        )
    raise AssertionError(f"no process gets pid {pid}")


@fault
def somebody_deleted_the_run_s_directory(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.kept = False
    scene.inside(f"until rm -r {scene.run_dir()}; do :; done")  # its supervisor writes there
    yield


@fault
def run_json_is_cut_in_half(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.kept = False  # `logs` refuses, and the files are as they were
    cut(scene, "run.json")
    yield
    assert "step=1 " in scene.inside(f"head -3 {scene.run_dir()}/{scene.run_id}.a1.log")


@fault
def supervisor_json_is_cut_in_half(scene: Scene) -> Iterator[None]:
    scene.start()
    cut(scene, "supervisor.json")
    yield


@fault
def exit_json_is_cut_in_half(scene: Scene) -> Iterator[None]:
    scene.start("python3", "-c", ENDS)
    let_end(scene)
    scene.until_state("SUCCEEDED")
    cut(scene, "exit.json")
    yield


def cut(scene: Scene, name: str) -> None:
    path = f"{scene.run_dir()}/{name}"
    scene.inside(f"truncate -s $(($(stat -c %s {path}) / 2)) {path}")


@fault
def the_workdir_was_moved_away(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"mv {WORKDIR} {WORKDIR}-2")
    yield
    scene.inside(f"rm -rf {WORKDIR}; mv {WORKDIR}-2 {WORKDIR}")


@fault
def the_agent_was_deleted(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"rm -r {WORKDIR}/agents")
    yield


@fault
def the_agent_was_cut_short(scene: Scene) -> Iterator[None]:
    """Each file of its source ends in the middle, as after a crash of the machine."""
    scene.start()
    scene.inside(f"cd {WORKDIR}/agents && find . -name '*.py' -exec sh -c 'truncate -s 300 \"$1\"' sh {{}} \\;")
    yield


@fault
def the_agent_s_files_are_empty(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"cd {WORKDIR}/agents && find . -name '*.py' -exec truncate -s 0 {{}} +")
    yield


@fault
def a_module_of_the_agent_is_missing(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"cd {WORKDIR}/agents && rm -f */orchestrator/agent/probe.py */orchestrator/agent/stop.py")
    yield


@fault
def the_agent_s_bytecode_is_cut_short(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"cd {WORKDIR}/agents && find . -name '*.pyc' -exec truncate -s 100 {{}} +")
    yield


@fault
def python_was_removed_from_the_container(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.inside(f"mv {PYTHON} {PYTHON}.away")
    yield
    scene.inside(f"mv {PYTHON}.away {PYTHON}")


@fault
def python_is_half_upgraded(scene: Scene) -> Iterator[None]:
    """Its library is gone while a run's supervisor and program go on; the run ends before it is back."""
    scene.start("python3", "-c", ENDS)
    scene.inside("mv /usr/lib/python3.11 /usr/lib/python3.11-away")
    yield
    let_end(scene)
    scene.inside("mv /usr/lib/python3.11-away /usr/lib/python3.11")
    scene.until_state("SUCCEEDED")
