"""`logs`: this run's lines, searched as grep searches, with what they are of on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.driver import Specctl, poll_until

PYTHON = sys.executable
TEXT = "".join(f"line {n} {'odd' if n % 2 else 'even'}\n" for n in range(1, 101))


def finished(specctl: Specctl, text: str | bytes, code: int = 0) -> str:
    """A run that has printed `text` and ended."""
    data = text.encode() if isinstance(text, str) else text
    (specctl.project / "text.bin").write_bytes(data)
    run_id = str(specctl.launch("--", "sh", "-c", f"cat text.bin; exit {code}").json["run_id"])
    poll_until(lambda: specctl.status(run_id)["state"] in ("SUCCEEDED", "FAILED"))
    return run_id


def log_of(specctl: Specctl, run_id: str) -> Path:
    return specctl.run_dir(run_id) / f"{run_id}.a1.log"


def test_without_options_the_whole_output_and_nothing_else_is_on_stdout(specctl: Specctl) -> None:
    run_id = finished(specctl, TEXT)
    done = specctl("logs", run_id)
    assert done.code == 0 and done.out == TEXT
    assert run_id in done.err and "100 of 100 lines" in done.err and "SUCCEEDED" in done.err


def test_grep_options_are_greps(specctl: Specctl) -> None:
    run_id = finished(specctl, TEXT)
    assert specctl("logs", run_id, "--grep", "^line (7|70) ").out == "line 7 odd\nline 70 even\n"
    assert specctl("logs", run_id, "--grep", "LINE 7 ", "-i").out == "line 7 odd\n"
    assert specctl("logs", run_id, "--grep", "odd", "-v", "-n", "2").out == "line 98 even\nline 100 even\n"
    assert specctl("logs", run_id, "--grep", "line 50 ", "-C", "1").out == "line 49 odd\nline 50 even\nline 51 odd\n"
    assert specctl("logs", run_id, "--grep", "line 50 ", "-A", "1").out == "line 50 even\nline 51 odd\n"
    assert specctl("logs", run_id, "--grep", "line 50 ", "-B", "1").out == "line 49 odd\nline 50 even\n"
    assert specctl("logs", run_id, "-n", "3").out == "line 98 even\nline 99 odd\nline 100 even\n"
    counted = specctl("logs", run_id, "--grep", "odd", "-n", "1")
    assert counted.out == "line 99 odd\n" and "50 of 100 lines" in counted.err


def test_no_match_is_exit_1_and_still_says_of_what(specctl: Specctl) -> None:
    run_id = finished(specctl, TEXT, code=3)
    done = specctl("logs", run_id, "--grep", "nothing like it")
    assert done.code == 1 and done.out == ""
    assert run_id in done.err and "0 of 100 lines" in done.err and "FAILED" in done.err


def test_a_pattern_that_grep_refuses_is_a_usage_error(specctl: Specctl) -> None:
    run_id = finished(specctl, TEXT)
    done = specctl("logs", run_id, "--grep", "(")
    assert done.code == 2 and "(" in done.err


def test_json_lines_tell_where_each_line_stands(specctl: Specctl) -> None:
    run_id = finished(specctl, "plain\n\x1b[31mred\x1b[0m step\nbar 1\rbar 2\rTraceback (x)\nlast")
    raw = log_of(specctl, run_id).read_bytes()
    lines = specctl("logs", run_id, "--json", "--grep", ".").objects
    assert [line["line"] for line in lines] == ["plain", "red step", "bar 1", "bar 2", "Traceback (x)", "last"]
    for line, start in zip(lines, (b"plain", b"\x1b[31m", b"bar 1", b"bar 2", b"Traceback", b"last"), strict=True):
        assert raw[line["offset"] :].startswith(start)
        assert line["run_id"] == run_id and line["attempt"] == 1


def test_colours_progress_bars_and_nuls_hide_nothing_from_a_pattern(specctl: Specctl) -> None:
    frames = b"".join(b"\r%3d%%|####      | 12 it/s" % n for n in range(100))
    run_id = finished(specctl, frames + b"\rTraceback (most recent call last):\nER\x1b[1mR\x1b[0mOR\0S \xff here\n")
    assert specctl("logs", run_id, "--grep", "^Traceback").out == "Traceback (most recent call last):\n"
    assert specctl("logs", run_id, "--grep", "ERRORS � here").out == "ERRORS � here\n"


def test_a_very_long_line_is_whole(specctl: Specctl) -> None:
    run_id = finished(specctl, b"x" * (8 << 20) + b" END\nafter\n")
    done = specctl("logs", run_id, "--grep", "END$")
    assert len(done.out) == (8 << 20) + 5
    assert specctl("logs", run_id, "-n", "1").out == "after\n"


def test_following_ends_with_the_run_and_by_its_ending(specctl: Specctl) -> None:
    program = (
        "import time, sys\nfor n in range(20): print(f'step={n} tok/s=1'); time.sleep(.05)\nsys.exit(int(sys.argv[1]))"
    )
    good = specctl.launch("--until", "process", "--", PYTHON, "-c", program, "0").json["run_id"]
    done = specctl("logs", good, "-f")
    assert done.code == 0 and done.out.splitlines()[-1] == "step=19 tok/s=1" and "SUCCEEDED" in done.err
    bad = specctl.launch("--until", "process", "--", PYTHON, "-c", program, "4").json["run_id"]
    done = specctl("logs", bad, "-f", "--grep", "step=1[5-9]")
    assert done.code == 1 and len(done.out.splitlines()) == 5 and "FAILED" in done.err


def test_a_replaced_log_is_never_shown_as_this_runs(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    log = log_of(specctl, run_id)
    content = log.read_bytes()
    log.rename(specctl.home / "moved.log")
    log.write_bytes(content + b"RuntimeError: of another run\n")
    done = specctl("logs", run_id)
    assert done.code == 0 and content.partition(b"\n")[2].decode() in done.out and "another run" not in done.out
    assert f"its log was renamed to {specctl.home / 'moved.log'}" in done.err
    assert specctl("logs", run_id, "--grep", "another run").code == 1
    (specctl.home / "moved.log").unlink()
    specctl("stop", run_id, "--now")
    done = specctl("logs", run_id)
    assert done.code == 3 and done.out == "" and "replaced" in done.err


def test_a_run_that_never_started_has_no_lines(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "no-such-program").json["run_id"]
    done = specctl("logs", run_id)
    assert done.out == "" and done.code == 1 and "NEVER_STARTED" in done.err


def test_last_says_what_it_resolved_to(specctl: Specctl) -> None:
    run_id = finished(specctl, TEXT)
    done = specctl("logs", "@last", "-n", "1")
    assert done.out == "line 100 even\n" and f"@last is {run_id}" in done.err


@pytest.mark.parametrize("got_to", ["no log", "an empty log", "a header"])
def test_a_run_whose_supervisor_was_gone_before_it_began_has_no_lines(specctl: Specctl, got_to: str) -> None:
    run_id = specctl.launch("--", "no-such-program").json["run_id"]
    folder = specctl.run_dir(run_id)
    log = folder / f"{run_id}.a1.log"
    for path in (folder / "exit.json", folder / "supervisor.json", *([log] if got_to == "no log" else [])):
        path.unlink()
    if got_to == "an empty log":
        os.truncate(log, 0)
    assert specctl("logs", run_id).code == 1
    claimed_at = time.time() + 3600  # just now, however long the command takes
    os.utime(folder / "claim", (claimed_at, claimed_at))
    assert specctl("logs", run_id, "-f").code == 3, "its log may come yet"
    os.utime(folder / "claim", (1, 1))
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "created_at": record["created_at"] - 60}))
    for words in (["logs", run_id], ["logs", run_id, "-f"]):
        done = specctl(*words)
        assert done.out == "" and done.code == 1 and "NEVER_STARTED" in done.err and "deleted" not in done.err
    log.write_text("# specctl\na line that nobody can say the origin of\n")
    assert specctl("logs", run_id).code == 3
