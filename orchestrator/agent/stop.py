"""`stop`: TERM once, wait, KILL, look again. "Stopped" is said only when no process of the run is left.

The stop is carried out by a process of its own (`Stopper`), which needs neither the laptop nor the link: whoever asked
only watches it, may leave, and may come back. A later request shortens the grace period of the one under way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from orchestrator.agent import cgroup, files, gpu, proc, records, space
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.probe import probe, without_record
from orchestrator.model import ExitRecord, Process, RunPaths, StopperRecord, StopRequest, to_json

KILL_S = 5.0
"""How long killed processes may take to vanish before they are reported as left."""
RECORD_S = 5.0
CHECKPOINT_S = 600.0
"""How much longer than the grace period a run may take while it says that it is writing a checkpoint."""
LEFTOVER_GRACE_S = 5.0
TELL_S = 1.0
QUIET_S = 3.0
"""How long the supervisor may take to record the end before that is told as something that is waited for."""
POLL_S = 0.05
TRIES = 3
"""Stoppers that are started by one call; the next is needed only if one is killed at its work."""


def run(call: Call) -> None:
    run_id = str(call.request["run_id"])
    paths = call.paths.run(run_id)
    found = records.spec(paths)
    if (why := records.closed(paths)) is not None:
        raise Refusal("preflight", f"{run_id} cannot be stopped: {why}",
                      "ask as that user, or as root: `user:` of the target in hosts.yaml")  # fmt: skip
    if found is None:
        _stop_without_record(call, paths)
        return
    if (host := records.elsewhere(found[1])) is not None and records.exit_record(paths) is None:
        raise Refusal("preflight", f"{run_id} is a run of the host {host}: it can only be stopped there")
    nonce, request = found[0].nonce, _request(call)
    devices, numbers = set[str](), list[int]()
    if processes := tree(paths, nonce):
        devices = set(proc.gpu_devices(processes))
        numbers = records.gpu_numbers(found[0], records.gpu_claim(paths, nonce))
    if processes or unsettled(paths) or records.supervisor(paths) is None:  # else it was over before anybody asked
        if records.exit_record(paths) is None:
            _note(paths, request)
        watch(call, paths, nonce, request)
    last = probe(call, [run_id], time.time())[0]
    left = tree(paths, nonce)
    call.emit({
        "final": True, "probe": to_json(last), "remaining": [to_json(process) for process in left],
        "kept": [] if left else gpu.kept(devices, numbers),
    })  # fmt: skip


def _stop_without_record(call: Call, paths: RunPaths) -> None:
    """run.json is damaged or gone, with its directory perhaps: the mark that its processes carry says what to stop."""
    supervisor = records.supervisor(paths)
    nonce = proc.marked_runs(call.paths.runs).get(paths.run_id) or (supervisor.nonce if supervisor else None)
    if nonce is None or not tree(paths, nonce):
        if os.path.isdir(paths.root):
            last = without_record(paths, nonce or f"none of {paths.run_id}", [], time.time())
            call.emit({"final": True, "probe": to_json(last), "remaining": []})
            return
        raise Refusal("notfound", f"there is no run {paths.run_id} in {call.paths.workdir}, nor any process of it")
    made = [folder for folder in (paths.root, call.paths.runs, call.paths.workdir) if not os.path.isdir(folder)]
    os.makedirs(paths.root, mode=0o700, exist_ok=True)
    request = _request(call)
    _note(paths, request)
    watch(call, paths, nonce, request)
    left = tree(paths, nonce)
    if made and not left:  # somebody wanted it gone, or moved it away; it was only there for this stop
        shutil.rmtree(paths.root, ignore_errors=True)
        with suppress(OSError):
            for folder in made[1:]:
                os.rmdir(folder)
    last = without_record(paths, nonce, left, time.time())
    call.emit({"final": True, "probe": to_json(last), "remaining": [to_json(process) for process in left]})


def _request(call: Call) -> StopRequest:
    return StopRequest(
        at=time.time(), by=str(call.request["by"]), grace_s=float(call.request["grace_s"]),
        now=bool(call.request.get("now")),
    )  # fmt: skip


def _note(paths: RunPaths, request: StopRequest) -> None:
    """A disk that takes no record must not keep the run from being stopped. Raises `OSError` for any other reason."""
    try:
        files.write_json(paths.stop, to_json(request), durable=True)
    except OSError:
        if not unrecordable(paths):
            raise


def unrecordable(paths: RunPaths) -> bool:
    """Whether how the run ends cannot be written down, and so need not be waited for."""
    disk = space.disk_of(paths.root)
    return disk is not None and disk.read_only


def watch(call: Call, paths: RunPaths, nonce: str, request: StopRequest) -> None:
    """Sees to it that a stopper is at work, and tells what it waits for, until there is nothing more to wait for."""
    started, told_at = 0, 0.0
    while True:
        left = tree(paths, nonce)
        if not at_work(paths):
            stopper = records.stopper(paths)
            finished = stopper is not None and stopper.finished and stopper.request_at >= request.at
            ended = records.exit_record(paths) is not None or (started and unrecordable(paths))
            if (not left and ended) or finished or started == TRIES:
                return
            started += 1
            spawn(paths, nonce, request)
        stopper = records.stopper(paths)
        due = left or time.time() - request.at > QUIET_S
        if stopper is not None and due and time.monotonic() - told_at >= TELL_S:
            told_at = time.monotonic()
            call.emit({
                "doing": stopper.doing, "waited_s": max(0.0, time.time() - request.at),
                "remaining": [to_json(process) for process in left],
            })  # fmt: skip
        time.sleep(POLL_S)


def tree(paths: RunPaths, nonce: str) -> list[Process]:
    """The run's living processes; whoever asks is none of them, even when a run stops itself."""
    found = proc.tree(nonce, proc.roots_of(records.supervisor(paths)))
    return [process for process in found if process.pid != os.getpid()]


def unsettled(paths: RunPaths) -> bool:
    """A supervisor is alive and has not recorded the end: what one walk over /proc does not find may still be there,
    since a process can fork and leave faster than one can look."""
    roots = proc.roots_of(records.supervisor(paths))
    return roots.supervisor is not None and records.exit_record(paths) is None and not unrecordable(paths)


@contextmanager
def lock(paths: RunPaths) -> Iterator[bool]:
    """Whether this process may be the run's stopper: one at a time."""
    # Only to be locked: another user, root say, may have made it.
    with os.fdopen(os.open(paths.stop_lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def at_work(paths: RunPaths) -> bool:
    with lock(paths) as free:
        return not free


def spawn(paths: RunPaths, nonce: str, request: StopRequest) -> None:
    """Starts a stopper that outlives this process, its session and its terminal."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(ready)
        with lock(paths) as mine:
            os.close(done)
            if mine:
                Stopper(paths, nonce, request).run()
        os._exit(0)
    os.close(done)
    os.waitpid(child, 0)
    os.read(ready, 1)  # returns once the lock is taken, or could not be
    os.close(ready)


class Stopper:
    """Carries out one stop of one run."""

    def __init__(self, paths: RunPaths, nonce: str, request: StopRequest) -> None:
        self.paths, self.nonce, self.request = paths, nonce, request
        self.ended = records.exit_record(paths) is not None
        self.asked: set[tuple[int, int]] = set()
        """(pid, start time) of the processes that have had their TERM: a second one would cut a checkpoint short."""
        own = proc.stat(os.getpid())
        self.pid, self.start_ticks = os.getpid(), own[0].start_ticks if own else 0
        self.signalled_at: float | None = None
        self.kill_at = time.monotonic() + self._grace_s(request)

    def run(self) -> None:
        self._record("term")
        self._settle()
        self._wake()
        if not self.request.now:
            self._ask()
        self._kill()
        if not self.ended:
            self._await_record()
        self._record("done", finished=True)

    def _grace_s(self, request: StopRequest) -> float:
        if request.now:
            return 0.0
        return min(request.grace_s, LEFTOVER_GRACE_S) if self.ended else request.grace_s

    def _heed(self) -> None:
        """A later request may shorten the time that is left; it never lengthens it."""
        latest = records.stop_request(self.paths)
        if latest is not None and latest.at > self.request.at:
            self.request = latest
            self.kill_at = min(self.kill_at, time.monotonic() + self._grace_s(latest))

    def _settle(self) -> None:
        """What was only accepted ends here; what is just beginning has begun before it is asked to end."""
        give_up_at = time.monotonic() + RECORD_S
        while not (self.ended or records.supervisor(self.paths) or tree(self.paths, self.nonce)):
            try:
                if files.claim(self.paths.claim, "stop"):
                    # No supervisor can begin any more, whatever became of its launch.
                    why = f"no supervisor of it had begun when {self.request.by or 'somebody'} stopped it"
                    ending = ExitRecord(at=time.time(), never_started=why, nonce=self.nonce)
                    files.create_json(self.paths.exit, to_json(ending))
            except OSError:
                return  # a disk that takes neither: nor would it take what a supervisor writes
            self.ended = records.exit_record(self.paths) is not None
            if not self.ended:
                if time.monotonic() > give_up_at:
                    return
                self._record("term")
                time.sleep(POLL_S)
                self.kill_at = time.monotonic() + self._grace_s(self.request)

    def _ask(self) -> None:
        while (left := tree(self.paths, self.nonce)) or unsettled(self.paths):
            for process in left:
                if (process.pid, process.start_ticks) not in self.asked:
                    self.asked.add((process.pid, process.start_ticks))
                    self._signal(process, signal.SIGTERM)
            self._heed()
            beat = records.heartbeat(self.paths, self.nonce)
            writing = beat is not None and beat.checkpointing and not self.request.now
            if time.monotonic() > self.kill_at + (CHECKPOINT_S if writing else 0.0):
                return
            self._record("checkpoint" if writing else "term")
            time.sleep(POLL_S)

    def _kill(self) -> None:
        give_up_at = time.monotonic() + KILL_S
        while (left := tree(self.paths, self.nonce)) or unsettled(self.paths):
            if time.monotonic() > give_up_at:
                return
            for process in left:
                self._signal(process, signal.SIGKILL)
            self._record("kill")
            # Without a pause while there is something: a chain of forks is caught only by being quicker than it.
            time.sleep(0.0 if left else POLL_S)

    def _await_record(self) -> None:
        """The supervisor writes how the run ended; where there is none any more, this does."""
        give_up_at = time.monotonic() + RECORD_S
        while records.exit_record(self.paths) is None and not tree(self.paths, self.nonce):
            record = records.supervisor(self.paths)
            if record is None or proc.same(record.pid, record.start_ticks) is None:
                cgroup.remove(record.cgroup if record else None)
                # A run of which nothing was left is not ended by being asked to: how it was lost stays to be seen.
                if self.signalled_at is not None:
                    ending = ExitRecord(
                        at=time.time(), stopped=True, attempt=1, nonce=self.nonce,
                        clock_set_by_s=records.clock(self.paths).set_by_s,
                    )  # fmt: skip
                    with suppress(OSError):
                        files.create_json(self.paths.exit, to_json(ending))
                return
            if time.monotonic() > give_up_at or unrecordable(self.paths):
                return
            time.sleep(POLL_S)

    def _wake(self) -> None:
        """Lets a supervisor that somebody has stopped go on: it has an end to record."""
        record = records.supervisor(self.paths)
        if record is not None and record.boot == proc.boot_identity():
            process = proc.same(record.pid, record.start_ticks)
            if process is not None and process.stopped:
                self._send(process, signal.SIGCONT)

    def _signal(self, process: Process, number: signal.Signals) -> None:
        """Signals exactly this process: a pidfd, checked against the start time, cannot hit a newcomer with its pid."""
        if self.signalled_at is None:
            # On record before it is sent: the supervisor asks whether the end came after it.
            self.signalled_at = time.time()
            self._record(number.name[3:].lower())
            with suppress(OSError):
                files.JsonLines(self.paths.events).append({
                    "time": self.signalled_at, "source": "agent", "attempt": 1, "nonce": self.nonce,
                    "event": "stopping", "by": self.request.by, "grace_s": self.request.grace_s,
                    "now": self.request.now,
                })  # fmt: skip
        self._send(process, number)

    @staticmethod
    def _send(process: Process, number: signal.Signals) -> None:
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

    def _record(self, doing: str, *, finished: bool = False) -> None:
        record = StopperRecord(
            pid=self.pid, start_ticks=self.start_ticks, request_at=self.request.at, by=self.request.by, doing=doing,
            signalled_at=self.signalled_at, alive_at=time.time(), finished=finished,
        )  # fmt: skip
        try:
            files.write_json(self.paths.stopper, to_json(record))
        except OSError:
            pass  # a full disk must not keep a run from being stopped
