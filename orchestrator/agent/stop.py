"""`stop`: TERM once, wait, KILL, look again. "Stopped" is said only when no process of the run is left.

Frames on the way tell who is still there, so that the laptop shows what it waits for; the last one is what remains.
"""

from __future__ import annotations

import os
import signal
import time

from orchestrator.agent import files, proc, records
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.probe import probe
from orchestrator.model import ExitRecord, Process, RunPaths, StopRequest, to_json

KILL_S = 5.0
"""How long killed processes may take to vanish before they are reported as left."""
RECORD_S = 5.0
CHECKPOINT_S = 600.0
"""How much longer than the grace period a run may take while it says that it is writing a checkpoint."""
LEFTOVER_GRACE_S = 5.0
TELL_S = 1.0


def run(call: Call) -> None:
    run_id = str(call.request["run_id"])
    paths = call.paths.run(run_id)
    found = records.spec(paths)
    if found is None:
        raise Refusal("notfound", f"there is no run {run_id} in {call.paths.workdir}")
    Stopper(call, paths, found[0].nonce).run()
    last = probe(call, [run_id], time.time())[0]
    call.emit({
        "final": True, "probe": to_json(last),
        "remaining": [to_json(process) for process in tree(paths, found[0].nonce)],
    })  # fmt: skip


def tree(paths: RunPaths, nonce: str) -> list[Process]:
    record = records.supervisor(paths)
    alive = record is not None and proc.same(record.pid, record.start_ticks) is not None
    return proc.tree(nonce, record.pid if record and alive else None)


class Stopper:
    """One stop of one run."""

    def __init__(self, call: Call, paths: RunPaths, nonce: str) -> None:
        self.call, self.paths, self.nonce = call, paths, nonce
        self.asked: set[tuple[int, int]] = set()
        """(pid, start time) of the processes that have had their TERM: a second one would cut a checkpoint short."""
        self.told_at = 0.0

    def run(self) -> None:
        ended = records.exit_record(self.paths) is not None
        grace_s = LEFTOVER_GRACE_S if ended else float(self.call.request["grace_s"])
        if not ended:
            request = StopRequest(at=time.time(), by=str(self.call.request["by"]), grace_s=grace_s)
            files.write_json(self.paths.stop, to_json(request), durable=True)
        if not self.call.request.get("now"):
            self._ask(grace_s)
        self._kill()
        if not ended:
            self._await_record()

    def _ask(self, grace_s: float) -> None:
        begun = time.monotonic()
        while left := tree(self.paths, self.nonce):
            for process in left:
                if (process.pid, process.start_ticks) not in self.asked:
                    self.asked.add((process.pid, process.start_ticks))
                    send(process, signal.SIGTERM)
            waited_s = time.monotonic() - begun
            beat = records.heartbeat(self.paths, self.nonce)
            writing = beat is not None and beat.checkpointing
            if waited_s > grace_s + (CHECKPOINT_S if writing else 0.0):
                return
            self._tell(left, "checkpoint" if writing else "term", waited_s)
            time.sleep(0.05)

    def _kill(self) -> None:
        begun = time.monotonic()
        while left := tree(self.paths, self.nonce):
            for process in left:
                send(process, signal.SIGKILL)
            waited_s = time.monotonic() - begun
            if waited_s > KILL_S:
                return
            self._tell(left, "kill", waited_s)
            time.sleep(0.05)

    def _await_record(self) -> None:
        """The supervisor writes how the run ended; where there is none any more, this does."""
        begun = time.monotonic()
        while records.exit_record(self.paths) is None and not tree(self.paths, self.nonce):
            record = records.supervisor(self.paths)
            gone = record is None or proc.same(record.pid, record.start_ticks) is None
            if gone:
                files.create_json(self.paths.exit, to_json(ExitRecord(at=time.time(), stopped=True)))
                return
            if time.monotonic() - begun > RECORD_S:
                return
            time.sleep(0.02)

    def _tell(self, left: list[Process], doing: str, waited_s: float) -> None:
        if time.monotonic() - self.told_at >= TELL_S:
            self.told_at = time.monotonic()
            self.call.emit({
                "doing": doing, "waited_s": waited_s, "remaining": [to_json(process) for process in left],
            })  # fmt: skip


def send(process: Process, number: signal.Signals) -> None:
    """Signals exactly this process: a pidfd, checked against the start time, cannot hit a newcomer with its pid."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if proc.same(process.pid, process.start_ticks) is not None:
            signal.pidfd_send_signal(fd, number)
    except OSError:
        pass  # it has ended meanwhile, or is not ours to signal: the next look tells
    finally:
        os.close(fd)
