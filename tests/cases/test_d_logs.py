"""Group D of the public bug cases: what a log does to whoever reads it. Each test names its case."""

import pytest

from orchestrator.health import judge
from orchestrator.logscan import FindingEvent, Scanner, StepEvent
from orchestrator.model import ExitRecord, LogFile, Probe, Process

NOW = 10_000.0
PROGRAM = Process(pid=42, start_ticks=7, name="python", state="S", marked=True)
OLD = (
    "step=900 loss=1 tok/s=500\nException in thread drafter-0:\nTraceback (most recent call last):\n"
    '  File "a.py", line 1, in run\n    go()\nRuntimeError: of yesterday\n'
)


def scan(data, *, base_offset=0):
    scanner = Scanner(base_offset=base_offset)
    events = scanner.feed(data if isinstance(data, bytes) else data.encode(), NOW - 5)
    return events + scanner.finish(NOW - 5), scanner.summary()


def verdict(summary, *, ending=None):
    alive = ending is None
    return judge(Probe(
        run_id="r", attempt=1, nonce="n", observed_at=NOW, created_at=NOW - 60, target="t", owner="o", note="",
        argv=["x"], exit=ending, stop=None, same_boot=True, supervisor_alive=alive, program_seen=True,
        program=PROGRAM if alive else None, tree=[PROGRAM] if alive else [], summary=summary,
        log=LogFile(path="/w/r.a1.log", size=9000, modified_at=NOW, verified=True, header_bytes=100),
    ))  # fmt: skip


def findings(events):
    return [event.finding for event in events if isinstance(event, FindingEvent)]


def test_d1_carriage_returns_hide_neither_step_nor_traceback():
    frames = b"".join(b"\r%3d%%|%-40s| %d/500 [00:01<00:09]" % (n // 5, b"#" * (n * 40 // 500), n) for n in range(500))
    line = frames.ljust(40_000) + b"\rstep=12 tok/s=900\rTraceback (most recent call last):\n"
    rest = b'  File "a.py", line 1, in run\n    go()\nRuntimeError: boom\n'
    events, summary = scan(line + rest)
    assert (summary.step, summary.tok_s) == (12, 900.0)
    (found,) = findings(events)
    assert (found.type, found.message) == ("RuntimeError", "boom")
    assert found.offset == line.index(b"Traceback")


def test_d2_colour_codes_inside_the_pattern():
    _, summary = scan(b"\x1b[31mstep: 10\x1b[0m \x1b[34mtps: 1,234\x1b[0m\n")
    assert (summary.step, summary.tok_s) == (10, 1234.0)


def test_d2_colour_codes_inside_words_and_numbers():
    _, summary = scan(b"\x1b[1mst\x1b[0mep=1\x1b[31m2\x1b[0m \x1b]0;title\x07tok/\x1b(Bs=\x1b[38;5;9m3\x001\x1b[m0\n")
    assert (summary.step, summary.tok_s) == (12, 310.0)


@pytest.mark.parametrize("announced", [True, False])
def test_d3_two_tracebacks_merged_line_by_line_list_both_endings_and_no_stack(announced):
    def lines(name, function, ending):
        first = [f"Exception in thread {name}:"] if announced else []
        source = [f'  File "{name}.py", line 1, in {function}', f"    {function}()"]
        return [*first, "Traceback (most recent call last):", *source, ending]

    pairs = zip(lines("drafter-0", "f", "ValueError: a"), lines("drafter-1", "g", "KeyError: 'b'"), strict=True)
    events, summary = scan("".join(f"{one}\n{other}\n" for one, other in pairs))
    found = findings(events)
    assert [(one.type, one.message) for one in found] == [("ValueError", "a"), ("KeyError", "'b'")]
    for one in found:
        assert "File" not in one.traceback
        assert "interleaved" in one.traceback
        assert one.worker is None
    failed = verdict(summary, ending=ExitRecord(at=NOW, code=1))
    assert failed.state == "FAILED"
    assert failed.workers_gone == (["drafter-0", "drafter-1"] if announced else [])
    assert failed.error in found


def test_d4_a_program_that_printed_nothing_yet_is_starting_and_not_dead():
    summary = scan("")[1]
    assert verdict(summary).state == "STARTING"


def test_d6_an_old_runs_error_before_this_run_began_is_not_read():
    events, summary = scan("step=3 tok/s=9\n", base_offset=len(OLD))
    assert findings(events) == []
    assert (verdict(summary).state, verdict(summary).step) == ("RUNNING", 3)


def test_d6_an_old_runs_error_that_the_program_prints_itself_is_only_a_finding():
    events, summary = scan(OLD.partition("\n")[2] + "step=1 tok/s=9\nstep=2 tok/s=9\nstep=3 tok/s=9\n")
    assert len(findings(events)) == 1
    assert findings(events)[0].before_first_step
    seen = verdict(summary)
    assert (seen.state, seen.step, seen.error) == ("RUNNING", 3, None)


@pytest.mark.parametrize(
    "line",
    [
        "val/TokenError=0.01", "0 errors", "retry after OutOfMemoryError: ok", "dataset: bloomoord",
        "RuntimeError: is what this test prints", "Traceback (most recent call last): is how Python begins it",
        "the last exception in thread pool: none",
    ],
)  # fmt: skip
def test_d7_false_alarms(line):
    events, summary = scan(f"step=1\n{line}\nstep=2\nstep=3\n")
    assert findings(events) == []
    assert (verdict(summary).state, verdict(summary).error) == ("RUNNING", None)
    assert verdict(summary, ending=ExitRecord(at=NOW, code=0)).state == "SUCCEEDED"


def test_d8_the_exit_code_decides_and_not_the_last_word():
    events, summary = scan("step=1\nsaved\n")
    ended = verdict(summary, ending=ExitRecord(at=NOW, code=3))
    assert (ended.state, ended.error) == ("FAILED", None)
    assert "exit code 3" in ended.why
    assert [event.step for event in events if isinstance(event, StepEvent)] == [1]
