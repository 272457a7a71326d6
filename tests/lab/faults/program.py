"""What can happen to the program of a run: how it ends, how it stands still, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.driver import KERNEL_TELLS_ENDS, poll_until
from tests.lab.matrix import Scene, fault

BESIDE = """
import json, os, sys, time

RUN, NONCE = os.environ["SPECCTL_RUN_DIR"], os.environ["SPECCTL_NONCE"]

def beat(phase, step):
    with open(RUN + "/beat", "w") as file:
        json.dump({"nonce": NONCE, "phase": phase, "step": step, "time": time.time()}, file)
    os.replace(RUN + "/beat", RUN + "/heartbeat.json")

def step(number):
    print(f"step={number} loss={9 / number:.3f} tok/s=900", flush=True)
    time.sleep(0.05)
"""
"""What the programs of this page have in common."""


def program(scene: Scene, body: str) -> list[str]:
    """A Python program that is shipped with the project."""
    (scene.specctl.project / "fault.py").write_text(BESIDE + body)
    return ["python3", "fault.py"]


def start(scene: Scene, body: str, *, until: str = "process", shell: str | None = None) -> None:
    argv = program(scene, body)
    scene.start(*(argv if shell is None else ("bash", "-c", shell)), until=until)


# --- how it ends ----------------------------------------------------------------------------------------------------


@fault
def the_trainer_was_sigkilled(scene: Scene) -> Iterator[None]:
    scene.start(until="step")
    scene.inside(f"kill -KILL {scene.pid()}")
    scene.until_state("KILLED")
    yield


@fault
def the_trainer_crashed_sigsegv(scene: Scene) -> Iterator[None]:
    start(scene, "import faulthandler, threading\n"
          "faulthandler.enable()\n"
          "while True:\n"
          "    for n in range(1, 6): step(n)\n"
          "    while not os.path.exists('go'): time.sleep(0.02)\n"
          "    faulthandler._sigsegv()\n", until="step")  # fmt: skip
    scene.let_go()
    scene.until_state("KILLED")
    yield


@fault
def the_container_had_no_memory_left(scene: Scene) -> Iterator[None]:
    start(scene, "hoard = []\n"
          "for n in range(1, 100000):\n"
          "    step(n)\n"
          "    if os.path.exists('go'): hoard.append(os.urandom(8 << 20))\n", until="step")  # fmt: skip
    with memory_limit(scene, mib=160):
        scene.let_go()
        scene.until_state("KILLED")
        yield


@contextmanager
def memory_limit(scene: Scene, *, mib: int) -> Iterator[None]:
    """A limit on the memory of all that runs in the container, where it sees it itself, as on a real node."""
    if scene.inside("cat /sys/fs/cgroup/memory.max 2>/dev/null; :"):
        limit, undo = f"echo {mib << 20} >/sys/fs/cgroup/memory.max", "echo max >/sys/fs/cgroup/memory.max"
    else:  # the machine counts memory in a hierarchy of the first version
        mine, seen = f"/run/memory/specctl-{scene.lab.run.name}", "/sys/fs/cgroup/memory"
        limit = (
            f"mkdir -p /run/memory {seen}; mount -t cgroup -o memory memory /run/memory; mkdir {mine}; "
            f"echo {mib << 20} >{mine}/memory.limit_in_bytes; mount --bind {mine} {seen}; "
            f"for p in /proc/[0-9]*; do echo ${{p#/proc/}} >{mine}/cgroup.procs; done 2>/dev/null; :"
        )
        undo = (
            f"for p in $(cat {mine}/cgroup.procs); do echo $p >/run/memory/cgroup.procs; done 2>/dev/null; "
            f"umount {seen}; rmdir {mine} {seen}; umount /run/memory"
        )
    scene.inside(limit)
    try:
        yield
    finally:
        scene.inside(undo)


@fault
def the_program_ended_well(scene: Scene) -> Iterator[None]:
    start(scene, "for n in range(1, 200):\n    step(n)\n    if os.path.exists('go'): break\n", until="step")
    scene.let_go()
    scene.until_state("SUCCEEDED")
    yield


@fault
def the_program_exited_3_behind_a_pipe_to_tee(scene: Scene) -> Iterator[None]:
    if not KERNEL_TELLS_ENDS:
        pytest.skip("a kernel before 6.15 does not tell how the program ended; test_health has what is said then")
    start(scene, "for n in range(1, 2000):\n    step(n)\n    if os.path.exists('go'): print('saved'); sys.exit(3)\n",
          until="step", shell="python3 fault.py | tee train.log")  # fmt: skip
    scene.let_go()
    poll_until(lambda: not scene.pids(), what="the end")
    scene.until_state("FAILED", "SUCCEEDED")
    yield


@fault
def a_worker_thread_dies_while_others_go_on(scene: Scene) -> Iterator[None]:
    start(scene, "import threading\n"
          "def work(name):\n"
          "    for n in range(1, 100000):\n"
          "        print(f'step={n} worker={name} loss=2.5 tok/s=300.0', flush=True)\n"
          "        if name == 'drafter-0' and os.path.exists('go'): raise RuntimeError('boom')\n"
          "        time.sleep(0.05)\n"
          "for name in ('drafter-0', 'drafter-1'): threading.Thread(target=work, args=(name,), name=name).start()\n",
          until="step")  # fmt: skip
    scene.let_go()
    scene.until_state("DEGRADED")
    yield


@fault
def the_program_has_made_a_daemon_of_itself(scene: Scene) -> Iterator[None]:
    start(scene, "for _ in range(2):\n"
          "    if os.fork(): os._exit(0)\n"
          "    os.setsid()\n"
          "for n in range(1, 100000): step(n)\n", until="step")  # fmt: skip
    yield


# --- how it stands still --------------------------------------------------------------------------------------------


@contextmanager
def later(scene: Scene, body: str, seconds: int, *, until: str = "process") -> Iterator[None]:
    """A run, as it is so much later by the container's clocks: a stall takes minutes by these, and no time to test."""
    scene.lab.clock(scene.vmid)
    start(scene, body, until=until)
    scene.lab.clock(scene.vmid, passed_s=seconds)
    try:
        yield
    finally:
        scene.lab.clock(scene.vmid)


@fault
def it_stands_still_with_a_fresh_heartbeat_and_a_busy_cpu(scene: Scene) -> Iterator[None]:
    with later(scene, "for n in range(1, 11): step(n)\nwhile True: beat('train', 10)\n", 150, until="step"):
        yield


@fault
def the_compile_warm_up_is_merely_slow(scene: Scene) -> Iterator[None]:
    with later(scene, "print('phase=compile_warmup unit=1/3', flush=True)\nwhile True: time.sleep(1)\n", 720):
        yield


@fault
def an_import_hangs(scene: Scene) -> Iterator[None]:
    with later(scene, "while True: time.sleep(1)\n", 960):
        yield


# --- what it writes -------------------------------------------------------------------------------------------------


@fault
def output_of_64_mib_in_one_line(scene: Scene) -> Iterator[None]:
    start(scene, "step(1)\n"
          "sys.stdout.write('x' * (64 << 20) + '\\n')\n"
          "for n in range(2, 100000): step(n)\n")  # fmt: skip
    poll_until(lambda: scene.specctl.status(scene.run_id)["step"], what="a step after the line")
    yield


@fault
def output_of_200_000_lines_a_second(scene: Scene) -> Iterator[None]:
    start(scene, "for tenth in range(20):\n"
          "    first, begun = tenth * 20000 + 1, time.monotonic()\n"
          "    sys.stdout.write(''.join(f'step={n} loss=1.5 tok/s=900\\n' for n in range(first, first + 20000)))\n"
          "    sys.stdout.flush()\n"
          "    time.sleep(max(0.0, begun + 0.1 - time.monotonic()))\n"
          "while True: time.sleep(1)\n")  # fmt: skip
    poll_until(lambda: scene.specctl.status(scene.run_id)["step"] == 400_000, what="the last step")
    yield


@fault
def output_of_binary_garbage(scene: Scene) -> Iterator[None]:
    start(scene, "import random\n"
          "step(1)\n"
          "sys.stdout.buffer.write(random.Random(1).randbytes(1 << 20))\n"
          "sys.stdout.buffer.write(b'\\n\\x00\\x00\\x1b[31mRED\\x1b[0m \\xff\\xfe caf\\xe9\\n')\n"
          "for n in range(2, 100000): step(n)\n")  # fmt: skip
    poll_until(lambda: (scene.specctl.status(scene.run_id)["step"] or 0) > 1, what="a step after the garbage")
    scene.kept = False  # it is shown cleaned
    yield
    assert scene.specctl("logs", scene.run_id, "--grep", "RED").out == "RED \ufffd\ufffd caf\ufffd\n"
    sent = "import random, hashlib; print(hashlib.sha256(random.Random(1).randbytes(1 << 20)).hexdigest())"
    kept = f"sed 1,2d {scene.run_dir()}/{scene.run_id}.a1.log | head -c {1 << 20} | sha256sum"
    assert scene.inside(kept).split()[0] == scene.inside(f"python3 -c '{sent}'").strip()


@fault
def output_of_progress_bars_and_nothing_else(scene: Scene) -> Iterator[None]:
    start(scene, "for n in range(1, 100000):\n"
          "    sys.stdout.write(f'\\rTraining:  {n // 10}%|##   | {n}/100000 [00:10<01:00, 19.9it/s, loss=1.5]')\n"
          "    sys.stdout.flush(); time.sleep(0.05)\n")  # fmt: skip
    poll_until(lambda: scene.specctl.status(scene.run_id)["step"], what="a step")
    yield
