"""What Python itself writes when it fails, written by a real interpreter and read whole."""

import os
import subprocess
import sys

import pytest

from orchestrator.logscan import Scanner, StepEvent

THREADS = """
import threading, time, sys
def work(name, bad):
    for step in range(1, 200):
        if bad and step == 100:
            raise RuntimeError("boom of " + name)
        sys.stdout.write(f"worker={name} step={step} loss=2.0 tok/s=100\\n"); sys.stdout.flush()
threads = [threading.Thread(target=work, args=(f"drafter-{n}", n == 0), name=f"drafter-{n}") for n in range(3)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"""
PROGRAMS = {
    "plain": ("def f(): raise ValueError('a')\nf()", "ValueError", "a"),
    "no message": ("assert 1 == 2", "AssertionError", ""),
    "chained": ("try:\n  {}['k']\nexcept KeyError as e:\n  raise RuntimeError('later') from e", "KeyError", "'k'"),
    "handled": ("try:\n  {}['k']\nexcept KeyError:\n  raise RuntimeError('later')", "KeyError", "'k'"),
    "lines": ("raise RuntimeError('one\\n  two\\nthree')", "RuntimeError", "one\n  two\nthree"),
    "dotted": ("import queue\nqueue.Queue().get_nowait()", "_queue.Empty", ""),
    "import": ("import no_such_module_here", "ModuleNotFoundError", "No module named 'no_such_module_here'"),
    "recursion": ("def f(): f()\nf()", "RecursionError", None),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
    "local class": ("def f():\n  class Bad(Exception): pass\n  raise Bad('x')\nf()", "f.<locals>.Bad", "x"),
    "fatal": ("import faulthandler, os\nfaulthandler.enable()\nos.abort()", "Fatal Python error", "Aborted"),
}  # fmt: skip
if sys.version_info >= (3, 11):
    PROGRAMS["group"] = ("raise ExceptionGroup('g', [ValueError('a'), OSError('b')])", "ExceptionGroup", None)
    PROGRAMS["note"] = ("e = ValueError('a')\ne.add_note('look here')\nraise e", "ValueError", "a\nlook here")


def run(path, text):
    path.write_text(text)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, env=environ
    )
    scanner = Scanner()
    events = scanner.feed(done.stdout, 1.0) + scanner.finish(1.0)
    return done, events, scanner.summary()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_real_failure_is_one_finding_with_the_whole_text(tmp_path, name):
    text, kind, message = PROGRAMS[name]
    done, _, summary = run(tmp_path / "program.py", text)
    assert done.returncode != 0
    (found,) = summary.findings
    assert found.type.removeprefix("__main__.") == kind
    if message is not None:
        assert found.message == message
    if name not in ("group", "fatal"):
        assert found.traceback == done.stdout.decode().rstrip("\n")


def test_a_file_that_does_not_parse_is_a_finding_although_python_prints_no_traceback_line(tmp_path):
    _, _, summary = run(tmp_path / "program.py", "def (\n")
    (found,) = summary.findings
    assert found.type == "SyntaxError"
    assert "program.py" in found.traceback


def test_a_real_thread_that_dies_among_others_is_named(tmp_path):
    _, events, summary = run(tmp_path / "program.py", THREADS)
    (found,) = summary.findings
    assert (found.type, found.message, found.worker) == ("RuntimeError", "boom of drafter-0", "drafter-0")
    assert [worker.name for worker in summary.workers if worker.died_at is not None] == ["drafter-0"]
    assert {worker.step for worker in summary.workers} == {99, 199}
    assert "in work" in found.traceback
    assert "step=1" not in found.traceback
    assert sum(isinstance(event, StepEvent) for event in events) == 99 + 2 * 199, "no step is lost in between"
