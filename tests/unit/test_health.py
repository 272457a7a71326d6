"""Every state of a run from what one look saw, and the ladder of evidence."""

import dataclasses

import pytest

from orchestrator import unexplained
from orchestrator.agent.merge import merge
from orchestrator.health import judge, missing, rung
from orchestrator.logscan import Scanner
from orchestrator.model import (
    Device,
    Disk,
    ExitRecord,
    FollowedLog,
    ForeignLog,
    GpuClaim,
    Heartbeat,
    InLine,
    LastWords,
    LogFile,
    LogSummary,
    Obstacle,
    Probe,
    Process,
    ProgramExit,
    StopRequest,
)

NOW = 10_000.0
PROGRAM = Process(pid=42, start_ticks=7, name="python", state="S", marked=True)
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in run\n    go()\n'
LOG = LogFile(path="/w/r.a1.log", size=5000, modified_at=NOW - 1, verified=True, header_bytes=100)
BARE = dataclasses.replace(LOG, size=100)
"""Nothing but the supervisor's first line."""


def read(*parts, ended=False):
    """The summary of a log whose parts were written at the given times: (seconds before now, text)."""
    scanner = Scanner()
    scanner.feed(b"# specctl run=r attempt=1\n", NOW - 5000)
    for before, text in parts:
        scanner.feed(text.encode(), NOW - before)
    if ended:
        scanner.finish(NOW)
    return scanner.summary()


def look(summary=None, **changes):
    fields = {
        "run_id": "r", "attempt": 1, "nonce": "n", "observed_at": NOW, "created_at": NOW - 300, "target": "t",
        "owner": "o", "note": "", "argv": ["x"], "exit": None, "stop": None, "same_boot": True,
        "supervisor_alive": True, "program": PROGRAM, "program_seen": True, "tree": [PROGRAM], "log": LOG,
        "summary": summary or read(),
    }  # fmt: skip
    return Probe(**{**fields, **changes})


def gone(summary=None, **changes):
    return look(summary, **{"program": None, "tree": [], "supervisor_alive": False, **changes})


def ended(summary=None, *, log=LOG, **record):
    program_seen = record.get("never_started") is None
    return gone(summary, log=log, program_seen=program_seen, exit=ExitRecord(at=NOW, **record))


STEPS = read((20, "step=1 loss=2 tok/s=300\n"), (10, "step=2 loss=2 tok/s=310\n"))
RETRIED = (
    '[rank0]: Traceback (most recent call last):\n[rank0]:   File "a.py", line 1, in f\n[rank0]: TimeoutError: again\n'
)
THREAD = "Exception in thread drafter-0:\n" + TRACEBACK + "RuntimeError: boom\n"


# --- ended ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "state", "why"),
    [
        ({"never_started": "python9: not found"}, "NEVER_STARTED", "python9: not found"),
        ({"code": 0}, "SUCCEEDED", "exit code 0"),
        ({"code": 3}, "FAILED", "exit code 3"),
        ({"code": 3, "last_step": 12}, "FAILED", "after step 12"),
        ({"code": 143}, "FAILED", "SIGTERM of a child"),
        ({"signal": 11}, "KILLED", "SIGSEGV"),
        ({"signal": 11, "oom_kills": 1}, "KILLED", "SIGSEGV; 1 killed for memory in this container meanwhile, whose"),
        ({"code": 3, "oom_kills": 2}, "FAILED", "exit code 3; 2 killed for memory in this container meanwhile, whose"),
        ({"signal": 9, "oom_kills": 1}, "KILLED", "SIGKILL, for memory"),
        ({"code": 137, "oom_kills": 1}, "KILLED", "exit code 137, for memory"),
        ({"code": 137}, "FAILED", "SIGKILL of a child"),
        ({"code": 3, "behind_pipe": "python3"}, "FAILED", "exit code 3 of python3, whose pipe to tee ended with 0"),
        ({"code": 0, "behind_pipe": "python3"}, "SUCCEEDED", "that python3 before it ended well is said only under"),
        ({"signal": 15, "stopped": True}, "STOPPED", "SIGTERM"),
        ({"code": 0, "stopped": True}, "STOPPED", "exit code 0"),
        ({"signal": 9, "stopped": True, "oom_kills": 1}, "STOPPED", "SIGKILL"),
        ({}, "LOST", "neither exit code nor signal"),
    ],
)
def test_the_exit_record_decides_how_a_run_ended(record, state, why):
    verdict = judge(ended(**record, log=BARE))
    assert verdict.state == state
    assert why in verdict.why


def test_a_record_of_the_end_beside_living_processes_says_so():
    assert "1 process (42) left" in judge(look(exit=ExitRecord(at=NOW, code=3))).why


@pytest.mark.parametrize("code", [1, 3])
def test_a_failure_is_blamed_on_the_exception_that_no_step_followed(code):
    text = TRACEBACK + "OSError: caught\n\nstep=1\n" + TRACEBACK.replace("run", "main") + "ValueError: last\n"
    verdict = judge(ended(read((5, text), ended=True), code=code))
    assert (verdict.error.type, "ValueError: last" in verdict.why) == ("ValueError", True)


def test_a_worker_that_died_is_blamed_before_the_main_thread_that_noticed():
    text = "worker=drafter-0 step=1\n" + THREAD + TRACEBACK.replace("run", "main") + "RuntimeError: a worker died\n"
    assert judge(ended(read((5, text), ended=True), code=1)).error.message == "boom"


def test_a_worker_that_died_is_blamed_although_others_stepped_on():
    text = "worker=drafter-0 step=1\n" + THREAD + "".join(f"worker=drafter-1 step={n}\n" for n in range(9))
    assert judge(ended(read((5, text), ended=True), code=3)).error.worker == "drafter-0"


def test_an_exception_that_steps_followed_is_blamed_only_for_what_an_uncaught_one_gives():
    summary = read((5, TRACEBACK + "OSError: x\n\nstep=1\nstep=2\n"), ended=True)
    assert judge(ended(summary, code=1)).error.type == "OSError"
    assert judge(ended(summary, code=3)).error is None
    assert judge(ended(summary, code=0)).error is None


def test_an_end_without_error_does_not_hide_a_worker_that_died():
    verdict = judge(ended(read((5, "worker=drafter-0 step=1\n" + THREAD), ended=True), code=0))
    assert (verdict.state, verdict.workers_gone, verdict.error.message) == ("SUCCEEDED", ["drafter-0"], "boom")
    assert "drafter-0 died (RuntimeError: boom)" in verdict.why


# --- nothing alive, no record ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "state", "why"),
    [
        ({"same_boot": False}, "LOST", "container restarted"),
        ({"same_boot": False, "oom_kills": 3}, "LOST", "container restarted"),
        ({"oom_kills": 2}, "KILLED", "2 killed for memory in this container meanwhile, whose is not known"),
        ({"supervisor_alive": True}, "STOPPING", "being recorded"),
        ({"supervisor_alive": True, "program_exit": ProgramExit(at=NOW, code=3)}, "STOPPING", "being recorded"),
        ({"supervisor_alive": True, "program_exit": ProgramExit(at=NOW, code=0)}, "STOPPING", "being recorded"),
        ({}, "LOST", "no process and no exit record"),
        ({"stop": StopRequest(at=NOW - 9, by="me", grace_s=60)}, "LOST", "after a stop was asked for"),
        ({"program_seen": False, "log": BARE}, "NEVER_STARTED", "started no program"),
        ({"program_seen": False, "log": BARE, "supervisor_alive": True}, "STARTING", "program not started yet"),
        ({"program_seen": False, "log": BARE, "same_boot": None}, "NEVER_STARTED", "started no program"),
        ({"program_seen": False, "log": BARE, "same_boot": None, "created_at": NOW - 2}, "QUEUED", "no supervisor yet"),
        ({"program_seen": False}, "LOST", "no process and no exit record"),
        ({"unreadable": ["exit.json"]}, "LOST", "no process and exit.json cannot be read"),
        ({"unreadable": ["supervisor.json"], "program_seen": False, "log": BARE}, "LOST", "supervisor.json cannot"),
    ],
)
def test_without_process_and_record_the_rest_decides(changes, state, why):
    verdict = judge(gone(**changes))
    assert verdict.state == state
    assert why in verdict.why


CLAIM = GpuClaim(
    nonce="n", claims_dir="/c", pool=[Device(number="0", uuid="GPU-a"), Device(number="1", uuid="GPU-b")], count=1,
    asked_at=NOW - 300, queued_at=NOW - 299,
)  # fmt: skip
BOTH = [Obstacle(gpu=number, what="held by run h", since=NOW - 8000) for number in "01"]
STANDS = InLine(position=2, ahead=["q"], obstacles=BOTH)
IN_LINE = {"program_seen": False, "log": BARE, "supervisor_alive": True, "gpu_claim": CLAIM, "in_line": STANDS}


@pytest.mark.parametrize(
    ("changes", "state", "why"),
    [
        ({}, "QUEUED",
         "2nd in line for 1 of GPU 0, 1: GPU 0, 1 held by run h for 2.2 h; next before it: run q; queued 5 min ago"),
        ({"in_line": InLine(position=1)}, "QUEUED",
         "1st in line for 1 of GPU 0, 1: free now, it is about to start; queued 5 min ago"),
        ({"in_line": InLine(position=0, problem="/c cannot be read")}, "QUEUED", "is not known: /c cannot be read"),
        ({"supervisor_stopped": 7}, "QUEUED", "its supervisor is stopped (state T; there: kill -CONT 7)"),
        ({"supervisor_alive": False, "in_line": None}, "NEVER_STARTED", "supervisor is gone while it waited in line"),
        ({"supervisor_alive": False, "in_line": None, "same_boot": False}, "NEVER_STARTED",
         "the container restarted while it waited in line; its program never ran"),
        ({"program_seen": True, "program": PROGRAM, "tree": [PROGRAM]}, "STARTING", "no step yet"),
        ({"in_line": None, "gpu_claim": dataclasses.replace(CLAIM, granted_at=NOW)}, "STARTING", "not started yet"),
        ({"exit": ExitRecord(at=NOW, never_started="stopped by me while it waited", stopped=True)}, "STOPPED",
         "stopped by me while it waited"),
    ],
)  # fmt: skip
def test_who_waits_in_line_is_queued_and_nothing_else_until_its_program_runs(changes, state, why):
    verdict = judge(gone(**{**IN_LINE, **changes}))
    assert (verdict.state, why in verdict.why) == (state, True), verdict


def test_a_claim_that_is_void_while_the_run_goes_on_is_told():
    held = dataclasses.replace(CLAIM, granted_at=NOW - 9, held=CLAIM.pool)
    assert "its claim of GPU 1 is gone: somebody has" in judge(look(gpu_claim=held, gpus_lost=["1"])).why
    assert "supervisor gone, and with it its claim of GPU 0, 1" in judge(
        look(gpu_claim=held, supervisor_alive=False)
    ).why


def test_the_time_in_line_is_no_time_in_which_a_run_was_silent():
    old = dataclasses.replace(BARE, modified_at=NOW - 9000)
    claim = dataclasses.replace(CLAIM, granted_at=NOW - 2)
    assert judge(look(created_at=NOW - 9000, log=old)).state == "STALLED"
    assert judge(look(created_at=NOW - 9000, log=old, gpu_claim=claim)).state == "STARTING"


def test_a_zombie_is_not_alive():
    zombie = dataclasses.replace(PROGRAM, state="Z")
    assert judge(look(program=zombie, tree=[zombie], supervisor_alive=False)).state == "LOST"


# --- alive ----------------------------------------------------------------------------------------------------------


def test_steps_make_a_run_running():
    verdict = judge(look(STEPS))
    assert (verdict.state, verdict.step, verdict.tok_s, verdict.last_progress_at) == ("RUNNING", 2, 310.0, NOW - 10)
    assert verdict.why == "step 2, 310 tok/s, 10 s ago"


def test_a_run_outlives_its_supervisor_and_says_so():
    verdict = judge(look(STEPS, supervisor_alive=False))
    assert verdict.state == "RUNNING"
    assert "supervisor gone" in verdict.why


def test_a_log_that_is_written_faster_than_it_is_read_is_said_to_be():
    verdict = judge(look(STEPS, unread_bytes=200 << 20))
    assert verdict.state == "RUNNING" and "the last 200 MiB of its log are not read yet" in verdict.why
    assert "not read" not in judge(look(STEPS, unread_bytes=30 << 20)).why


def test_children_that_outlive_the_program_keep_the_run_alive():
    child = dataclasses.replace(PROGRAM, pid=43)
    verdict = judge(look(STEPS, program=None, tree=[child], program_exit=ProgramExit(at=NOW, code=0)))
    assert verdict.state == "RUNNING"
    assert "the started program has ended (exit code 0), 1 process (43) left" in verdict.why


def test_a_stop_that_was_asked_for_is_stopping_until_nothing_is_left():
    verdict = judge(look(STEPS, stop=StopRequest(at=NOW - 5, by="me", grace_s=60)))
    assert verdict.state == "STOPPING"
    assert "me asked 5 s ago, 1 process (42) left" in verdict.why


@pytest.mark.parametrize(("asked_s", "said"), [(5, False), (61, True)])
def test_what_a_stop_could_not_end_because_it_hangs_in_the_kernel_is_named(asked_s, said):
    hung = dataclasses.replace(PROGRAM, state="D")
    verdict = judge(look(STEPS, program=hung, tree=[hung], stop=StopRequest(at=NOW - asked_s, by="me", grace_s=60)))
    assert verdict.state == "STOPPING"
    assert (f"hung in the kernel: {hung.name} (42)" in verdict.why) == said, "to be in D for a moment is usual"


@pytest.mark.parametrize(("silent_s", "state"), [(119, "RUNNING"), (121, "STALLED")])
def test_silence_after_steps_is_a_stall(silent_s, state):
    steps = read(*((silent_s + n, f"step={10 - n}\n") for n in (3, 2, 1, 0)))
    assert judge(look(steps)).state == state


@pytest.mark.parametrize(("silent_s", "state"), [(599, "RUNNING"), (601, "STALLED")])
def test_a_slow_step_is_given_twenty_of_its_own_intervals(silent_s, state):
    steps = read(*((silent_s + 30 * n, f"step={10 - n}\n") for n in (3, 2, 1, 0)))
    assert judge(look(steps)).state == state


@pytest.mark.parametrize("phase", ["checkpoint", "evaluate"])
@pytest.mark.parametrize(("silent_s", "state"), [(590, "RUNNING"), (601, "STALLED")])
def test_a_checkpoint_or_an_evaluation_may_take_five_times_as_long(phase, silent_s, state):
    steps = read(*((silent_s + n, f"step={10 - n}\n") for n in (2, 1, 0)), (silent_s, f"phase={phase}\n"))
    assert judge(look(steps)).state == state


def test_a_checkpoint_before_the_last_step_excuses_nothing():
    steps = read((203, "step=1\n"), (202, "phase=checkpoint\n"), (201, "step=2\n"))
    assert judge(look(steps)).state == "STALLED"


def test_the_heartbeat_may_say_that_it_checkpoints():
    steps = read((302, "step=1\n"), (301, "step=2\n"), (300, "step=3\n"))
    assert judge(look(steps)).state == "STALLED"
    assert judge(look(steps, heartbeat=Heartbeat(phase="checkpoint", step=3, at=NOW - 1))).state == "RUNNING"


def test_a_stall_says_what_was_printed_after_the_last_step():
    why = judge(look(read((302, "step=1\n"), (301, "step=2\n" + RETRIED), ended=True))).why
    assert "no step for 5 min, at step 2, after which TimeoutError: again was printed" in why


def test_printing_without_stepping_is_no_progress():
    steps = read((302, "step=1\n"), (301, "step=2\n"), (1, "still waiting for the queue\n"))
    assert judge(look(steps)).state == "STALLED"


def test_a_first_step_that_took_long_gives_the_second_as_long():
    assert judge(look(read((200, "step=1\n")), created_at=NOW - 450)).state == "RUNNING"
    assert judge(look(read((200, "step=1\n")), created_at=NOW - 350)).state == "STALLED"


@pytest.mark.parametrize(("silent_s", "state"), [(890, "STARTING"), (910, "STALLED")])
def test_before_the_first_step_a_run_may_be_silent_for_a_quarter_of_an_hour(silent_s, state):
    log = dataclasses.replace(LOG, modified_at=NOW - silent_s)
    verdict = judge(look(read((silent_s, "phase=load_target\n")), log=log, created_at=NOW - 3000))
    assert verdict.state == state
    assert "load_target" in verdict.why


def test_output_before_the_first_step_is_a_sign_of_life():
    assert judge(look(read((2000, "phase=load_target\n")), created_at=NOW - 3000)).state == "STARTING"


def test_a_stopped_process_is_named():
    assert "stopped (state T)" in judge(look(STEPS, program=dataclasses.replace(PROGRAM, state="T"))).why


def test_a_loss_that_is_not_finite_and_falling_tok_s_are_worth_a_word():
    lines = [f"step={n} loss=nan tok/s={rate}\n" for n, rate in enumerate([100, 5000, 5010, 2500, 2400], start=7)]
    why = judge(look(read((5, "".join(lines))))).why
    assert "loss not finite since step 7" in why
    assert "tok/s has fallen from 5,010" in why


# --- workers --------------------------------------------------------------------------------------------------------


def test_a_worker_that_died_degrades_the_run_although_the_others_step():
    steps = "".join(f"worker=drafter-{n} step={s} tok/s=100\n" for s in (1, 2) for n in (0, 1, 2))
    after = "".join(f"worker=drafter-{n} step={s} tok/s=100\n" for s in (3, 4, 5) for n in (1, 2))
    verdict = judge(look(read((9, steps + THREAD), (1, after))))
    assert (verdict.state, verdict.workers_gone) == ("DEGRADED", ["drafter-0"])
    assert (verdict.workers_alive, verdict.workers_total, verdict.error.message) == (2, 3, "boom")
    assert "drafter-0 died (RuntimeError: boom); step 5, 200 tok/s" in verdict.why


def test_a_worker_that_died_before_any_step_counts_once_step_lines_name_workers():
    summary = read((9, THREAD), (1, "worker=drafter-1 step=1 tok/s=5\nworker=drafter-1 step=2 tok/s=5\n"))
    assert judge(look(summary)).workers_gone == ["drafter-0"]


def test_a_worker_that_was_up_and_died_before_any_step_is_gone_at_once():
    verdict = judge(look(read((1, "phase=compile_warmup worker=drafter-0\n" + THREAD))))
    assert (verdict.state, verdict.workers_gone) == ("DEGRADED", ["drafter-0"])
    assert "no step yet" in verdict.why


def test_a_worker_that_steps_again_after_its_traceback_lives():
    summary = read((9, "worker=drafter-0 step=1\n" + THREAD + "worker=drafter-0 step=2\n"))
    assert (judge(look(summary)).state, judge(look(summary)).workers_gone) == ("RUNNING", [])


def test_an_old_runs_traceback_before_steps_that_name_no_worker_is_only_a_finding():
    verdict = judge(look(read((9, THREAD), (1, "step=1 tok/s=5\nstep=2 tok/s=5\n"))))
    assert (verdict.state, verdict.workers_total, verdict.error) == ("RUNNING", 0, None)


@pytest.mark.parametrize(("before", "state"), [(20, "STARTING"), (40, "DEGRADED")])
def test_an_unknown_threads_exception_before_any_step_is_believed_after_a_while(before, state):
    verdict = judge(look(read((before, THREAD))))
    assert verdict.state == state
    assert "RuntimeError: boom" in verdict.why


def test_an_exception_of_a_thread_that_nothing_else_names_is_only_a_finding_while_steps_follow_it():
    verdict = judge(look(read((99, "step=5\n"), (98, THREAD), (1, "step=6\n"))))
    assert (verdict.state, verdict.workers, verdict.error) == ("RUNNING", [], None)
    assert "an exception of a thread drafter-0 was printed (RuntimeError: boom), which may be older text" in verdict.why


@pytest.mark.parametrize(("before", "state"), [(20, "RUNNING"), (40, "DEGRADED")])
def test_an_unknown_threads_exception_that_no_step_follows_is_believed_after_a_while(before, state):
    assert judge(look(read((before + 2, "step=1\n"), (before + 1, "step=2\n"), (before, THREAD)))).state == state


def test_an_unknown_threads_exception_is_its_death_when_the_steps_name_other_workers():
    others = "worker=drafter-1 step=1 tok/s=5\nworker=drafter-2 step=1 tok/s=5\n"
    summary = read((9, others + THREAD), (1, others.replace("step=1", "step=2")))
    verdict = judge(look(summary))
    assert (verdict.state, verdict.workers_gone, verdict.workers_total) == ("DEGRADED", ["drafter-0"], 3)


def test_a_prefixed_traceback_is_no_death():
    verdict = judge(look(read((9, "step=1\n" + RETRIED), (1, "step=2\n"))))
    assert (verdict.state, verdict.workers_gone, verdict.error) == ("RUNNING", [], None)


def test_a_worker_that_stands_still_after_its_exception_is_worth_a_word():
    first = "".join(f"rank{n}: step=1\n" for n in (0, 1))
    parts = [(31, first), (30, RETRIED), *((30 - n, f"rank1: step={n + 1}\n") for n in range(1, 30))]
    verdict = judge(look(read(*parts)))
    assert (verdict.state, verdict.workers_gone) == ("RUNNING", [])
    assert "rank0 has not stepped since its exception (TimeoutError: again)" in verdict.why
    assert "since its exception" not in judge(look(read(*parts, (0, "rank0: step=2\n")))).why


def test_an_exception_without_a_thread_before_steps_is_only_a_finding():
    summary = read((9, TRACEBACK + "OSError: x\n\nstep=1\nstep=2\n"), ended=True)
    assert (judge(look(summary)).state, judge(look(summary)).error) == ("RUNNING", None)
    assert summary.findings_total == 1


def test_all_workers_gone_while_the_process_lingers_is_degraded_by_all():
    text = "worker=drafter-0 step=1\nworker=drafter-1 step=1\n" + THREAD + THREAD.replace("drafter-0", "drafter-1")
    verdict = judge(look(read((1, text))))
    assert (verdict.state, verdict.workers_gone) == ("DEGRADED", ["drafter-0", "drafter-1"])


def test_a_worker_that_fell_silent_is_mentioned():
    both = "worker=drafter-0 step=1\nworker=drafter-1 step=1\n"
    summary = read((400, both), *((n, f"worker=drafter-1 step={500 - n}\n") for n in (3, 2, 1)))
    verdict = judge(look(summary))
    assert verdict.state == "RUNNING"
    assert "drafter-0 has not stepped for 7 min while others did" in verdict.why


# --- a log that is not this run's -----------------------------------------------------------------------------------


def test_a_log_that_was_replaced_says_nothing_of_the_run():
    log = dataclasses.replace(LOG, verified=False, why="the log was replaced by another file")
    verdict = judge(look(STEPS, log=log))
    assert (verdict.state, verdict.step, verdict.tok_s) == ("RUNNING", None, None)
    assert "the log was replaced by another file" in verdict.why
    assert rung(look(STEPS, log=log), verdict)[0] == "process"


def test_a_log_that_was_replaced_blames_nothing_for_a_failure():
    log = dataclasses.replace(LOG, verified=False, why="the log was truncated")
    verdict = judge(dataclasses.replace(ended(read((5, THREAD), ended=True), code=3), log=log))
    assert (verdict.state, verdict.error) == ("FAILED", None)


# --- the ladder -----------------------------------------------------------------------------------------------------


def climb(probe):
    reached, evidence = rung(probe, judge(probe))
    assert all(item.observed_at == NOW for item in evidence)
    return reached, {item.what: item.value for item in evidence}


def test_the_ladder_to_its_top():
    reached, evidence = climb(look(STEPS, gpus_declared=[0], gpu_devices=["/dev/nvidia0"], heartbeat=Heartbeat(
        phase="train", step=2, at=NOW, gpu_memory_bytes={"0": 3 << 30})))  # fmt: skip
    assert reached == "step"
    assert list(evidence) == ["accepted", "session", "process", "log", "gpu", "step"]
    assert "pid 42" in evidence["process"]
    assert evidence["gpu"] == "holds /dev/nvidia0, 3.0 GiB by its heartbeat"
    assert evidence["step"] == "step 2, 310 tok/s"


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({"supervisor_alive": False, "program_seen": False, "program": None, "tree": []}, "accepted"),
        ({"program": None, "tree": []}, "session"),
        ({"program": dataclasses.replace(PROGRAM, state="Z"), "tree": []}, "session"),
        ({"program": None, "tree": [dataclasses.replace(PROGRAM, marked=False)]}, "step"),
        ({"program": None, "tree": [dataclasses.replace(PROGRAM, marked=False)], "supervisor_alive": False}, "session"),
        ({"program": dataclasses.replace(PROGRAM, marked=False), "tree": []}, "step"),
        ({"log": BARE, "summary": read()}, "process"),
        ({"gpus_declared": [0]}, "log"),
        ({"summary": read((5, "phase=load\n"))}, "log"),
        ({"summary": read((5, "step=1 tok/s=0\n"))}, "log"),
        ({"summary": read((5, "step=1 tok/s=-5\n"))}, "log"),
        ({"summary": read((5, "step=1 tok/s=nan\n"))}, "log"),
        ({"summary": read((5, "step=1 tok/s=nan\nstep=2 tok/s=3\n"))}, "step"),
        ({"summary": read((5, "worker=loader-1 loss=3\nstep=1\n"))}, "step"),
        ({"summary": read(), "heartbeat": Heartbeat(phase="train", step=5, at=NOW - 3)}, "step"),
        ({"summary": read(), "heartbeat": Heartbeat(phase="train", step=5, at=NOW - 500)}, "log"),
        ({"summary": read((5, "worker=drafter-0 step=1\nworker=drafter-1 loss=3\n"))}, "log"),
        ({"summary": read((5, "phase=up worker=target-0\nworker=drafter-0 step=1\n"))}, "step"),
        ({"summary": read((5, "worker=drafter-0 step=1\n" + THREAD))}, "log"),
        ({"summary": read((5, "step=1\n"))}, "step"),
    ],
)
def test_a_rung_counts_only_when_all_below_it_do(changes, reached):
    assert climb(look(**{"summary": STEPS, **changes}))[0] == reached


def test_a_silent_program_that_lives_has_no_output_yet():
    probe = look(log=dataclasses.replace(LOG, size=100))
    assert climb(probe)[0] == "process"
    assert "log: no output yet" in judge(probe).why


def test_output_in_the_programs_own_log_counts_from_where_this_run_began():
    own = ForeignLog(
        path="/w/train_flex6.log", base=900, before=900, truncated=False, exact=True, device=1, inode=2, size=950
    )
    silent = dataclasses.replace(LOG, size=100)
    _, evidence = climb(look(STEPS, log=silent, foreign_logs=[own]))
    assert "/w/train_flex6.log, 50 bytes after the 900 that were there before" in evidence["log"]
    assert climb(look(STEPS, log=silent, foreign_logs=[dataclasses.replace(own, size=900)]))[0] == "process"


def test_a_short_run_that_stepped_and_succeeded_has_climbed_the_ladder():
    assert climb(ended(STEPS, code=0))[0] == "step"


@pytest.mark.parametrize("record", [{"code": 3}, {"signal": 9}])
def test_a_run_that_failed_has_no_process(record):
    assert climb(ended(STEPS, **record))[0] == "session"


def test_a_program_that_exits_at_once_has_no_process():
    assert climb(ended(code=0))[0] == "session"


def test_every_probe_has_a_verdict():
    for probe in (look(LogSummary()), gone(LogSummary()), ended(LogSummary())):
        assert judge(probe).why


# --- what must not be believed --------------------------------------------------------------------------------------


def test_a_heartbeat_alone_is_progress_only_as_long_as_it_is_new():
    fresh = judge(look(heartbeat=Heartbeat(phase="train", step=5, at=NOW - 3)))
    assert (fresh.state, fresh.step, fresh.last_progress_at) == ("RUNNING", 5, NOW - 3)
    assert "step 5 by its heartbeat, 3 s ago" in fresh.why
    old = judge(look(heartbeat=Heartbeat(phase="train", step=5, at=NOW - 5000)))
    assert old.state == "STALLED"
    assert "no heartbeat for 83 min" in old.why
    assert judge(look(heartbeat=Heartbeat(phase="train", step=5, at=NOW * 1000))).step is None


def test_exit_code_0_behind_a_pipe_does_not_hide_the_exception_the_log_ends_with():
    summary = read((9, "step=1 tok/s=5\nstep=2 tok/s=5\n" + TRACEBACK + "RuntimeError: crashed\n"), ended=True)
    probe = ended(summary, code=0, last_step=2)
    verdict = judge(probe)
    assert (verdict.state, verdict.error.message) == ("SUCCEEDED", "crashed")
    assert verdict.why == "exit code 0 after step 2, but its last words are RuntimeError: crashed"
    assert climb(probe)[0] == "log"


def test_a_helper_that_was_killed_is_not_passed_off_as_the_program():
    probe = dataclasses.replace(ended(STEPS, signal=9), program_exit=ProgramExit(at=NOW, code=0))
    verdict = judge(probe)
    assert verdict.state == "KILLED"
    assert "SIGKILL of another process of the run, whose started program had ended with exit code 0" in verdict.why


def test_a_record_that_says_never_started_is_not_believed_of_a_run_that_steps():
    record = ExitRecord(at=NOW, never_started="the supervisor did not report")
    alive = judge(look(STEPS, exit=record))
    assert (alive.state, alive.step) == ("RUNNING", 2)
    assert "its record says that it never started (the supervisor did not report)" in alive.why
    dead = judge(gone(STEPS, exit=record))
    assert dead.state == "LOST"
    assert "never started (the supervisor did not report), although it did" in dead.why


def test_an_output_of_the_programs_own_log_is_a_sign_of_life_too():
    own = ForeignLog(
        path="/f", base=0, before=0, truncated=False, exact=True, device=1, inode=2, size=9, modified_at=NOW - 5
    )
    probe = look(log=dataclasses.replace(BARE, modified_at=NOW - 9000), created_at=NOW - 9000, foreign_logs=[own])
    verdict = judge(probe)
    assert verdict.state == "STARTING"
    assert "last output 5 s ago" in verdict.why
    old = dataclasses.replace(own, modified_at=NOW - 5000)
    assert "no output for 83 min" in judge(dataclasses.replace(probe, foreign_logs=[old])).why


@pytest.mark.parametrize(("tree", "why"), [([], "no process carries its mark"), ([PROGRAM], "1 process (42) alive")])
def test_a_run_without_a_record_is_lost_and_its_processes_are_named(tree, why):
    verdict = judge(look(damaged="its record run.json is gone", program=None, program_seen=False, tree=tree))
    assert verdict.state == "LOST"
    assert verdict.why.startswith("its record run.json is gone")
    assert why in verdict.why


def test_a_record_that_cannot_be_read_is_named_beside_what_is_seen():
    why = judge(look(STEPS, unreadable=["supervisor.json"], supervisor_alive=False)).why
    assert why.startswith("step 2, ") and "supervisor.json cannot be read" in why
    assert "supervisor gone" not in why


CHILD_FAILED = """
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_17:03:29
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 9616)
============================================================
"""


def of_rank(rank, ending):
    return "".join(f"[rank{rank}]: {line}\n" for line in [*TRACEBACK.splitlines(), ending])


def test_a_launchers_report_is_not_the_cause_the_rank_it_names_is():
    text = "step=1 loss=2\n" + of_rank(0, "RuntimeError: connection closed by peer") + of_rank(1, "ValueError: enough")
    verdict = judge(ended(read((20, text + CHILD_FAILED.format(1)), ended=True), code=1))
    assert (verdict.error.type, verdict.error.worker) == ("ValueError", "rank1")
    assert verdict.why == "exit code 1: ValueError: enough"


def test_a_rank_that_was_killed_has_no_words_but_the_launchers():
    verdict = judge(ended(read((20, "step=1 loss=2\n" + CHILD_FAILED.format(-9)), ended=True), code=1))
    assert verdict.why == "exit code 1: ChildFailedError: rank 1 was killed by SIGKILL"


def failures(*found):
    """torchrun's table, in which the last is the root cause."""
    *others, root = [
        f"[{rank}]:\n  time      : x\n  host      : localhost\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: 9616)\n  error_file: <N/A>\n  traceback : To enable traceback see: https://x"
        for rank, code in found
    ]
    head, _, tail = CHILD_FAILED.partition("Root Cause")
    cause, _, _ = tail.partition("[0]:")
    return f"{head}Failures:\n{chr(10).join(others)}\n{'-' * 60}\nRoot Cause{cause}{root}\n{'=' * 60}\n"


def test_a_rank_that_was_killed_is_the_cause_of_what_broke_at_the_others():
    broken = "Exception in thread drafter-0:\n" + TRACEBACK + "RuntimeError: Connection reset by peer\n"
    probe = ended(read((20, "step=1 loss=2\n" + broken + failures((1, -9), (0, 1))), ended=True), code=1)
    verdict = judge(probe)
    assert verdict.why == "exit code 1: ChildFailedError: rank 1 was killed by SIGKILL"
    memory = judge(dataclasses.replace(probe, exit=dataclasses.replace(probe.exit, oom_kills=1)))
    assert (memory.state, memory.why) == ("KILLED", f"{verdict.why}, for memory (1 killed)")
    ended_by_torchrun = judge(ended(read((20, broken + failures((1, -15), (0, 1))), ended=True), code=1))
    assert ended_by_torchrun.error.type == "RuntimeError"


def test_of_many_ranks_the_table_is_read_to_its_end():
    table = failures(*((rank, 1) for rank in range(63)), (63, -11))
    verdict = judge(ended(read((20, "step=1 loss=2\n" + table), ended=True), code=1))
    assert verdict.why == "exit code 1: ChildFailedError: rank 63 was killed by SIGSEGV"


def test_a_rank_that_died_of_its_own_fault_may_have_said_so():
    fatal = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n\n"
    text = "step=1 loss=2\n" + fatal + TRACEBACK + "RuntimeError: closed\n" + failures((0, 1), (1, -11))
    assert judge(ended(read((20, text), ended=True), code=1)).error.type == "Fatal Python error"


def test_what_a_rank_said_comes_before_what_its_launcher_says():
    said = LastWords(text="tool: no such option", before="ChildFailedError")
    probe = ended(read((20, failures((0, 2), (1, 2))), ended=True), code=1)
    ending = dataclasses.replace(probe.exit, last_words=said, nonce=probe.nonce)
    verdict = judge(dataclasses.replace(probe, exit=ending))
    assert verdict.error is None and verdict.last_words == said
    how = "exit code 1 (rank 1 ended with exit code 2)"
    assert verdict.why == f"{how}; last line before ChildFailedError: tool: no such option"
    assert unexplained.of(probe, verdict).text == how


def test_what_a_script_says_of_the_command_that_failed_is_not_the_cause():
    report = "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.\n"
    text = TRACEBACK + "OSError: [Errno 28] No space left on device\n" + TRACEBACK.replace("run", "main") + report
    assert judge(ended(read((20, text), ended=True), code=1)).error.type == "OSError"
    alone = judge(ended(read((20, TRACEBACK + report), ended=True), code=1))
    assert alone.error.type == "subprocess.CalledProcessError"


def test_a_launch_is_not_verified_while_an_exception_is_the_last_word():
    steps = (20, "step=1 loss=2\nstep=2 loss=2\n")
    waiting = look(read(steps, (3, of_rank(1, "ValueError: enough"))))
    assert climb(waiting)[0] == "log"
    assert "ValueError: enough was printed 3 s ago, and no step since" in judge(waiting).why
    assert "no step after ValueError" in missing(waiting, judge(waiting))
    assert climb(look(read(steps, (3, of_rank(1, "ValueError: enough")), (1, "step=3 loss=2\n"))))[0] == "step"


def test_a_step_in_one_log_follows_an_exception_in_another():
    early, late = (read((before, TRACEBACK + "OSError: x\n\ndone\n" + "ok\n" * 8)) for before in (30, 5))
    logs = [FollowedLog(summary=STEPS), FollowedLog(summary=early)]
    assert early.tail and merge(logs).tail == []
    assert [found.type for found in merge([logs[0], FollowedLog(summary=late)]).tail] == ["OSError"]


def test_figures_of_several_logs_are_of_the_whole_run_whichever_was_written_last():
    ranks = [read((n, f"[rank{n}]: step 7 loss {n}.0 50 tok/s\n")) for n in (1, 2)]
    metrics = read((4, '{"step": 6, "loss": 3.0, "tok/s": 100}\n'))
    foreign = ForeignLog(path="/x", base=0, before=0, truncated=False, exact=True, device=1, inode=1)
    others = [FollowedLog(summary=one, foreign=foreign) for one in ranks]
    alone = merge([FollowedLog(summary=read()), *others])
    assert (alone.step, alone.tok_s, alone.loss) == (7, 100.0, 1.5)
    beside = merge([FollowedLog(summary=read()), *others, FollowedLog(summary=metrics, foreign=foreign)])
    assert (beside.step, beside.tok_s, beside.loss) == (6, 100.0, 3.0)
    assert sorted(one.name for one in beside.workers) == ["rank1", "rank2"]
    own = read((5, "10%|# | 5/50 [00:01<00:09, 9.55it/s, loss=2.0]\r"))
    bar = merge([FollowedLog(summary=own), FollowedLog(summary=metrics, foreign=foreign)])
    assert (bar.step, bar.tok_s, bar.loss) == (5, 100.0, 2.0)


# --- the disk and the log's name ------------------------------------------------------------------------------------

ROOMY = Disk(mount="/w", free_bytes=5 << 30, total_bytes=20 << 30, free_inodes=100, read_only=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"free_bytes": 4096}, "the file system at /w has 0.0 of 20.0 GiB free"),
        ({"free_inodes": 0}, "the file system at /w has no free inodes: it holds too many files (5.0 of 20.0"),
        ({"read_only": True}, "the file system at /w is read-only"),
    ],
)
def test_a_disk_that_takes_nothing_is_named_with_its_room(changes, said):
    disk = dataclasses.replace(ROOMY, **changes)
    assert f"; {said}" in judge(look(STEPS, disk=disk)).why
    failed = dataclasses.replace(ended(code=1), disk=disk)
    assert f"; now {said}" in judge(failed).why
    assert said not in judge(dataclasses.replace(ended(code=0), disk=disk)).why


def test_a_disk_with_room_is_not_worth_a_word():
    assert "file system" not in judge(look(STEPS, disk=ROOMY)).why
    uncounted = dataclasses.replace(ROOMY, free_inodes=None)
    assert "file system" not in judge(look(STEPS, disk=uncounted)).why


def test_what_became_of_a_logs_name_is_said_and_its_lines_count():
    for moved, said in (("renamed", "renamed to /w/r.a1.log"), ("deleted", "specctl logs r >FILE can still save it")):
        verdict = judge(look(STEPS, log=dataclasses.replace(LOG, moved=moved)))
        assert verdict.state == "RUNNING" and verdict.step == 2 and said in verdict.why
