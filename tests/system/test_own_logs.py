"""Logs that a program writes by itself: which lines are this run's, and which are not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.driver import Specctl, poll_until

PYTHON = sys.executable
OLD = "".join(f"step={n} loss=1 tok/s=9\n" for n in range(900, 912))
STEPS = "import time\nfor n in range(1, 100000): print(f'step={n} loss=1 tok/s=100', flush=True); time.sleep(.05)"
MINE = """
import sys, time
open_log = lambda: open(sys.argv[1], {mode!r})
log, n = open_log(), 0
while True:
    n += 1
    {each}
    print(f'step={{n}} loss=1 tok/s=5', file=log, flush=True)
    time.sleep(.02)
"""


def events_of(specctl: Specctl, run_id: str, name: str) -> list[dict[str, Any]]:
    lines = (specctl.run_dir(run_id) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def mine(specctl: Specctl, log: Path, *, mode: str = "a", each: str = "pass") -> str:
    """A verified run that writes its steps to `log`, doing `each` before every one."""
    done = specctl.launch("--", PYTHON, "-c", MINE.format(mode=mode, each=each), str(log))
    assert done.code == 0, done.err
    return str(done.json["run_id"])


def steps_on(specctl: Specctl, run_id: str, beyond: int) -> int:
    return int(poll_until(lambda: (step := specctl.status(run_id)["step"] or 0) > beyond and step))


def test_a_log_that_another_run_writes_says_nothing_of_a_run_that_does_nothing(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    first = specctl.launch("--", "bash", "-c", f'exec {PYTHON} -c "$0" >> {log} 2>&1', STEPS)
    assert first.code == 0
    idle = specctl.launch("--timeout", "3", "--", "bash", "-c", f"exec >> {log} 2>&1; sleep 1000")
    assert idle.code == 1 and idle.json["rung"] == "process"
    [shared] = idle.json["foreign_logs"]
    assert shared["path"] == str(log) and ("pid " in shared["shared"] or first.json["run_id"] in shared["shared"])
    row = specctl.status(idle.json["run_id"])
    assert row["state"] == "STARTING" and row["step"] is None and str(log) in row["why"]
    shown = specctl("logs", idle.json["run_id"])
    assert shown.out == "" and shown.code == 1 and "writes it too" in shown.err
    assert events_of(specctl, idle.json["run_id"], "log_shared")


def test_a_log_that_becomes_shared_keeps_what_it_said_while_it_was_not(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    run_id = mine(specctl, log)
    steps_on(specctl, run_id, 20)
    with log.open("a") as other:
        poll_until(lambda: events_of(specctl, run_id, "log_shared"))
        other.write("step=1000000 loss=1 tok/s=5\n")
        other.flush()
        steps = {specctl.status(run_id)["step"] for _ in range(3)}
    assert len(steps) == 1 and 0 < steps.pop() < 1_000_000
    shown = specctl("logs", run_id)
    assert shown.out.startswith("step=1 ") and "1000000" not in shown.out and f"pid {os.getpid()} " in shown.err


def test_a_run_whose_own_log_was_cut_after_its_end_still_has_its_other_logs(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    run_id = mine(specctl, log, each="print('said', n, flush=True)")
    steps_on(specctl, run_id, 5)
    assert specctl("stop", run_id).code == 0
    own = specctl.run_dir(run_id) / f"{run_id}.a1.log"
    os.truncate(own, own.stat().st_size - 10)
    assert specctl.status(run_id)["step"]
    shown = specctl("logs", run_id)
    assert log.read_text() in shown.out and str(log) in shown.err
    assert own.read_text().partition("\n")[2] in shown.out


@pytest.mark.parametrize("program", ["import nonexistent_module", "import time; time.sleep(1000)"])
def test_old_lines_that_tail_copies_into_the_runs_log_are_no_steps(specctl: Specctl, program: str) -> None:
    log = specctl.home / "train.log"
    log.write_text(OLD)
    script = f'nohup {PYTHON} -c "$0" >> {log} 2>&1 & tail -f {log}'
    done = specctl.launch("--timeout", "4", "--", "bash", "-c", script, program)
    assert done.code == 1 and done.json["state"] == "STARTING"
    assert "step=911" in (specctl.run_dir(done.json["run_id"]) / f"{done.json['run_id']}.a1.log").read_text()
    assert specctl.status(done.json["run_id"])["step"] is None
    findings = [found["message"] for found in done.json["findings"]]
    assert any("nonexistent_module" in message for message in findings) == ("nonexistent" in program)


def test_new_lines_that_tail_copies_are_steps(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    log.write_text(OLD)
    script = f'nohup {PYTHON} -c "$0" >> {log} 2>&1 & tail -f {log}'
    done = specctl.launch("--", "bash", "-c", script, STEPS)
    assert done.code == 0 and specctl.status(done.json["run_id"])["step"] < 900


def test_a_failure_that_is_equal_to_yesterdays_is_still_todays(specctl: Specctl) -> None:
    program = "import nonexistent_module"
    first = specctl.launch("--", PYTHON, "-c", program).json["run_id"]
    (specctl.home / "train.log").write_text(specctl("logs", first).out)
    done = specctl.launch("--", PYTHON, "-c", program)
    assert done.json["error"]["type"] == "ModuleNotFoundError"


def test_old_bytes_stay_old_however_the_log_is_opened(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    log.write_text(OLD)
    program = f"import time\nlog = open({str(log)!r}, 'r+'); log.seek(0, 2)\nprint('hello', file=log, flush=True)\n"
    done = specctl.launch("--timeout", "3", "--", PYTHON, "-c", program + "time.sleep(1000)")
    [foreign] = done.json["foreign_logs"]
    assert (foreign["base"], foreign["truncated"]) == (len(OLD), False)
    assert done.json["state"] == "STARTING" and specctl.status(done.json["run_id"])["step"] is None
    assert specctl("logs", done.json["run_id"]).out == "hello\n"


def test_a_log_that_was_emptied_and_has_outgrown_its_old_size_is_read_from_its_start(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    log.write_text("x" * 10 + "\n")
    line = "step=1 loss=1 tok/s=2 longer than the old text"
    done = specctl.launch("--", "bash", "-c", f": > {log}; exec >> {log} 2>&1; echo '{line}'; sleep 1000")
    assert done.code == 0
    [foreign] = done.json["foreign_logs"]
    assert foreign["truncated"] and foreign["base"] == 0 and foreign["before"] == 11
    assert specctl("logs", done.json["run_id"]).out == line + "\n"


@pytest.mark.parametrize("mode", ["a", "w"])
def test_a_program_that_empties_its_log_is_followed_on(specctl: Specctl, mode: str) -> None:
    log = specctl.home / "train.log"
    run_id = mine(specctl, log, mode=mode, each="n % 100 or log.truncate(log.seek(0))")
    steps_on(specctl, run_id, 130)
    poll_until(lambda: events_of(specctl, run_id, "log_begun_again"))
    assert specctl.status(run_id)["state"] == "RUNNING"


def test_a_log_of_one_line_that_is_rewritten_for_each_step_is_read(specctl: Specctl) -> None:
    log = specctl.home / "progress.log"
    run_id = mine(specctl, log, each="log.close(); log = open(sys.argv[1], 'w')")
    first = steps_on(specctl, run_id, 50)
    assert steps_on(specctl, run_id, first) > first


def test_a_rotated_log_is_followed_shown_and_let_go(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    rotate = "if n % 50 == 0: import os; [os.replace(sys.argv[1] + a, sys.argv[1] + b) for a, b in"
    rotate += " (('.1', '.2'), ('', '.1')) if os.path.exists(sys.argv[1] + a)]; log.close(); log = open_log()"
    run_id = mine(specctl, log, each=rotate)
    steps_on(specctl, run_id, 300)
    done = specctl("logs", run_id)
    steps = [int(line.partition("=")[2].split()[0]) for line in done.out.splitlines()]
    assert done.code == 0 and len(steps) > 50 and steps == sorted(set(steps))
    supervisor = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"]
    held = []
    for fd in Path(f"/proc/{supervisor}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it opens and closes others all the time
            held.append(str(fd.readlink()))
    assert held and len([path for path in held if path.startswith(str(log))]) <= 2


def test_a_log_that_is_opened_for_each_line_is_found(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    log.write_text(OLD)
    script = f"while :; do i=$((i+1)); echo step=$i loss=1 tok/s=4 >> {log}; sleep .05; done"
    done = specctl.launch("--", "bash", "-c", script)
    assert done.code == 0 and done.json["foreign_logs"][0]["base"] == len(OLD)
    assert specctl("logs", done.json["run_id"]).out.startswith("step=1 ")


def test_a_log_goes_by_one_name_however_it_was_found(specctl: Specctl) -> None:
    (real := specctl.home / "real").mkdir()
    (specctl.home / "linked").symlink_to(real)
    log = specctl.home / "linked" / "train.log"
    # For each line: no process has it open when anybody looks, and it is found by the name in the script alone.
    program = f"i=0; while sleep 0.05; do i=$((i+1)); echo step $i >> {log}; done"
    run = specctl.launch("--", "sh", "-c", program).json["run_id"]
    found = poll_until(lambda: specctl.status(run)["foreign_logs"])
    assert [one["path"] for one in found] == [str(real / "train.log")] and found[0]["base"] == 0
    steps_on(specctl, run, 5)


def test_a_neighbours_log_that_is_opened_for_each_line_is_not_this_runs(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    script = f"while :; do i=$((i+1)); echo step=$i loss=1 tok/s=4 >> {log}; sleep .05; done"
    assert specctl.launch("--", "bash", "-c", script).code == 0
    idle = specctl.launch("--timeout", "3", "--", "bash", "-c", f"sleep 1000 # once it wrote {log}")
    assert idle.code == 1 and specctl.status(idle.json["run_id"])["step"] is None


def test_what_is_read_late_happened_when_it_was_written(specctl: Specctl) -> None:
    done = specctl.launch("--", PYTHON, "-c", STEPS)
    run_id, log = done.json["run_id"], Path(done.json["log"])
    os.kill(json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    size = log.stat().st_size
    poll_until(lambda: log.stat().st_size > size + 200)
    for pid in specctl.processes(run_id):
        os.kill(pid, signal.SIGSTOP)
    written_at = log.stat().st_mtime
    poll_until(lambda: time.time() - written_at > 3)
    assert specctl.status(run_id)["last_progress_age_s"] > 2.9


def test_a_very_long_line_is_one_line_without_a_pattern_too(specctl: Specctl) -> None:
    program = "import sys; sys.stdout.write('a' * (8 << 20) + '\\nstep=1 tok/s=3\\n')"
    run_id = specctl.launch("--", PYTHON, "-c", program).json["run_id"]
    done = specctl("logs", run_id)
    assert [len(line) for line in done.out.splitlines()] == [8 << 20, 14] and "2 of 2 lines" in done.err
    first, second = specctl("logs", run_id, "--json", "-n", "2").objects
    assert second["offset"] - first["offset"] == (8 << 20) + 1


def test_a_program_that_wrote_nothing_has_no_last_byte(specctl: Specctl) -> None:
    run_id = specctl.launch("--until", "process", "--", "sleep", "1000").json["run_id"]
    done = specctl("logs", run_id)
    assert done.code == 1 and "0 of 0 lines; last byte none yet" in done.err


def test_no_line_at_all_may_be_asked_for(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "sh", "-c", "echo step=1 tok/s=1; echo step=2 tok/s=1").json["run_id"]
    done = specctl("logs", run_id, "-n", "0")
    assert done.code == 0 and done.out == "" and "2 of 2 lines" in done.err


@pytest.mark.parametrize("option", [["-i"], ["-v"], ["-A", "1"], ["-B", "1"], ["-C", "1"]])
def test_how_to_search_without_what_to_search_is_a_usage_error(specctl: Specctl, option: list[str]) -> None:
    run_id = specctl.launch("--", "sh", "-c", "echo step=1 tok/s=1").json["run_id"]
    done = specctl("logs", run_id, *option)
    assert done.code == 2 and "--grep" in done.err and done.out == ""


def test_a_fast_program_does_not_fill_the_disk_with_metrics(specctl: Specctl) -> None:
    program = "for n in range(1, 200001): print(f'step={n} loss=1 tok/s=100')"
    done = specctl.launch("--", PYTHON, "-c", program)
    run_id = done.json["run_id"]
    poll_until(lambda: (specctl.run_dir(run_id) / "exit.json").exists())
    rows = [json.loads(line) for line in (specctl.run_dir(run_id) / "metrics.jsonl").read_text().splitlines()]
    assert specctl.status(run_id)["step"] == 200_000 and rows[-1]["step"] == 200_000
    assert 2 <= len(rows) < 1000 and [row["step"] for row in rows] == sorted({row["step"] for row in rows})


def test_rotated_and_new_logs_are_followed_without_a_supervisor_too(specctl: Specctl) -> None:
    done = specctl.launch("--", PYTHON, specctl.program("rotates.py"), str(specctl.home))
    assert done.code == 0, done.out
    run_id = done.json["run_id"]
    os.kill(json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    rotated = [(specctl.home / "train.log").stat().st_ino]
    step = specctl.status(run_id)["step"]
    poll_until(lambda: (specctl.home / "train.log").stat().st_ino != rotated[0])
    step = steps_on(specctl, run_id, step)
    for _ in range(2):  # so often that what was read is deleted meanwhile
        rotated.append((specctl.home / "train.log").stat().st_ino)
        poll_until(lambda: (specctl.home / "train.log").stat().st_ino != rotated[-1])
    (specctl.home / "move").touch()
    second = specctl.home / "later" / "second.log"
    poll_until(lambda: second.exists() and "\n" in second.read_text())
    at = int(second.read_text().partition("=")[2].split()[0])
    assert steps_on(specctl, run_id, max(step, at)) > step
    row = specctl.status(run_id)
    assert row["state"] == "RUNNING" and {Path(log["path"]).name for log in row["foreign_logs"]} == {
        "train.log", "second.log"}  # fmt: skip


def test_of_many_logs_of_its_own_the_first_is_named_and_the_others_are_counted(specctl: Specctl) -> None:
    names = [str(specctl.home / f"rank{number}.log") for number in range(5)]
    script = f"while :; do i=$((i+1)); echo step=$i loss=1 tok/s=5; sleep .05; done | tee {' '.join(names)}"
    done = specctl("launch", "local", "--", "bash", "-c", script)
    run_id = done.out.split()[1]
    poll_until(lambda: len(specctl.status(run_id)["foreign_logs"]) == 5)
    for shown in (specctl("status", run_id).out, specctl("logs", run_id, "-n", "1").err):
        assert sum(shown.count(name) for name in names) == 1 and "and 4 more" in shown
    assert sum(specctl("show", run_id).out.count(name) for name in names) >= 5


def test_a_log_that_repeats_the_runs_own_is_shown_and_counted_once(specctl: Specctl) -> None:
    log, more = specctl.home / "train.log", specctl.home / "more"
    log.write_text(OLD)
    program = (
        "import os, time\nprint('step=1 loss=1 tok/s=5', 'Traceback (most recent call last):',\n"
        "'  File \"a.py\", line 1, in f', 'KeyError: 1', 'step=2 loss=1 tok/s=5', sep=chr(10), flush=True)\n"
        f"while not os.path.exists({str(more)!r}): time.sleep(.05)\n"
        f"open({str(log)!r}, 'a').write('only there\\n')\n"
    )
    done = specctl.launch("--", "bash", "-c", f'{PYTHON} -c "$0" | tee -a {log}', program)
    run_id = done.json["run_id"]
    whole = specctl("logs", run_id)
    assert whole.out.count("step=1 ") == 1 and "5 of 5 lines" in whole.err and f"{log} says the same" in whole.err
    assert "1 exception, 1 different" in specctl("logs", run_id, "--errors").err
    following = specctl.start("logs", run_id, "-f")
    assert following.stdout is not None
    assert [following.stdout.readline() for _ in range(5)] == whole.out.splitlines(True)
    more.touch()
    out, err = following.communicate(timeout=60)
    assert out == "only there\n" and "and no longer does" in err
    assert specctl("logs", run_id, "--grep", "only there").out == "only there\n"


def test_old_exceptions_that_tail_copies_into_the_runs_log_are_none_of_its(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: "yesterday"\n')
    script = f'nohup {PYTHON} -c "$0" >> {log} 2>&1 & tail -f {log}'
    done = specctl.launch("--timeout", "4", "--", "bash", "-c", script, "import nonexistent_module")
    run_id = done.json["run_id"]
    poll_until(lambda: "nonexistent" in specctl("logs", run_id, "--errors").out)
    shown = specctl("logs", run_id)
    assert "yesterday" in shown.out and "B of its log are older lines" in shown.err
    assert "yesterday" not in specctl("logs", run_id, "--errors").out


def test_a_program_that_names_what_nobody_can_read_starts_all_the_same(specctl: Specctl) -> None:
    kernel = Path("/proc/2/comm")
    if not kernel.exists() or kernel.read_text() != "kthreadd\n":
        pytest.skip("the kernel's threads are not seen from here, whose /proc/PID/exe is a link that cannot be read")
    done = specctl.launch("--until", "process", "--", "sh", "-c", "readlink /proc/2/exe; sleep 600")
    assert done.code == 0, done.err
