"""Cases C7, E4, E8, E9, E10 and F3 of the public bug reports, where scanning and judging answer them."""

import dataclasses

import pytest

from orchestrator.health import judge
from orchestrator.logscan import FindingEvent, Scanner, StepEvent
from orchestrator.model import ExitRecord, Heartbeat, LogFile, Probe, Process

NOW = 10_000.0
MINUTE = 60.0
PROGRAM = Process(pid=42, start_ticks=7, name="python", state="S", marked=True)


def read(*parts):
    """(seconds before now, text) -> (events, summary)."""
    scanner, events = Scanner(), []
    for before, text in parts:
        events += scanner.feed(text.encode(), NOW - before)
    return events, scanner.summary()


def probe(summary, *, silent_s=1.0, **changes):
    seen = Probe(
        run_id="r", attempt=1, nonce="n", observed_at=NOW, created_at=NOW - 3600, target="t", owner="o", note="",
        argv=["x"], exit=None, stop=None, same_boot=True, supervisor_alive=True, program_seen=True,
        program=PROGRAM, tree=[PROGRAM], summary=summary,
        log=LogFile(path="/w/r.a1.log", size=9000, modified_at=NOW - silent_s, verified=True, header_bytes=100),
    )  # fmt: skip
    return dataclasses.replace(seen, **changes)


def test_c7_a_loader_killed_by_a_bus_error_is_one_failure_with_its_root_and_a_hint():
    text = (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        'Traceback (most recent call last):\n  File "queue.py", line 180, in get\n    self.wait()\n'
        "RuntimeError: loader worker (pid 9) is killed by a signal\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "train.py", line 10, in main\n    fetch()\n'
        "RuntimeError: loader worker exited unexpectedly\n"
    )
    scanner = Scanner()
    events = scanner.feed(text.encode(), NOW) + scanner.finish(NOW)
    (found,) = [event.finding for event in events if isinstance(event, FindingEvent)]
    assert found.message == "loader worker (pid 9) is killed by a signal"
    assert "/dev/shm" in found.hint
    assert found.traceback.endswith("exited unexpectedly")
    ended = probe(
        scanner.summary(), exit=ExitRecord(at=NOW, code=1), program=None, tree=[], supervisor_alive=False
    )  # fmt: skip
    assert judge(ended).error == found


def test_e4_a_backward_that_fails_after_a_good_forward_is_no_running_run():
    text = 'forward ok\nTraceback (most recent call last):\n  File "t.py", line 3, in step\n    loss.backward()\n'
    text += "torch._inductor.exc.InductorError: LoweringException: flex\n"
    _, summary = read((40, text))
    lingering = judge(probe(summary, silent_s=40))
    assert lingering.state == "STARTING"
    assert "InductorError" in lingering.why
    ended = judge(probe(summary, exit=ExitRecord(at=NOW, code=1), program=None, tree=[]))
    assert (ended.state, ended.error.type) == ("FAILED", "torch._inductor.exc.InductorError")


def test_e8_a_slow_compile_is_starting():
    _, summary = read((12 * MINUTE, "phase=compiling\n"))
    verdict = judge(probe(summary, silent_s=12 * MINUTE))
    assert verdict.state == "STARTING"
    assert "compiling" in verdict.why


def test_e8_a_compile_that_is_silent_for_longer_than_its_budget_is_stalled():
    _, summary = read((31 * MINUTE, "phase=compiling\n"))
    assert judge(probe(summary, silent_s=31 * MINUTE)).state == "STALLED"


def test_e8_the_same_silence_at_step_40_is_stalled():
    _, summary = read(*((12 * MINUTE + 2 * n, f"step={40 - n} tok/s=9\n") for n in range(9, -1, -1)))
    verdict = judge(probe(summary, silent_s=12 * MINUTE))
    assert (verdict.state, verdict.step, verdict.last_progress_at) == ("STALLED", 40, NOW - 12 * MINUTE)


def test_e9_a_loss_that_is_nan_is_noticed_at_its_step():
    _, summary = read((2, "step=6 loss=2.5\nstep=7 loss=nan\nstep=8 loss=nan\n"))
    assert summary.nonfinite_step == 7
    assert "loss not finite since step 7" in judge(probe(summary)).why


@pytest.mark.parametrize(
    "text", ["step=7 loss=2.5 finance", "finance: step=7 loss=2.5", "dataset=finance loss: inference"]
)
def test_e9_the_word_finance_is_no_nan(text):
    _, summary = read((2, text + "\n"))
    assert summary.nonfinite_step is None


def test_e10_the_median_of_tok_s_leaves_the_warm_up_out_and_a_decay_is_flagged():
    rates = ["100", "5000", "5010", "2500", "2400"]
    events, summary = read((2, "".join(f"step={n} tok/s={rate}\n" for n, rate in enumerate(rates, start=1))))
    assert [event.tok_s for event in events if isinstance(event, StepEvent)] == [float(rate) for rate in rates]
    assert summary.tok_s_median == 2500.0
    assert "tok/s has fallen from 5,010" in judge(probe(summary)).why


@pytest.mark.parametrize(("text", "value"), [("1,234", 1234.0), ("1.2k", 1200.0), ("1_234", 1234.0), ("1.2e3", 1200.0)])
def test_e10_every_way_to_write_a_figure(text, value):
    assert read((2, f"step=1 tok/s={text}\n"))[1].tok_s == value


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"oom_kills": 1}, "KILLED"),
        ({"program_seen": False}, "LOST"),
        ({}, "LOST"),
        ({"same_boot": False}, "LOST"),
    ],
)
def test_f3_a_heartbeat_that_says_running_proves_nothing_without_a_process(changes, state):
    _, summary = read((30, "step=5 tok/s=9\nstep=6 tok/s=9\n"))
    dead = probe(
        summary, program=None, tree=[], supervisor_alive=False,
        heartbeat=Heartbeat(phase="running", step=6, at=NOW - 1),
    )  # fmt: skip
    verdict = judge(dataclasses.replace(dead, **changes))
    assert verdict.state == state
    assert not verdict.live
    assert verdict.why
