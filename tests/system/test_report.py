"""`specctl report`: what it writes, where it refuses to, and what it says of what could not be seen."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.driver import Specctl, poll_until


def launched(specctl: Specctl, *words: str) -> str:
    specctl.program("recorded.py")
    run_id = specctl.launch("--until", "process", "--", sys.executable, "recorded.py", *words).json["run_id"]
    poll_until(lambda: specctl.status(run_id)["state"] in ("SUCCEEDED", "FAILED"))
    return str(run_id)


@pytest.fixture(scope="module")
def runs() -> Iterator[tuple[Specctl, str, str]]:
    """(specctl, a run that succeeded, a run that failed); another target cannot be reached."""
    specctl = Specctl()
    good = launched(specctl, "5000")
    (specctl.project / "changed.txt").write_text("new\n")
    bad = launched(specctl, "60", "fails")
    specctl.inventory.write_text(specctl.inventory.read_text() + "  away: {ssh: 'root@127.0.0.1:1'}\n")
    yield specctl, good, bad
    specctl.close()


class Tags(HTMLParser):
    """Every element with its attributes, and all text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._in = tag if tag in ("script", "style") else None
        self.text += " " if tag in ("dt", "dd", "td", "th", "li", "p") else ""

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        self.text += "" if self._in else data


def test_a_page_names_every_run_with_its_state_evidence_and_when_it_was_seen(runs: tuple[Specctl, str, str]) -> None:
    specctl, good, bad = runs
    done = specctl("report", good, bad, "-o", "two.html")
    assert done.code == 0 and re.fullmatch(r"two\.html  \d+(\.\d)? KiB\n", done.out), done.err
    page = Tags((specctl.project / "two.html").read_text())
    said = " ".join(page.text.split())
    assert good in said and "SUCCEEDED exit code 0" in said and "FAILED exit code 1" in said
    assert re.search(r"seen at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, by the clock of", said)
    assert "A did not fail, B did: ValueError: planted" in said and "changed.txt added, +1 -0" in said
    assert re.search(r"loss \d+ to \d+ +(\d+\.\d{4} ± \d+\.\d{4} +){2}", said), "with spread, as compare has it"
    assert "raise ValueError" in page.text and "dead: ValueError: planted" in said
    assert re.search(r"stepping from \d s on, for \d+ \w+: busy 60%, waiting for input 30%", said)


def test_a_page_asks_nothing_of_the_network_and_lets_only_its_own_script_run(runs: tuple[Specctl, str, str]) -> None:
    specctl, good, _ = runs
    page = Tags(specctl("report", good, "-o", "-").out)
    assert [attributes["href"] for tag, attributes in page.tags if tag == "link"] == ["data:,"]
    assert not [tag for tag, attributes in page.tags if "src" in attributes or "style" in attributes]
    assert all(attributes["href"].startswith("#") for tag, attributes in page.tags if tag == "a")  # type: ignore[union-attr]
    (policy,) = (found["content"] for _, found in page.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_its_own_page_is_replaced_and_no_other_file_is(runs: tuple[Specctl, str, str]) -> None:
    specctl, good, _ = runs
    mine = specctl.project / "mine.html"
    for _ in range(2):
        assert specctl("report", good, "-o", "mine.html").code == 0
    mine.write_text("<!doctype html>somebody's own")
    refused = specctl("report", good, "-o", "mine.html")
    assert refused.code == 2 and "mine.html is there already, and is no report" in refused.err
    assert mine.read_text().endswith("own") and "--force" in refused.err
    assert specctl("report", good, "-o", "mine.html", "--force").code == 0 and good in mine.read_text()
    assert "is a directory" in specctl("report", good, "-o", ".").err
    assert "is no file" in specctl("report", good, "-o", "/dev/null").err
    assert "there is no such folder" in specctl("report", good, "-o", "nowhere/x.html").err
    assert not list(specctl.project.glob(".*.tmp"))


def test_a_page_on_stdout_is_the_page_alone(runs: tuple[Specctl, str, str]) -> None:
    specctl, good, _ = runs
    done = specctl("report", good, "-m", "loss,los", "-o", "-")
    assert done.code == 0 and done.out.startswith("<!doctype html>") and done.out.rstrip().endswith("</html>")
    assert "no los was written down; there is: loss, tok_s\n" in done.err
    assert specctl("report", good, "-o", "-", "--json").code == 2


def test_a_run_that_cannot_be_seen_is_said_to_be_unknown_and_the_others_are_shown(
    runs: tuple[Specctl, str, str],
) -> None:
    specctl, good, _ = runs
    done = specctl("report", good, "no-such-run", "-o", "part.html", "--json")
    assert done.code == 3 and done.json["runs"][0]["run_id"] == good
    assert [one["run"] for one in done.json["unreachable"]] == ["no-such-run"]
    assert done.json["bytes"] == (specctl.project / "part.html").stat().st_size
    said = " ".join(Tags((specctl.project / "part.html").read_text()).text.split())
    assert "no-such-run UNREACHABLE" in said and "Nothing is known of this run: it may be alive and well." in said
    none = specctl("report", "no-such-run", "-o", "none.html")
    assert none.code == 3 and not (specctl.project / "none.html").exists()


def test_a_damaged_run_is_reported_as_far_as_it_can_be(runs: tuple[Specctl, str, str]) -> None:
    specctl, _, bad = runs
    record = specctl.run_dir(bad) / "run.json"
    whole = record.read_bytes()
    record.write_text("{")
    try:
        done = specctl("report", bad)
    finally:
        record.write_bytes(whole)
    assert done.code == 3 and "run directory is damaged" in done.err
    said = " ".join(Tags((specctl.project / "report.html").read_text()).text.split())
    assert "LOST" in said and said.count("not seen: ") >= 3 and "stepping from" not in said


def test_a_run_that_never_stepped_has_empty_curves_and_says_so(runs: tuple[Specctl, str, str]) -> None:
    specctl, _, _ = runs
    run_id = specctl.launch("--until", "process", "--", "sh", "-c", "exit 3").json["run_id"]
    poll_until(lambda: specctl.status(run_id)["state"] == "FAILED")
    assert specctl("report", run_id).code == 0
    said = Tags((specctl.project / "report.html").read_text()).text
    assert f"{run_id} has written down none of loss, tok/s, learning rate, gradient norm, mfu." in said
    assert f"No exception was found in the logs of {run_id}." in said


def test_a_page_of_a_long_run_is_no_larger_than_it_has_to_be(runs: tuple[Specctl, str, str]) -> None:
    specctl, good, _ = runs
    assert specctl("report", good, "-o", "long.html").code == 0
    page = (specctl.project / "long.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    loss = data["figures"][0]["series"][0]
    assert loss["step"][-1] > 4900 and loss["width"] == 8 and 500 < len(loss["step"]) <= 1024
    # The outlier of one step in eight is still there, and as one of the step that it is of.
    assert max(loss["high"]) == 50.0 and max(loss["mean"]) < 20
    assert loss["high"][next(n for n, step in enumerate(loss["step"]) if step > 700) - 1] == 50.0


def test_a_report_without_its_library_says_how_to_get_it(runs: tuple[Specctl, str, str], tmp_path: Path) -> None:
    specctl, good, _ = runs
    (tmp_path / "jinja2.py").write_text("raise ImportError")
    done = specctl("report", good, PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}")
    assert done.code == 2 and "a report needs jinja2" in done.err and "pip install jinja2" in done.err
