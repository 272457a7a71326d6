"""docs/first-run.md is typed line by line against a real node and container, and printed is what the page says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver import Specctl
from tests.lab.lab import Lab
from tests.lab.typed import BLOCK, DOCS, Command, commands, differs, laptop_of, type_page
from trainer.config import load_config

PAGE = (DOCS / "first-run.md").read_text(encoding="utf-8")
GPU_FILES = "for name in 0 ctl -uvm; do ln -s null /dev/nvidia$name; done"


def test_a_changed_word_or_line_is_noticed_and_another_figure_is_not() -> None:
    page = Command("x", ["  0.1 s  · busy", "RUNNING  20261129-172225-a-63e9 on gpu1: step 3", "...", "  pid 22 ..."])
    same = ["RUNNING  20270101-000000-a-0f0f on gpu1: step 4,000", "what", "ever", "  pid 7 (x)"]
    assert differs(page, same) is None and differs(page, ["  9 s  · anything", *same]) is None
    assert differs(page, [same[0].replace("on", "of"), *same[1:]]) and differs(page, same[:-1])
    assert differs(page, [*same, "more"]) and differs(page, [same[0].replace("-a-", "-b-"), *same[1:]])


@pytest.fixture
def laptop(lab: Lab) -> Iterator[Specctl]:
    """A laptop, and container 200 after the page's first part: device files of a GPU are there and open. Nothing that
    the test runs computes on them."""
    lab.container(200)
    lab.inside(200, ["sh", "-c", f"echo '{GPU_FILES}; exec /usr/bin/sleep infinity' > /root/init"], check=True)
    lab.stop(200)
    lab.container(200, hostname="gpu1", entrypoint="/usr/bin/tini -s -- /bin/sh /root/init")
    driver = laptop_of(lab)
    yield driver
    lab.remove(200)
    driver.close()


def test_the_page_is_typed_as_it_stands_and_prints_what_it_says(laptop: Specctl) -> None:
    assert type_page(laptop, PAGE) >= 20
    load_config(str(laptop.project / "train.yaml"))


def test_what_the_lab_cannot_have_is_little_and_no_command_of_specctl_but_two() -> None:
    left_out = [command.typed for kind, _, language, text in BLOCK.findall(PAGE) if kind == "not in the lab"
                for command in commands(text) if language == "console"]  # fmt: skip
    assert [line for line in left_out if line.startswith("specctl")] == [
        "specctl push gpu1 ~/.cache/specctl/models/SmolLM2-135M-Instruct /data/SmolLM2-135M-Instruct",
        "specctl launch gpu1 --config train.yaml",
    ]
