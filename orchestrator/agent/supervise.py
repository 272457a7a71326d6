"""The supervisor: owns a run's process tree, its log and its records; the first process of the run's session.

It outlives the tmux server and the laptop, and the program outlives it: the program has its own session, and its output
goes straight onto the log, never through a pipe that somebody must drain.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from orchestrator.agent import cgroup, files, foreign, last_words, proc, records, spawn
from orchestrator.agent.claiming import Claiming, NotGranted
from orchestrator.agent.clock import Clock
from orchestrator.agent.journal import Journal
from orchestrator.agent.merge import merge
from orchestrator.agent.pane import Pane
from orchestrator.agent.pipes import Pipes
from orchestrator.agent.vigil import Vigil
from orchestrator.agent.watch import LogWatch
from orchestrator.logscan import StepEvent
from orchestrator.model import ExitRecord, LastWords, ProgramExit, RunPaths, RunSpec, SupervisorRecord, to_json

PR_SET_CHILD_SUBREAPER = 36
QUICK_S = 3.0
"""How long after the start everything is looked at often: this is when programs die and logs are opened."""
LAST_WORDS_BYTES = 64 << 20
"""So much of what a program has printed is read before its end is recorded; the rest after that."""
SCAN_S = 1.0
"""So old is what `scan.json` says at most, when steps are all that has been read since."""
INDEX_BYTES = 1 << 20
INDEX_S = 5.0
"""How close the marks stand by which `logs --since` finds a time, in a log that grows."""


def main(run_root: str) -> int:
    run_id = os.path.basename(run_root)
    paths = RunPaths(root=run_root, run_id=run_id)
    found = records.spec(paths)
    if found is None:
        return 1
    for name in ("SIGHUP", "SIGTERM", "SIGINT", "SIGQUIT"):
        # The end of the tmux server or of the container, or a slip of the hand in an attached pane, must not cost the
        # record. A handler, not SIG_IGN: the program would inherit that one, and be deaf to its own TERM.
        signal.signal(getattr(signal, name), lambda number, frame: None)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not files.claim(paths.claim, "supervisor"):
        return 1  # whoever waited for this supervisor has given up and said that nothing was started
    try:
        supervisor = Supervisor(paths, found[0], found[1])
        program = supervisor.start()
    except OSError as error:
        from orchestrator.agent.main import describe  # of no use to a supervisor that has begun

        why = f"the supervisor failed: {describe(error, run_root)}"
        ending = ExitRecord(at=time.time(), never_started=why, nonce=found[0].nonce)
        files.create_reserved(paths.exit, to_json(ending))
        return 1
    if program is not None:
        supervisor.see_through(program)
    return 0


class Supervisor:
    """One attempt, from the first line of its log to its exit record."""

    def __init__(self, paths: RunPaths, spec: RunSpec, record: dict[str, Any]) -> None:
        self.paths, self.spec = paths, spec
        self.argv: list[str] = record["argv"]
        self.cwd: str = record["cwd"]
        self.attempt = 1
        self.journal = Journal(paths, attempt=self.attempt, nonce=spec.nonce)
        self.index = files.JsonLines(paths.index(self.attempt))
        self.orphan_codes: list[int] = []
        self.written_at = 0.0
        self.written_to = 0
        self.childless = False
        self.pane, self.pipes = Pane(), Pipes()
        self.boot = proc.boot_identity()
        self.clock = Clock.of(record, self.boot)
        """What is noted of the run is noted by it, and not by a clock that somebody may set."""
        self.indexed: dict[foreign.Key | None, tuple[int, float]] = {None: (0, self.clock.now())}
        self.claiming = Claiming(paths, spec, self.journal, self.clock, self.pane)

    # --- the attempt ------------------------------------------------------------------------------------------------

    def start(self) -> subprocess.Popen[bytes] | None:
        """Opens the log, claims the GPUs, however long that takes, and spawns the program; None, and a record that says
        why, if it cannot be run.

        Raises `OSError` when something else fails; nothing has been started then.
        """
        environ = self._take_environment()
        started_at = time.time()
        log_fd = os.open(
            self.paths.log(self.attempt), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        header = records.header(
            run_id=self.spec.run_id, attempt=self.attempt, nonce=self.spec.nonce, bundle=self.spec.bundle,
            boot=self.boot, started_at=started_at,
        )  # fmt: skip
        os.write(log_fd, header)
        stat, own = os.fstat(log_fd), proc.stat(os.getpid())
        self.record = SupervisorRecord(
            attempt=self.attempt, nonce=self.spec.nonce, pid=os.getpid(), start_ticks=own[0].start_ticks if own else 0,
            boot=self.boot, started_at=started_at, log_device=stat.st_dev, log_inode=stat.st_ino,
            header_bytes=len(header),
        )  # fmt: skip
        if self.spec.wish is not None:  # it may take its time, and is to be found meanwhile
            files.write_json(self.paths.supervisor, to_json(self.record), durable=True)
        try:
            self.claiming.settle(environ)
        except NotGranted as refusal:
            self._never_started(refusal.why, stopped=refusal.stopped)
            return None
        started_at = time.time()
        self.vigil = Vigil(self.paths, self.journal, nonce=self.spec.nonce, created_at=self.clock.now())
        self.record = dataclasses.replace(
            self.record, started_at=started_at, oom_kills=proc.oom_kills(),
            cgroup=(group := cgroup.make(self.spec.run_id)),
        )  # fmt: skip
        files.write_json(self.paths.supervisor, to_json(self.record), durable=True)
        self.logs = LogWatch(
            self.paths, attempt=self.attempt, nonce=self.spec.nonce, started_at=started_at,
            before=foreign.snapshot(self.cwd, self.argv, environ), patterns=self.spec.patterns, journal=self.journal,
            tree=lambda: self.pipes.seen(proc.descendants(os.getpid(), self.spec.nonce)),
        )  # fmt: skip
        try:
            program = subprocess.Popen(
                self.argv, cwd=self.cwd, env=environ, stdin=subprocess.DEVNULL, stdout=log_fd, stderr=log_fd,
                start_new_session=True, preexec_fn=functools.partial(cgroup.enter, group),
            )  # fmt: skip
        except OSError as error:
            self._never_started(spawn.why_not(self.argv[0], error, cwd=self.cwd, path=environ.get("PATH", "")))
            self._write_scan()
            cgroup.remove(group)
            return None
        os.close(log_fd)
        spawned = proc.stat(program.pid)
        self.record = dataclasses.replace(
            self.record, program_pid=program.pid, program_start_ticks=spawned[0].start_ticks if spawned else None
        )
        self._save_record()
        self.journal.event("started", pid=program.pid, argv=self.argv)
        return program

    def see_through(self, program: subprocess.Popen[bytes]) -> None:
        """Follows the run to its end and records it. From here on no error of a file may end the supervisor: what it
        cannot write now it writes later, and the end it writes in any case."""
        ending = self._watch(program)
        cgroup.remove(self.record.cgroup)
        while True:
            try:
                files.create_reserved(self.paths.exit, to_json(ending))
                for record in (self.paths.stop, self.paths.stopper, self.paths.scan):
                    files.give_back(record)
                break
            except OSError:
                if not os.path.isdir(self.paths.root):
                    return  # somebody has removed the run: there is nowhere left to say how it ended
                time.sleep(1.0)
        self.journal.event("ended", **to_json(ending))
        self.pane.say("specctl: the run has ended; this window closes with the session.")

    def _take_environment(self) -> dict[str, str]:
        """The program's environment, from a file that only this user could read and that is gone afterwards."""
        with open(self.paths.env, "rb") as file:
            items = file.read().split(b"\0")
        os.unlink(self.paths.env)
        environ = {}
        for item in items:
            name, separator, value = item.partition(b"=")
            if separator:
                environ[os.fsdecode(name)] = os.fsdecode(value)
        return environ

    def _never_started(self, why: str, *, stopped: bool = False) -> None:
        ending = ExitRecord(at=time.time(), never_started=why, stopped=stopped, nonce=self.spec.nonce)
        files.create_reserved(self.paths.exit, to_json(ending))
        self.journal.event("ended", never_started=why)

    def _watch(self, program: subprocess.Popen[bytes]) -> ExitRecord:
        """Follows the run until nothing of it is left, and says how it ended."""
        begun = time.monotonic()
        waiter = select.poll()
        try:
            waiter.register(os.pidfd_open(program.pid), select.POLLIN)
        except OSError:  # a kernel or sandbox without pidfds: the timeouts below do the same, a little later
            pass
        while True:
            quick = time.monotonic() - begun < QUICK_S
            behind = any(follower.behind for follower in self.logs.followers)
            ended = self.record.program_exit is not None
            if not behind:
                time.sleep(0.02 if quick else 0.1) if ended else waiter.poll(20 if quick else 250)
            self._reap(program, self.clock.now())
            try:
                self._read_on(self.clock.now(), quick=quick)
            except OSError:  # the records, not the run, are what fails: the next round tries again
                time.sleep(0.1)
            # As subreaper the supervisor is the ancestor of all that is left, so no child means nothing is left: a
            # walk over /proc could miss a process that forks faster than one can look.
            if ended and self.childless:
                if not proc.tree(self.spec.nonce, proc.roots_of(self.record)):
                    break
                time.sleep(0.2)  # only a marked process outside our own line is left: look again, but not in a rush
        try:
            while any(follower.behind for follower in self.logs.followers):
                self._read_on(self.clock.now(), quick=False)  # in rounds, as ever: marks stand close then
        except OSError:
            pass
        now = self.clock.now()
        try:
            self.journal.write([event for follower in self.logs.followers for event in follower.finish(now)])
            self.journal.close()
            self._write_scan()
            self._mark_index(force=True)
            self.pane.follow(self.logs.followers)
        except OSError:
            pass
        return self._ending(now)

    def _read_on(self, now: float, *, quick: bool) -> None:
        """One round: logs that have appeared, what has been written since the last round, and the records of it."""
        events = self.logs.look(now, quick=quick)
        events += [event for follower in self.logs.followers for event in follower.advance(now)]
        self.journal.write(events)
        read_to = sum(follower.offset for follower in self.logs.followers)
        # A step more can wait a moment to be told, whatever else has happened cannot.
        urgent = quick or self.logs.changed or any(not isinstance(event, StepEvent) for event in events)
        stale = read_to != self.written_to and time.monotonic() - self.written_at > SCAN_S
        if stale or (urgent and (events or self.logs.changed)):
            self._write_scan()
            self.logs.changed = False
            self.written_to, self.written_at = read_to, time.monotonic()
        self._mark_index()
        if self.record.program_exit is None:
            self.vigil.look(self.logs.followed, now)
        self.claiming.keep()
        self.pane.follow(self.logs.followers)

    def _read_last_words(self, now: float) -> None:
        """What the program printed last is on record before its end is: who reads of a failure wants its exception."""
        followers = self.logs.followers
        end = sum(follower.offset for follower in followers) + LAST_WORDS_BYTES
        try:
            self._read_on(now, quick=True)
            while any(one.behind for one in followers) and sum(one.offset for one in followers) < end:
                self._read_on(now, quick=True)
            self._write_scan()
        except OSError:
            pass

    def _reap(self, program: subprocess.Popen[bytes], now: float) -> None:
        """Collects every child that has ended: the program, and the orphans the supervisor inherited."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            self.childless = False
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid != program.pid:
                if self.record.program_exit is not None:
                    self.orphan_codes.append(code)
                continue
            program.returncode = code
            self._read_last_words(now)
            self.record = dataclasses.replace(
                self.record,
                program_exit=ProgramExit(
                    at=now, code=code if code >= 0 else None, signal=-code if code < 0 else None,
                    last_words=self._last_words() if code else None,
                ),
            )  # fmt: skip
            self._save_record()
            self.journal.event("program_ended", code=code)

    def _ending(self, now: float) -> ExitRecord:
        """The program's own ending; if it left well and others lived on, the first of those that ended badly."""
        ended = self.record.program_exit
        assert ended is not None
        code, number, ended_at, hidden = ended.code, ended.signal, ended.at, None
        if code == 0:
            ended_at = now  # a program that left well has not ended while what it started lives
            bad = next((orphan for orphan in self.orphan_codes if orphan != 0), 0)
            if not bad and (hidden := self.pipes.ended_badly()) is not None:
                bad = hidden.code or 0
            code, number = (bad, None) if bad >= 0 else (None, -bad)
        summary = merge(self.logs.followed())
        first = summary.findings[0] if summary.findings else None
        set_by_s = self.clock.set_by_s
        return ExitRecord(
            at=now + set_by_s, clock_set_by_s=set_by_s, code=code, signal=number,
            stopped=records.stopped(self.paths, ended_at + set_by_s),
            oom_kills=max(0, proc.oom_kills() - self.record.oom_kills), last_step=summary.step,
            first_exception=f"{first.type}: {first.message.partition(chr(10))[0]}" if first else None,
            attempt=self.attempt, nonce=self.spec.nonce, behind_pipe=hidden.name if hidden else None,
            last_words=self._last_words() if code or number else None,
        )  # fmt: skip

    def _last_words(self) -> LastWords | None:
        return last_words.of(self.paths, self.logs.followers, nonce=self.spec.nonce)

    # --- what is written --------------------------------------------------------------------------------------------

    def _save_record(self) -> None:
        try:
            files.write_json(self.paths.supervisor, to_json(self.record), durable=True)
        except OSError:
            pass  # a full disk: the processes and the log still tell

    def _write_scan(self) -> None:
        records.write_followed(self.paths, self.spec.nonce, self.attempt, self.logs.followed())

    def _mark_index(self, *, force: bool = False) -> None:
        # Asked for after the reading: what stands before the byte of a mark had been written by its time.
        now = self.clock.now()
        for follower in self.logs.followers:
            log = None if follower.foreign is None else follower.key
            offset, marked_at = self.indexed.setdefault(log, (follower.foreign.base if follower.foreign else 0, now))
            grown = follower.offset - offset
            if not grown or follower.shared or not (force or abs(grown) >= INDEX_BYTES or now - marked_at >= INDEX_S):
                continue
            # `lines` lines stand before the byte `offset`, at which one begins; `clean`: those since the last mark.
            scanner = follower.scanner
            mark = {"time": now, "offset": scanner.decided, "lines": scanner.lines, "clean": not scanner.dirty}
            self.index.append(mark if log is None else {**mark, "log": list(log)})
            scanner.dirty = False
            self.indexed[log] = (follower.offset, now)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
