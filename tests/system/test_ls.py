"""`specctl ls`: the history of runs, and what only this machine remembers of it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator

import pytest

from tests.driver import Specctl

DAY_S = 86400.0
FAR = "20260101-101010-far-aaaa"


@pytest.fixture(scope="module")
def specctl() -> Iterator[Specctl]:
    """Four runs: one lives, one failed, one ended nine days ago, one was removed; and one on a target that is away."""
    driver = Specctl()
    driver.inventory.write_text(
        f"targets:\n  local: {{workdir: {driver.workdir}}}\n  away: {{ssh: 'root@127.0.0.1:1'}}\n"
        "groups: {all: [local, away]}\n"
    )
    for name, words in (
        ("old", ["true"]), ("removed", ["true"]), ("failed", ["sh", "-c", "echo step=7 loss=0.25; exit 3"]),
        ("alive", [sys.executable, driver.program("steps.py")]),
    ):  # fmt: skip
        driver.launch("--name", name, "--note", f"the {name} one", "--until", "process", "--", *words)
    runs = {path.name.split("-")[2]: path for path in (driver.workdir / "runs").iterdir()}
    shutil.rmtree(runs["removed"])
    long_ago = time.time() - 9 * DAY_S
    for file, key in (("run.json", "created_at"), ("exit.json", "at")):
        value = json.loads((runs["old"] / file).read_text())
        (runs["old"] / file).write_text(json.dumps({**value, key: long_ago}))
    for path in [*runs["old"].iterdir(), runs["old"]]:
        os.utime(path, (long_ago, long_ago))
    with (driver.home / "state/specctl/launches.jsonl").open("a") as file:
        file.write("not a line of JSON\n")
        file.write(json.dumps({"run_id": FAR, "target": "away", "at": time.time() - 3 * DAY_S}) + "\n")
    yield driver
    driver.close()


def names(specctl: Specctl, *words: str, code: int) -> list[str]:
    done = specctl("ls", "--json", *words)
    assert done.code == code, done.err
    return [row["run_id"].split("-")[2] for row in done.json["runs"]]


def test_all_runs_are_listed_newest_first_with_what_is_known_of_each(specctl: Specctl) -> None:
    done = specctl("ls", "--json")
    assert done.code == 3, "there may be more on the target that is away"
    rows = {row["run_id"].split("-")[2]: row for row in done.json["runs"]}
    assert list(rows) == ["alive", "failed", "removed", "far", "old"]
    assert {name: row["state"] for name, row in rows.items()} == {
        "alive": "RUNNING", "failed": "FAILED", "removed": "GONE", "far": "UNREACHABLE", "old": "SUCCEEDED",
    }  # fmt: skip
    assert rows["failed"]["seen"]["step"] == 7 and rows["failed"]["seen"]["loss"] == 0.25
    assert rows["removed"]["seen"] is None and "no longer there" in rows["removed"]["why"]
    assert "refused" in rows["far"]["why"]
    assert rows["alive"]["took_s"] > 0 and abs(rows["old"]["took_s"]) < 60
    [silent] = done.json["unreachable"]
    assert silent["name"] == "away" and silent["hint"]


FILTERS = [
    (["-t", "local"], ["alive", "failed", "removed", "old"], 0),
    (["-t", "all", "-s", "unreachable"], ["far"], 3),
    (["-t", "local", "--state", "failed", "--state", "succeeded"], ["failed", "old"], 0),
    (["-t", "local", "--name", "*-fail*"], ["failed"], 0),
    (["-t", "local", "--name", "liv"], ["alive"], 0),
    (["-t", "local", "--since", "7d"], ["alive", "failed", "removed"], 0),
    (["-t", "local", "--since", "2w", "-n", "3"], ["alive", "failed", "removed"], 0),
    (["-t", "local", "--owner", "nobody@nowhere"], [], 1),
    (["-t", "local", "--state", "lost"], [], 1),
]


def test_filters_narrow(specctl: Specctl) -> None:
    for words, expected, code in FILTERS:  # one test: what it looks at takes longer to make than to list
        assert names(specctl, *words, code=code) == expected, words


def test_the_page_has_a_line_a_run_and_says_what_it_leaves_out(specctl: Specctl) -> None:
    done = specctl("ls", "-t", "local", "-n", "3")
    head, _, *rows, last = done.out.splitlines()
    assert head.split() == ["run", "target", "state", "started", "took", "step", "loss", "note"]
    assert [row.split()[2] for row in rows] == ["RUNNING", "FAILED", "GONE"]
    assert "exit code 3 after step 7 · the failed one" in rows[1] and "today" in rows[1]
    assert last == "1 older: specctl ls -n 0"
    assert specctl("ls", "-t", "local", "--name", "zzz").out == "No run fits.\n"


def test_a_filter_that_means_nothing_is_refused(specctl: Specctl) -> None:
    for words, code, said in (
        (["--since", "tomorrow"], 2, "is no time span; write 90m, 12h, 7d or 2w"),
        (["--state", "faild"], 2, "is no state of a run"),
        (["-t", "loacl"], 4, "did you mean 'local'?"),
        (["-n", "-1"], 2, "-n"),
    ):
        done = specctl("ls", *words)
        assert done.code == code and said in done.err and done.out == "", words
