"""`logs --grep` on logs so large that grep reads their clean parts itself: the same lines, counts and places."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.agent import marks, search_file
from orchestrator.agent.lines import Section
from orchestrator.agent.search import Pattern
from orchestrator.logscan import Cleaner, Scanner
from tests.driver import Specctl, poll_until
from tests.system.test_logs import log_of

PARTS = r"""
import sys
clean = b"".join(b"step=%d loss=2.5 of the whole run, and nothing else\n" % n for n in range(250_000))
dirty = b"".join(b"\rba\x1b[1mr\x1b[0m %d of 5" % n for n in range(5)) + b"\n"
sys.stdout.buffer.write(b"first bar 1\n" + clean + dirty + clean + b"last bar 9")
"""
TEXT = st.lists(
    st.sampled_from(["step=1 loss=2\n", "a step\n", "\n", "x" * 50 + "\n", "\u20ac step\n"]), max_size=40
).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXT, st.integers(1, 300), st.booleans())
def test_pieces_of_a_file_are_searched_as_the_whole_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, piece_bytes: int, invert: bool
) -> None:
    monkeypatch.setattr(search_file, "PIECE_BYTES", piece_bytes)
    path, pattern = tmp_path / "log", Pattern(expression="step", invert=invert)
    path.write_text("header\n" + text + "not asked for: step\n")
    end = 7 + len(text.encode())
    section = Section(str(path), 7)
    found = list(search_file.search_file(pattern, section.fd, 7, end, places=True, beat=lambda: None))
    grep = subprocess.run(
        ["grep", "-a", "-b", *(["-v"] if invert else []), "step"], input=path.read_bytes()[7:end], capture_output=True,
        check=False,
    )  # fmt: skip
    rows = [line.partition(b":") for line in grep.stdout.splitlines(True)]
    assert b"".join(lines.data for lines in found) == b"".join(line for _, _, line in rows)
    assert [at for lines in found for at in lines.offsets or ()] == [int(at) + 7 for at, _, _ in rows]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from([b"step=1\n", b"red \x1b[31m\n", b"bar\r", b"bar\r\n", b"\b\n", b"\xff\n", b"x"]), max_size=12
    ),
    st.sets(st.integers(0, 80)),
)
def test_what_a_mark_calls_clean_is_as_it_is_shown(tmp_path: Path, pieces: list[bytes], cuts: set[int]) -> None:
    data, index, scanner = b"".join(pieces), tmp_path / "idx", Scanner()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    rows = []
    for start, end in pairwise(edges):
        scanner.feed(data[start:end], 1.0)
        clean = "true" if not scanner.dirty else "false"
        rows.append(f'{{"time": 1.5, "offset": {scanner.decided}, "lines": {scanner.lines}, "clean": {clean}}}\n')
        scanner.dirty = False
    index.write_text("".join(rows))
    (tmp_path / "log").write_bytes(data)
    section, shown, at = Section(str(tmp_path / "log"), 0), b"", 0
    for stretch in marks.stretches(str(index), None, 0, 0, len(data)):
        assert stretch.end > at
        part = section.pass_over(stretch.end, stretch.lines) if stretch.clean else None
        if part is not None:
            piece = data[slice(*part)]
            assert piece.count(b"\n") == stretch.lines
            shown += piece
        else:
            shown += b"".join(block.data for block in section.read(stretch.end))
        at = stretch.end
    shown += b"".join(block.data for block in [*section.read(), *section.finish()])
    cleaner = Cleaner()
    assert shown == b"".join(block.data for block in [*cleaner.feed(data), *cleaner.finish()])
    assert section.lines == shown.count(b"\n") + (shown != b"" and not shown.endswith(b"\n"))


def test_a_log_of_clean_and_dirty_parts_is_searched_as_a_whole(specctl: Specctl) -> None:
    run_id = str(specctl.launch("--", sys.executable, "-c", PARTS).json["run_id"])
    poll_until(lambda: specctl.status(run_id)["state"] == "SUCCEEDED")
    index = (specctl.run_dir(run_id) / f"{run_id}.a1.idx").read_text()
    assert '"clean": true' in index and '"clean": false' in index
    pattern, raw = "bar [0-9]|step=77777 ", log_of(specctl, run_id).read_bytes()
    wanted = ["first bar 1", "step=77777", *(f"bar {n} of 5" for n in range(5)), "step=77777", "last bar 9"]
    done = specctl("logs", run_id, "--grep", pattern)
    assert [line.partition(" loss")[0] for line in done.out.splitlines()] == wanted
    assert "9 of 500,008 lines" in done.err
    rows = specctl("logs", run_id, "--grep", pattern, "--json").objects
    assert [row["line"].partition(" loss")[0] for row in rows] == wanted
    for row in rows:
        assert raw[row["offset"] :].startswith((row["line"].encode(), b"ba\x1b["))
    around = specctl("logs", run_id, "--grep", "step=77777 ", "-C", "1").out.splitlines()
    assert [line.partition(" ")[0] for line in around] == ["step=77776", "step=77777", "step=77778"] * 2


def test_status_says_how_far_behind_a_supervisor_is(specctl: Specctl) -> None:
    program = "import os, sys, time\nprint('step=1 tok/s=1', flush=True)\n"
    program += "while not os.path.exists('go'): time.sleep(.02)\n"
    program += "for _ in range(200): sys.stdout.write('x' * 999_999 + '\\n')\n"
    program += "sys.stdout.flush(); open('written', 'w'); time.sleep(1000)"
    run_id = str(specctl.launch("--", sys.executable, "-c", program).json["run_id"])
    supervisor = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())["pid"]
    code = specctl.run_dir(run_id) / "code"
    os.kill(supervisor, signal.SIGSTOP)
    try:
        (code / "go").touch()
        poll_until((code / "written").exists)
        # 190 MiB have been written since, of which this very look reads the first 64.
        assert "; the last 126 MiB of its log are not read yet" in specctl.status(run_id)["why"]
    finally:
        os.kill(supervisor, signal.SIGCONT)
    poll_until(lambda: "not read" not in specctl.status(run_id)["why"])
