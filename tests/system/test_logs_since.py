"""`logs --since`: what was written since a time, as precisely as the supervisor's marks are."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path

from tests.driver import Specctl, poll_until
from tests.system.test_logs import finished, log_of

PROGRAM = """
import os, sys, time
log, n = open(sys.argv[1], 'a'), 0
for age in ('old', 'new', 'newest'):
    while not os.path.exists(age): time.sleep(.02)
    for n in range(40000 if age == 'old' else 100):
        print(f'{age} {n} ' + 'x' * 20, flush=n % 100 == 99)
        if n < 50: print(f'mine {age} {n}', file=log, flush=True)
while True: time.sleep(1)
"""


def marks(specctl: Specctl, run_id: str) -> list[dict[str, float]]:
    path = specctl.run_dir(run_id) / f"{run_id}.a1.idx"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def written(specctl: Specctl, run_id: str, log: Path, age: str) -> float:
    """Lets the program write the next lines; the time at which marks stand behind all of them."""
    (specctl.run_dir(run_id) / "code" / age).touch()

    def marked() -> bool:
        own = log_of(specctl, run_id)
        ends = {bool(mark.get("log")): mark["offset"] for mark in marks(specctl, run_id)}
        there = f"{age} {39999 if age == 'old' else 99} ".encode() in own.read_bytes()
        return there and ends == {False: own.stat().st_size, True: log.stat().st_size}

    poll_until(marked)
    return time.time()


def test_since_shows_what_was_written_since_in_every_log(specctl: Specctl) -> None:
    log = specctl.home / "mine.log"
    run_id = specctl.launch("--until", "process", "--", sys.executable, "-c", PROGRAM, str(log)).json["run_id"]
    before = time.time()
    at = written(specctl, run_id, log, "old")
    (specctl.run_dir(run_id) / "code" / "new").touch()
    poll_until(lambda: b"new 99 " in log_of(specctl, run_id).read_bytes())

    def since(*words: str, moment: float = at) -> tuple[list[str], str, int]:
        done = specctl("logs", run_id, "--since", datetime.fromtimestamp(moment).isoformat(), *words)
        return done.out.splitlines(), done.err, done.code

    lines, err, code = since()
    assert code == 0 and len(lines) == 150 and all("new" in line for line in lines)
    assert "150 of 150 lines" in err and "from the mark of" in err and f"==> {log} <==" in err
    assert since("--grep", "mine .* 7$")[0] == ["mine new 7"]
    assert len(since("-n", "20")[0]) == 20 and since("--errors")[2] == 1
    everything, err, _ = since(moment=before - 60)
    assert len(everything) == 40_200 and "the run began only" in err
    at = written(specctl, run_id, log, "newest")
    lines, err, code = since(moment=at)
    assert (lines, code) == ([], 1) and "nothing has been written" in err


def test_a_local_time_is_turned_into_so_long_ago(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "sh", "-c", "echo step=1 tok/s=1").json["run_id"]
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 3600))
    assert specctl("logs", run_id, "--since", local).out == "step=1 tok/s=1\n"


def test_a_time_that_is_none_or_is_still_to_come_is_a_usage_error(specctl: Specctl) -> None:
    for text, said in (("2999-01-01", "future"), ("soon", "understood are")):
        done = specctl("logs", "--since", text)
        assert done.code == 2 and said in done.err


def test_what_was_written_within_the_kernels_tick_is_shown(specctl: Specctl) -> None:
    run_id = finished(specctl, "step=1 tok/s=1\nstep=2 tok/s=1\n")
    log, moment = log_of(specctl, run_id), time.time()
    text = log.read_bytes()
    mark = {"time": moment - 1, "offset": text.index(b"step=2"), "lines": 2, "clean": True}
    (specctl.run_dir(run_id) / f"{run_id}.a1.idx").write_text(json.dumps(mark) + "\n")
    os.utime(log, (moment - 0.004, moment - 0.004))
    done = specctl("logs", run_id, "--since", datetime.fromtimestamp(moment).isoformat())
    assert done.out == "step=2 tok/s=1\n" and done.code == 0
