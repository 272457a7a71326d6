"""What chaos does to a lane: each fault is begun, and undone by what it returns.

Everything is done from the host, and is noted in the stories of the runs that it touches before it is done.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.wire import DOWN, UP

if TYPE_CHECKING:
    from tests.lab.chaos.lane import Container, Lane

Heal = Callable[[], None]
Fault = Callable[["Lane", random.Random], Heal]
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGHUP", "SIGABRT")
BLOCK = b"\0" * (1 << 20)


def nothing() -> None:
    """There is nothing to undo."""


# --- the link and the node ------------------------------------------------------------------------------------------


def link_cut(lane: Lane, rng: random.Random) -> Heal:
    lane.wire.cut()
    return nothing


def link_cut_at_a_byte(lane: Lane, rng: random.Random) -> Heal:
    lane.wire.at(rng.choice((UP, DOWN)), int(rng.random() ** 2 * 40_000), lane.wire.cut)
    return lane.wire.count


def link_refused(lane: Lane, rng: random.Random) -> Heal:
    lane.wire.refuse()
    lane.wire.cut()
    return lane.wire.listen


def link_frozen(lane: Lane, rng: random.Random) -> Heal:
    lane.wire.hold()
    return lane.wire.let_go


def sshd_killed(lane: Lane, rng: random.Random) -> Heal:
    lane.lab.on_node(["pkill", "-KILL", "-f", "^sshd: root"])
    return nothing


# --- a container ----------------------------------------------------------------------------------------------------


def frozen(lane: Lane, rng: random.Random) -> Heal:
    box = lane.its_container(rng)
    lane.lab.freeze(box.vmid)
    return lambda: lane.lab.thaw(box.vmid)


def stopped(lane: Lane, rng: random.Random) -> Heal:
    box = _to_restart(lane, rng)
    lane.lab.stop(box.vmid)
    return lambda: lane.lab.start(box.vmid)


def rebooted(lane: Lane, rng: random.Random) -> Heal:
    box = _to_restart(lane, rng)
    lane.lab.stop(box.vmid)
    lane.lab.start(box.vmid)
    return nothing


def _to_restart(lane: Lane, rng: random.Random) -> Container:
    box = lane.its_container(rng)
    lane.befalls("restart", box)
    return box


def disk_full(lane: Lane, rng: random.Random) -> Heal:
    box = lane.its_container(rng)
    lane.befalls("disk", box)
    ballast = box.observer.workdir / "ballast"
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with contextlib.suppress(OSError):
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(fd, BLOCK[:size])
    os.close(fd)
    return lambda: ballast.unlink(missing_ok=True)


def agent_killed(lane: Lane, rng: random.Random) -> Heal:
    """What answers there for a verb, or carries out its stop."""
    box = lane.its_container(rng)
    lane.befalls("agent", box)
    for process in box.observer.look().processes:
        if process.agent:
            _signal(process.pid, signal.SIGKILL)
    return nothing


def tmux_killed(lane: Lane, rng: random.Random) -> Heal:
    box = lane.its_container(rng)
    for process in box.observer.look().processes:
        if process.name.startswith("tmux: server"):
            _signal(process.pid, signal.SIGKILL)
    return nothing


# --- a run ----------------------------------------------------------------------------------------------------------


def supervisor_killed(lane: Lane, rng: random.Random) -> Heal:
    run = lane.some_run(rng)
    view = run.box.observer.look()
    for process in view.processes:
        if process.supervises and view.runs.get(process.supervises) == run.token:
            lane.deed("supervisor", run)
            _signal(process.pid, signal.SIGKILL)
    return nothing


def program_killed(lane: Lane, rng: random.Random) -> Heal:
    run, name, which = lane.some_run(rng), rng.choice(SIGNALS), rng.random()
    found = [process for process in run.box.observer.look().processes if process.token == run.token]
    if found:
        lane.deed(name, run)
        _signal(found[int(which * len(found))].pid, signal.Signals[name])
    return nothing


def program_paused(lane: Lane, rng: random.Random) -> Heal:
    run = lane.some_run(rng)
    found = [process.pid for process in run.box.observer.look().processes if process.token == run.token]
    for pid in found:
        _signal(pid, signal.SIGSTOP)

    def heal() -> None:
        still = {process.pid for process in run.box.observer.look().processes if process.token == run.token}
        for pid in still & set(found):
            _signal(pid, signal.SIGCONT)

    return heal


def log_truncated(lane: Lane, rng: random.Random) -> Heal:
    run, part = lane.some_run(rng), rng.choice((0.0, 0.5, 0.9))
    for run_id in run.box.observer.look().run_ids(run.token):
        log = run.box.observer.workdir / "runs" / run_id / f"{run_id}.a1.log"
        lane.deed("cut", run)
        with contextlib.suppress(OSError):
            os.truncate(log, int(log.stat().st_size * part))
    return nothing


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


LINK = (link_refused, sshd_killed, link_cut, link_frozen, link_cut_at_a_byte)
CONTAINER = (frozen, stopped, rebooted)
DISK = (disk_full,)
RUN = (tmux_killed, supervisor_killed, program_killed, program_killed, program_paused, log_truncated)
ALL: tuple[Fault, ...] = (link_refused, *CONTAINER, *DISK, *RUN, *RUN)
"""Those under which verbs are asked from the first to the last."""
QUICK: tuple[Fault, ...] = (
    *LINK, link_cut_at_a_byte, link_cut_at_a_byte, frozen, rebooted, agent_killed, agent_killed, *DISK, *RUN,
)  # fmt: skip
"""Those that may come in the middle of a verb, and be over before it is."""
OF_ONE = frozenset({*CONTAINER, *DISK, agent_killed})
"""Those that touch one container, that of the run that was chosen last."""
HIDING = frozenset({*LINK, *CONTAINER, agent_killed})
"""Those under which it may be said that it cannot be known."""
