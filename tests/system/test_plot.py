"""`specctl plot`: figures of runs over one another, in a terminal and as a picture; gaps stay gaps."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator

import pytest

from tests.driver import Specctl, poll_until

PROGRAM = """
import json, os, sys
record = {"source": "trainer", "attempt": 1, "nonce": os.environ["SPECCTL_NONCE"]}
print("step=1 loss=1 tok/s=1", flush=True)
with open(os.environ["SPECCTL_RUN_DIR"] + "/metrics.jsonl", "w") as file:
    for step in [*range(1, 41), *range(400, int(sys.argv[1]))]:
        for worker, loss in ((None, 4.0), ("drafter-0", 3.0), ("drafter-1", 5.0)):
            row = {**record, "time": 1e9 + step, "step": step, "worker": worker, "loss": loss + step / 1e3, "own": step}
            file.write(json.dumps(row) + "\\n")
    file.write(json.dumps({**record, "nonce": "another", "step": 9999, "worker": None, "loss": 77.0}) + "\\n")
    file.write("{ cut")
"""


@pytest.fixture(scope="module")
def runs() -> Iterator[tuple[Specctl, list[str]]]:
    specctl, ids = Specctl(), []
    (specctl.project / "writes.py").write_text(PROGRAM)
    for last in ("440", "3000"):
        done = specctl.launch("--until", "process", "--", sys.executable, "writes.py", last)
        ids.append(done.json["run_id"])
        poll_until(lambda: specctl.status(ids[-1])["state"] == "SUCCEEDED")
    yield specctl, ids
    specctl.close()


def test_runs_are_drawn_over_one_another_with_gaps_where_nothing_was_written(runs: tuple[Specctl, list[str]]) -> None:
    specctl, ids = runs
    done = specctl("plot", *ids, "-m", "loss", "--json")
    assert done.code == 0 and [run["run_id"] for run in done.json["runs"]] == ids and done.json["by"] == "step"
    short, long = done.json["lines"]["loss"]
    assert [line["label"] for line in (short, long)] == ids
    at = short["x"].index(None)
    assert short["x"][at - 1 : at + 2] == [40, None, 400] and short["y"][at] is None and len(short["x"]) == 81
    assert short["y"][:2] == [4.001, 4.002] and short["spread"][0] is None
    # 2,640 steps do not fit into 512 points: each is the mean of eight, with its spread.
    assert len(long["x"]) < 520 and None in long["x"] and long["spread"][-2] > 0
    assert 77.0 not in short["y"], "a line of another attempt is none of this run"
    text = specctl("plot", *ids, "--metric", "loss, own, lr")
    assert "no lr was written down; there is: loss, own\n" in text.err
    assert max(map(len, text.out.splitlines())) == 100
    assert re.findall(r"^[ \d,]+$", text.out, re.M)[0].split() == ["1", "748", "1,496", "2,244", "2,992"]
    assert text.code == 0 and text.out.count("┌") == 2 and all(run in text.out for run in ids)
    assert "\x1b" not in text.out and f"{ids[0]} on local: SUCCEEDED" in text.err


def test_workers_have_lines_of_their_own(runs: tuple[Specctl, list[str]]) -> None:
    specctl, (short, _) = runs
    lines = specctl("plot", short, "-m", "loss", "--workers", "--json").json["lines"]["loss"]
    assert [line["label"] for line in lines] == [short, f"{short} drafter-0", f"{short} drafter-1"]
    assert [line["y"][0] for line in lines] == [4.001, 3.001, 5.001]


def test_a_line_that_no_run_means_and_a_figure_that_has_diverged_leave_the_curves_there(
    runs: tuple[Specctl, list[str]],
) -> None:
    specctl, ids = runs
    path = specctl.run_dir(ids[0]) / "metrics.jsonl"
    before = path.read_bytes()
    nonce = json.loads(before.splitlines()[0])["nonce"]
    rows = [f'{{"nonce": "{nonce}", "time": 1e99, "step": {step}, "worker": null, "loss": 9.5}}'
            for step in ("1" + "0" * 30, "-1" + "0" * 400, 2**63, "2e9", "NaN")]  # fmt: skip
    rows.append(f'{{"nonce": "{nonce}", "time": 1, "step": 500, "worker": null, "loss": 1e38, "own": -3e99}}')
    path.write_bytes(b"\n".join([before, *(row.encode() for row in rows), b"\xff\0[" * 9999, b""]))
    try:
        done = specctl("plot", ids[0], "-m", "loss", "--json")
        assert done.code == 0 and done.json["lines"]["loss"][0]["x"][-1] == 500
        drawn = specctl("plot", ids[0], "-m", "loss,own")
        assert drawn.code == 0 and "1e+38" in drawn.out and "-3e+99" in drawn.out and drawn.out.count(" ** ") == 2
        assert specctl("compare", *ids, "--json").code in (0, 1)
    finally:
        path.write_bytes(before)


def test_a_picture_is_written_whole(runs: tuple[Specctl, list[str]]) -> None:
    specctl, ids = runs
    done = specctl("plot", *ids, "-m", "loss,own", "--time", "--png", "out.png")
    data = (specctl.project / "out.png").read_bytes()
    assert done.code == 0 and done.out == "" and "wrote out.png" in done.err
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG") and width > 1000 and height > 800
    assert not list(specctl.project.glob(".out*")), "nothing is left aside"
    bad = specctl("plot", ids[0], "-m", "loss", "--png", "out.docx")
    assert bad.code == 2 and "out.docx cannot be written" in bad.err


def test_a_figure_that_nobody_wrote_is_named_with_those_there_are(runs: tuple[Specctl, list[str]]) -> None:
    specctl, ids = runs
    done = specctl("plot", ids[0], "-m", "los", "--json")
    assert done.code == 4 and json.loads(done.out)["error"]["hint"] == "there is: loss, own"


def test_a_plot_without_its_libraries_says_how_to_get_them(runs: tuple[Specctl, list[str]]) -> None:
    specctl, ids = runs
    (specctl.home / "hidden").mkdir()
    (specctl.home / "hidden" / "plotext.py").write_text("raise ImportError")
    done = specctl("plot", ids[0], "-m", "loss", PYTHONPATH=f"{specctl.home / 'hidden'}:{':'.join(sys.path)}")
    assert done.code == 2 and "a plot needs plotext" in done.err and "pip install plotext" in done.err


def test_what_would_move_the_cursor_or_be_a_formula_is_drawn_as_it_is_written(runs: tuple[Specctl, list[str]]) -> None:
    specctl, ids = runs
    path = specctl.run_dir(ids[0]) / "metrics.jsonl"
    rows = path.read_text().splitlines()[:-2]
    for worker in ("\x1b[2Jcleared", "[bold]two\nlines", "$\\no{formula$", "\ud800"):
        row = {**json.loads(rows[0]), "worker": worker, "loss": 1.0, "\x1b[2J$\\x{$": 2.0}
        rows += [json.dumps({**row, "step": step}) for step in range(3)]
    path.write_text("\n".join([*rows, ""]))
    done = specctl("plot", ids[0], "-m", "loss,\x1b[2J$\\x{$", "--workers")
    assert done.code == 0 and "\\x1b[2Jcleared" in done.out and "\x1b" not in done.out
    drawn = specctl("plot", ids[0], "-m", "loss,\x1b[2J$\\x{$", "--workers", "--png", "odd.png")
    assert drawn.code == 0 and (specctl.project / "odd.png").stat().st_size > 1000


def test_a_run_whose_record_is_cut_is_not_drawn_as_if_its_figures_were_known_to_be_its(
    runs: tuple[Specctl, list[str]],
) -> None:
    specctl, ids = runs
    record = specctl.run_dir(ids[0]) / "run.json"
    before = record.read_bytes()
    record.write_bytes(before[:200])
    try:
        done = specctl("plot", *ids)
    finally:
        record.write_bytes(before)
    assert done.code == 3 and done.out == "" and "its run directory is damaged" in done.err and ids[0] in done.err
