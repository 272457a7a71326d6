"""Jobs run at the same time, a bounded number of them, and nobody has to wait for one that hangs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from orchestrator.crew import Crew


def test_as_many_jobs_as_allowed_run_at_once_and_never_more() -> None:
    crew, lock, meeting = Crew(3), threading.Lock(), threading.Barrier(3, timeout=60)
    inside = most = 0

    def job() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        meeting.wait()
        with lock:
            inside -= 1

    for future in [crew.do(job) for _ in range(12)]:
        future.result(timeout=60)
    assert most == 3


def test_a_result_and_an_error_come_out_as_they_are() -> None:
    crew = Crew(2)
    assert crew.do(lambda: 41 + 1).result(timeout=60) == 42
    with pytest.raises(ZeroDivisionError):
        crew.do(lambda: 1 // 0).result(timeout=60)


def test_a_program_ends_though_a_job_of_it_hangs() -> None:
    code = "import threading; from orchestrator.crew import Crew; Crew(1).do(threading.Event().wait); print('end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "end\n"
