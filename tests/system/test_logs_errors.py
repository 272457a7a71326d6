"""`logs --errors`: every exception of a run, whole, grouped, and whether anything ended with it."""

from __future__ import annotations

import sys
from collections import Counter

from orchestrator.logscan import FindingEvent, Scanner
from tests.driver import Specctl, poll_until
from tests.system.test_logs import finished, log_of

STEP = "step={} worker=drafter-1 loss=2.0 tok/s=300\n"
CHAINED = """Traceback (most recent call last):
  File "data.py", line 3, in read
    rows[key]
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in main
    read()
RuntimeError: no such row
"""


def error(number: int, mark: str = "") -> str:
    return (
        f"{mark}Traceback (most recent call last):\n"
        f'  File "train.py", line {number}, in part_{number}\n    work({number})\nValueError: number {number}\n'
    )


def test_all_are_found_whole_wherever_they_stand(specctl: Specctl) -> None:
    filler = "loading shard, all is well with it and with the one after it\n" * 20_000
    text = STEP.format(1)
    for number in range(12):  # more than the supervisor's summary keeps, and the first words cut by the end of a piece
        if number < 3:
            text += filler[: (1 << 20) - (len(text) % (1 << 20)) - 200 - number]
        text += "\n" + error(number, "\x1b[31m" if number % 2 else "") + STEP.format(number + 2)
    text += error(3) + STEP.format(30) + CHAINED
    run_id = finished(specctl, text, code=1)
    raw = log_of(specctl, run_id).read_bytes()
    scanner = Scanner(every=True)
    events = scanner.feed(raw, 0.0) + scanner.finish(0.0)
    kinds = Counter(event.finding.fingerprint for event in events if isinstance(event, FindingEvent))
    done = specctl("logs", run_id, "--errors", "--json")
    assert done.code == 0 and "14 exceptions, 13 different" in done.err
    groups = done.objects
    assert {group["fingerprint"]: group["count"] for group in groups} == kinds
    assert [group["message"] for group in groups[:12]] == [f"number {number}" for number in range(12)]
    for group in groups:
        assert b"Traceback" in raw[group["first"]["offset"] :][:40]
        assert group["first"]["at"] <= group["last"]["at"]
    assert groups[3]["count"] == 2 and groups[3]["first"]["offset"] < groups[3]["last"]["offset"]
    assert [group["ended"] for group in groups] == [None] * 12 + ["run"]
    assert [group["why"] for group in groups[:12]] == ["steps followed it: a finding, no failure"] * 12
    assert groups[12]["traceback"] == CHAINED.rstrip("\n") and groups[12]["type"] == "KeyError"
    shown = specctl("logs", run_id, "--errors").out
    assert CHAINED in shown and shown.index("number 0") < shown.index("number 11") < shown.index("KeyError")


def test_a_worker_that_ended_is_told_from_an_exception_that_was_survived(specctl: Specctl) -> None:
    run_id = specctl.launch("--", sys.executable, specctl.program("one_thread_dies.py")).json["run_id"]
    poll_until(lambda: specctl.status(run_id)["state"] == "DEGRADED")
    [group] = specctl("logs", run_id, "--errors", "--json").objects
    assert group["ended"] == "worker" and group["down"] == ["drafter-0"] and group["workers"] == {"drafter-0": 1}
    assert group["first"]["exact"] and "FX" in group["message"] and group["hint"]


OUTLIVED = """
import threading

def work(name, dies):
    for step in range(1, 9):
        print(f"step={step} worker={name} tok/s=3", flush=True)
        if dies and step == 3:
            raise ValueError("a bad batch")

for name in ("drafter-0", "drafter-1", "drafter-2"):
    thread = threading.Thread(target=work, args=(name, name == "drafter-1"), name=name)
    thread.start()
    thread.join()
"""


def test_a_run_that_outlives_a_worker_did_not_end_with_its_exception(specctl: Specctl) -> None:
    (specctl.project / "outlived.py").write_text(OUTLIVED)
    run_id = specctl.launch("--until", "process", "--", sys.executable, "outlived.py").json["run_id"]
    poll_until(lambda: specctl.status(run_id)["state"] == "SUCCEEDED")
    [group] = specctl("logs", run_id, "--errors", "--json").objects
    assert group["ended"] == "worker" and group["why"] == "drafter-1 ended with it"
    assert f"{run_id} on local, in drafter-1: SUCCEEDED, drafter-1 ended with it" in specctl("errors", run_id).out
    assert "but drafter-1 died (ValueError: a bad batch)" in specctl("ls", "-n", "1").out


def test_exceptions_of_the_programs_own_log_are_found_and_those_from_before_are_not(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    log.write_text(error(1) + STEP.format(1))
    (specctl.project / "more.txt").write_text(STEP.format(1) + error(2) + STEP.format(2) + STEP.format(3))
    run_id = specctl.launch("--", "sh", "-c", f"exec >> {log} 2>&1; cat more.txt; sleep 1000").json["run_id"]
    [group] = specctl("logs", run_id, "--errors", "--json").objects
    assert group["message"] == "number 2" and group["first"]["log"] == str(log)
    assert group["first"]["offset"] > len(error(1)) and group["ended"] is None


def test_none_is_exit_1_and_says_of_what(specctl: Specctl) -> None:
    run_id = finished(specctl, "step=1 tok/s=1\nno errors\n")
    done = specctl("logs", run_id, "--errors")
    assert done.code == 1 and done.out == "" and run_id in done.err and "no exception in" in done.err
    done = specctl("logs", run_id, "--errors", "--grep", "x", "-f")
    assert done.code == 2 and "--grep, -f do not go together" in done.err
    done = specctl("logs", run_id, "--attempt", "2")
    assert done.code == 4 and "its only one is attempt 1" in done.err
