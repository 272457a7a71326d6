"""What the scanner reads out of lines: steps, figures, workers, phases, exceptions."""

import json
import math

import pytest

from orchestrator.logscan import FindingEvent, PhaseEvent, Scanner, StepEvent, WorkerDown, WorkerUp, settled
from orchestrator.model import LogSummary, from_json, to_json


def scan(text, *, now=100.0, **options):
    scanner = Scanner(**options)
    events = scanner.feed(text if isinstance(text, bytes) else text.encode(), now)
    events += scanner.finish(now)
    return events, scanner.summary()


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


TRACEBACK = 'Traceback (most recent call last):\n  File "/runs/x/code/train.py", line 10, in run\n    go()\n'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step=12", (12, None, None, None)),
        ("step: 12", (12, None, None, None)),
        ("Step 12", (12, None, None, None)),
        ("step 12/1000", (12, None, None, None)),
        ("iter=5 loss=2.5", (5, None, None, 2.5)),
        ("iteration 12: 310.5 tok/s loss 2.1", (12, None, 310.5, 2.1)),
        ("global_step=5", (5, None, None, None)),
        ("train/global_step=4 train/loss=2.5", (4, None, None, 2.5)),
        ("step=1,234,loss=3", (1234, None, None, 3.0)),
        ("step=7 tok/s=1.2k", (7, None, 1200.0, None)),
        ("step=7 tokens_per_sec=310", (7, None, 310.0, None)),
        ("tgs: 310 step: 3", (3, None, 310.0, None)),
        ("step 00012/01000 (1.20%) | loss: 2.34 | dt: 100ms | tok/sec: 5,000 | mfu: 3", (12, None, 5000.0, 2.34)),
        ('{"step": 12, "tok/s": 310, "worker": "drafter-0"}', (12, "drafter-0", 310.0, None)),
        ("{'loss': '2.25', 'learning_rate': 1e-4, 'step': 3}", (3, None, None, 2.25)),
        ("step=3 loss=tensor(2.25, device='cuda:0')", (3, None, None, 2.25)),
        ("worker=drafter-0 step=12 loss=2", (12, "drafter-0", None, 2.0)),
        ("[drafter-0] step=3", (3, "drafter-0", None, None)),
        ("(drafter-0) step=3", (3, "drafter-0", None, None)),
        ("drafter-0: step=3", (3, "drafter-0", None, None)),
        ("drafter-0 step=3", (3, "drafter-0", None, None)),
        ("[rank3]: step=3", (3, "rank3", None, None)),
        ("2026-11-29 14:00:00,123 INFO drafter-0: step=3", (3, "drafter-0", None, None)),
        ("2026-11-29 14:00:00,123 - train - INFO - [drafter-0] step=12", (12, "drafter-0", None, None)),
        ("[train:120] step=12", (12, None, None, None)),
        ("[Epoch 3] step=5 loss=2", (5, None, None, 2.0)),
    ],
)
def test_a_step_line_is_read(line, expected):
    events, _ = scan(line + "\n")
    (step,) = only(events, StepEvent)
    assert (step.step, step.worker, step.tok_s, step.loss) == expected


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("local_rank3", "local_rank3: {}"), ("ForkProcess-2", "(ForkProcess-2) {}"), ("cuda:0", "cuda:0 {}"),
        ("ThreadPoolExecutor-0_1", "ThreadPoolExecutor-0_1 {}"), ("gpu 1", "[gpu 1] {}"), ("me", "worker=me {}"),
        (None, "layer0: {}"), (None, "[block12] {}"), (None, "frank1: {}"), (None, "task1: {}"), (None, "adapter2 {}"),
        ("w" * 100, f"worker={'w' * 70_000} {{}}"),
    ],
)  # fmt: skip
def test_a_worker_is_named_by_key_or_by_a_name_that_says_so(name, written):
    _, summary = scan(written.format("step=3 loss=0.2") + "\n")
    assert [worker.name for worker in summary.workers] == ([] if name is None else [name])
    assert (summary.step, summary.loss) == (3, 0.2)


def test_a_figure_of_a_part_of_the_model_makes_no_worker():
    assert scan("layer0: loss=0.2\nstep=1 tok/s=5 loss=1\n")[1].workers == []


@pytest.mark.parametrize("rate", ["1e308", "1e999", "nan", "inf"])
def test_a_figure_that_no_sum_can_hold_leaves_none(rate):
    _, summary = scan(f"worker=a step=1 tok/s={rate}\nworker=b step=1 tok/s={rate}\n")
    assert (summary.tok_s, summary.tok_s_printed) == (None, True)
    from_json(LogSummary, json.loads(json.dumps(to_json(summary), allow_nan=False)))


@pytest.mark.parametrize(
    "line",
    [
        "eval_step=5", "val/step=5", "steps_per_epoch=100", "stepsize=3", "max_steps=100", "step=12k", "step=1.5",
        "Step 1: download the data", "step 3 of the recipe", "resuming from step=500", "phase=resume step=40",
        "--step=5", "0 steps", "the next step: 5x faster", "step 14:00:00",
    ],
)  # fmt: skip
def test_a_line_that_only_sounds_like_a_step_is_none(line):
    events, summary = scan(line + "\n")
    assert only(events, StepEvent) == []
    assert summary.step is None


def test_patterns_extend_the_grammar():
    patterns = {"step": r"^it (\d+)", "tok_s": r"speed<(\S+)>", "worker": r"@(\w+)"}
    events, _ = scan("it 7 speed<1.5k> @alpha\nstep=8 tok/s=9\n", patterns=patterns)
    assert [(step.step, step.tok_s, step.worker) for step in only(events, StepEvent)] == [
        (7, 1500.0, "alpha"), (8, 9.0, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "pattern"), [("loss", "("), ("loss", "a"), ("loss", "(a)(b)"), ("throughput", r"(\d+)")]
)
def test_a_pattern_that_cannot_serve_is_refused_by_name(name, pattern):
    with pytest.raises(ValueError, match=name):
        Scanner(patterns={name: pattern})


def test_a_phase_keeps_its_fields():
    events, summary = scan("phase=compile_warmup unit=3/12 seconds=1.2\n", now=7.0)
    assert events == [PhaseEvent(phase="compile_warmup", fields={"unit": "3/12", "seconds": "1.2"}, offset=0)]
    assert (summary.phase, summary.phase_at) == ("compile_warmup", 7.0)


def test_workers_add_up_to_the_run():
    _, summary = scan(
        "worker=drafter-0 step=4 loss=2 tok/s=100\nworker=drafter-1 step=3 loss=4 tok/s=50\n"
    )  # fmt: skip
    assert (summary.step, summary.tok_s, summary.loss) == (3, 150.0, 3.0)


def test_lines_of_the_whole_run_win_over_lines_of_workers():
    lines = "".join(
        f"step={n} worker=drafter-0 loss=9 tok/s=1\nstep={n} loss=2 tok/s={n}00\n" for n in range(1, 7)
    )  # fmt: skip
    _, summary = scan(lines)
    assert (summary.step, summary.steps_seen, summary.tok_s, summary.loss) == (6, 6, 600.0, 2.0)
    assert summary.tok_s_median == 450.0
    assert [worker.name for worker in summary.workers] == ["drafter-0"]


def test_the_interval_between_steps_is_measured_however_many_lines_come_at_once():
    scanner = Scanner()
    for second in range(1, 11):
        scanner.feed(b"".join(b"step=%d\n" % (second * 4 + n) for n in range(4)), float(second))
    assert scanner.summary().step_interval_s == 0.25


def test_a_run_that_goes_on_at_a_lower_step_is_progress():
    scanner = Scanner()
    for now, step in enumerate([10, 11, 5, 6]):
        scanner.feed(b"step=%d\n" % step, float(now))
    summary = scanner.summary()
    assert (summary.step, summary.step_at, summary.steps_seen) == (6, 3.0, 3)


def test_only_the_two_ends_of_an_endless_line_are_read_and_offsets_stay_right():
    scanner = Scanner()
    events = scanner.feed(b"first\nstep=1 loss=2 ", 1.0)
    for _ in range(64):
        events += scanner.feed(b"x" * (1 << 20), 1.0)
        assert len(scanner._open) + len(scanner._open_tail or b"") < 1 << 21
    events += scanner.feed(b" tok/s=300\nstep=2\n", 1.0)
    start = len(b"first\n")
    end = start + len(b"step=1 loss=2 ") + (64 << 20) + len(b" tok/s=300\n")
    assert [(e.step, e.tok_s, e.offset) for e in events] == [(1, 300.0, start), (2, None, end)]
    assert scanner.summary().lines == 3


def test_a_number_cut_by_the_gap_of_an_endless_line_is_not_read():
    line = b"a" * 65000 + b" step=" + b"1" * 200000 + b" end"
    assert scan(line + b"\n")[1].step is None


def test_a_thread_that_dies_is_named_and_its_traceback_is_whole():
    events, summary = scan(
        "worker=drafter-0 step=1\nworker=drafter-1 step=1\n"
        "Exception in thread drafter-0:\n" + TRACEBACK + "RuntimeError: boom\nworker=drafter-1 step=2\n"
    )  # fmt: skip
    (found,) = only(events, FindingEvent)
    assert found.finding.traceback == TRACEBACK + "RuntimeError: boom"
    assert (found.finding.type, found.finding.message, found.finding.worker) == ("RuntimeError", "boom", "drafter-0")
    assert not found.finding.before_first_step
    (down,) = only(events, WorkerDown)
    assert (down.name, down.finding) == ("drafter-0", found.finding)
    assert [(worker.name, worker.died_at is None) for worker in summary.workers] == [
        ("drafter-0", False), ("drafter-1", True),
    ]  # fmt: skip
    assert summary.step == 2, "the dead worker no longer holds the run's step back"


def test_steps_of_others_between_the_lines_of_a_traceback_are_steps_and_not_part_of_it():
    events, _ = scan(
        "Exception in thread drafter-0:\nworker=drafter-1 step=2\nTraceback (most recent call last):\n"
        "worker=drafter-1 step=3\n" + TRACEBACK.partition("\n")[2] + "worker=drafter-1 step=4\nRuntimeError: boom\n"
    )  # fmt: skip
    assert [step.step for step in only(events, StepEvent)] == [2, 3, 4]
    (found,) = only(events, FindingEvent)
    assert found.finding.traceback == TRACEBACK + "RuntimeError: boom"


def test_a_line_cut_short_by_another_threads_traceback_still_counts():
    events, summary = scan("worker=drafter-1 step=3 tok/s=5Exception in thread drafter-0:\n" + TRACEBACK + "OSError\n")
    assert [step.step for step in only(events, StepEvent)] == [3]
    assert [worker.name for worker in summary.workers if worker.died_at] == ["drafter-0"]


def test_a_traceback_written_in_pieces_around_other_threads_lines_is_put_together():
    def step(number):
        return f"worker=drafter-1 step={number} loss=2.0 tok/s=100"

    events, summary = scan(
        f"{step(1)}\nException in thread {step(2)}\ndrafter-0:\nTraceback (most recent call last):{step(3)}\n\n"
        f'  File "/runs/x/code/train.py", line 10, in run\n    {step(4)}\ngo(){step(5)}\n{step(6)}\n\n'
        f"RuntimeError{step(7)}\n: boom{step(8)}\n\n"
    )
    assert [event.step for event in only(events, StepEvent)] == [1, 2, 3, 4, 5, 6, 7, 8]
    (found,) = summary.findings
    assert found.traceback == TRACEBACK + "RuntimeError: boom"
    assert found.worker == "drafter-0"
    assert [worker.name for worker in summary.workers if worker.died_at] == ["drafter-0"]


def test_source_lines_and_messages_of_a_traceback_are_no_steps():
    text = TRACEBACK.replace("go()", "train(step=99, loss=1.0)") + "ValueError: loss=nan at step=98\n"
    events, summary = scan(text)
    assert only(events, StepEvent) == []
    assert summary.nonfinite_step is None


@pytest.mark.parametrize("line", [
    "all 2600 steps are done: python -m trainer export /runs/r --to DIR makes what servers load",
    "stopped with 61 of 6000 steps done: the same command goes on from there",
    "nothing to do: step 61 of 61 is done; raise steps to go on",
])  # fmt: skip
def test_what_the_trainer_says_at_its_end_is_no_step_that_it_has_not_taken(line):
    events, summary = scan(f"step=61 loss=2.5\n{line}\n")
    assert [event.step for event in only(events, StepEvent)] == [61] and summary.step == 61


def test_a_worker_that_steps_again_lives():
    events, summary = scan("Exception in thread drafter-0:\n" + TRACEBACK + "OSError: x\nworker=drafter-0 step=1\n")
    assert [type(event) for event in events] == [FindingEvent, WorkerDown, WorkerUp, StepEvent]
    assert summary.workers[0].died_at is None
    assert summary.tail == []


def test_a_chain_is_one_finding_and_its_root_is_the_first():
    events, _ = scan(
        TRACEBACK + "KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACEBACK + "RuntimeError: b\n"
    )  # fmt: skip
    (found,) = only(events, FindingEvent)
    assert (found.finding.type, found.finding.message) == ("KeyError", "'a'")
    assert found.finding.traceback.endswith("RuntimeError: b")


def test_two_tracebacks_one_after_the_other_are_two_findings():
    events, _ = scan(TRACEBACK + "KeyError: 'a'\n" + TRACEBACK + "RuntimeError: b\n")
    assert [found.finding.type for found in only(events, FindingEvent)] == ["KeyError", "RuntimeError"]


def test_ranks_that_prefix_every_line_are_told_apart():
    lines = []
    for part in (*TRACEBACK.splitlines(), "ValueError: of rank N"):
        lines += [f"[rank{rank}]: {part.replace('N', str(rank))}\n" for rank in (0, 1)]
    events, _ = scan("".join(lines))
    assert [(found.finding.worker, found.finding.message) for found in only(events, FindingEvent)] == [
        ("rank0", "of rank 0"), ("rank1", "of rank 1"),
    ]  # fmt: skip
    assert all(found.finding.traceback.startswith(TRACEBACK) for found in only(events, FindingEvent))


def test_a_message_of_several_lines_ends_at_a_log_line():
    events, _ = scan(TRACEBACK + "RuntimeError: first\n  second\nthird\n2026-11-29 14:00:00 INFO saved\n")
    (found,) = only(events, FindingEvent)
    assert found.finding.message == "first\n  second\nthird"
    assert "saved" not in found.finding.traceback


def test_the_same_bug_has_the_same_fingerprint_in_two_runs():
    other = TRACEBACK.replace("/runs/x/", "/runs/y/").replace("line 10", "line 11")
    first = scan(TRACEBACK + "RuntimeError: at 0x7f01\n")[1].findings[0]
    second = scan("noise\n" + other + "RuntimeError: at 0x9a02\n")[1].findings[0]
    third = scan(TRACEBACK.replace("in run", "in walk") + "RuntimeError: at 0x7f01\n")[1].findings[0]
    assert first.fingerprint == second.fingerprint != third.fingerprint


def test_findings_are_bounded_and_counted():
    text = "".join(TRACEBACK.replace("in run", f"in run{n}") + f"OSError: {n}\n\nok\n" for n in range(20))
    text += (TRACEBACK.replace("in run", "in run0") + "OSError: 0\n\nok\n") * 7
    events, summary = scan(text)
    assert [finding.count for finding in summary.findings] == [8, 1, 1, 1, 1, 1, 1, 1]
    assert summary.findings_total == 27
    repeats = [event.finding.count for event in only(events, FindingEvent) if event.finding.message == "0"]
    assert repeats == [1, 2, 4, 8]
    assert len(summary.tail) == 3
    assert summary.tail[-1].count == 8


def test_a_very_long_traceback_keeps_its_two_ends():
    frames = "".join(f'  File "a.py", line {n}, in f{n}\n' for n in range(5000))
    finding = scan("Traceback (most recent call last):\n" + frames + "OSError: x\n")[1].findings[0]
    assert len(finding.traceback) < 20000
    assert "line 0, in f0" in finding.traceback
    assert finding.traceback.endswith("in f4999\nOSError: x")


def test_a_traceback_cut_off_by_the_end_of_the_run_is_still_a_finding():
    finding = scan(TRACEBACK)[1].findings[0]
    assert (finding.type, finding.message) == ("Traceback", "cut off before its last line")


def test_a_dead_worker_shows_before_the_next_line_is_written():
    scanner = Scanner()
    text = ("worker=drafter-0 step=1\nException in thread drafter-0:\n" + TRACEBACK + "OSError: x\n").encode()
    scanner.feed(text, 5.0)
    summary = scanner.summary()
    assert summary.findings == []
    assert summary.offset == scanner.resume_offset == text.index(b"Exception")
    now = settled(summary)
    assert [finding.type for finding in now.findings] == ["OSError"]
    assert now.workers[0].died_at == 5.0
    assert [type(event) for event in scanner.settle(6.0)] == [FindingEvent, WorkerDown]
    assert scanner.settle(7.0) == []
    assert scanner.summary().open_findings == []


def test_offsets_of_a_log_that_is_followed_from_the_middle_are_those_of_the_file():
    events, summary = scan("noise\nstep=1\n", base_offset=1000)
    assert events[0].offset == 1006
    assert summary.offset == 1013


def test_endings_without_a_traceback():
    fatal = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    fatal += '  File "x.py", line 3 in f\n'
    cpp = "terminate called after throwing an instance of 'c10::Error'\n  what():  out of memory\n"
    _, summary = scan(fatal + "bye\n" + cpp)
    assert [(finding.type, finding.message) for finding in summary.findings] == [
        ("Fatal Python error", "Segmentation fault"), ("c10::Error", "out of memory"),
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_is_remembered_with_its_step():
    events, summary = scan("step=6 loss=2\nstep=7 loss=nan\nstep=8 loss=2\n")
    assert math.isnan(only(events, StepEvent)[1].loss)
    assert (summary.nonfinite_step, summary.loss) == (7, 2.0)


def test_an_empty_log_says_nothing():
    assert scan("") == ([], LogSummary())


@pytest.mark.parametrize(
    "line",
    [
        "make: *** [Makefile:2: train] Error 1", "start.sh: line 3:  4711 Aborted   python train.py",
        "sh: 1: x: not found",
        "E1129 17:03:29.219000 9256 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1)",
    ],
)  # fmt: skip
def test_what_started_the_program_says_nothing_of_its_exception(line):
    (found,) = only(scan(TRACEBACK + f"RuntimeError: boom\n{line}\n")[0], FindingEvent)
    assert found.finding.message == "boom" and line not in found.finding.traceback


def test_a_program_that_prints_nothing_but_tracebacks_has_none_cut_off():
    text = "".join(
        f'Traceback (most recent call last):\n  File "train.py", line {n % 9}, in read\n    rows[key]\nKeyError: {n}\n'
        for n in range(30_000)
    )
    assert len(text) > 2 << 20
    scanner = Scanner(every=True)
    events = scanner.feed(text.encode(), 0.0) + scanner.finish(0.0)
    assert [event.finding.type for event in events] == ["KeyError"] * 30_000
