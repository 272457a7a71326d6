"""docs/first-run.md is typed line by line against a real node and container, and printed is what the page says.

Its ```console blocks hold commands (`$ ...`) and their output, stdout and stderr as a terminal shows them. Compared is
the shape: run ids, hashes, times and figures are any; `...` is anything in a line, or any lines; a line `^C` is Ctrl-C,
typed once what stands before it was printed. A comment before a block says that it is no test's to run, or names the
file that it is.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.driver import Specctl, as_from_a_terminal
from tests.lab.lab import Lab
from trainer.config import load_config

PAGE = (Path(__file__).parents[2] / "docs" / "first-run.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:<!-- (not in the lab|file): (.*?) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NEWS = re.compile(r" *N s [·-] |waiting N of N s, ")
"""What a launch or a stop is busy with depends on the moment."""
GPU_FILES = "for name in 0 ctl -uvm; do ln -s null /dev/nvidia$name; done"


@dataclass
class Command:
    typed: str
    printed: list[str] = field(default_factory=list)


def commands(text: str) -> list[Command]:
    found: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        else:
            found[-1].printed.append(line)
    return found


def shape(line: str) -> str:
    """The line with everything that differs from one time to the next made the same."""
    line = re.sub(r"\d{8}-\d{6}-([a-z0-9-]+)-[0-9a-f]{4}\b", r"RUN-\1", line)
    line = re.sub(r"\b(?=\w*\d)[0-9a-f]{8,64}\b", "HASH", line)
    line = re.sub(r"\d\d:\d\d:\d\d", "TIME", line)
    line = re.sub(r"\d+(?:[,.]\d+)*", "N", line)
    line = re.sub(r"N ([KMGT]iB|B)\b", "SIZE", line)
    return re.sub(r"[ ─]+", lambda run: run[0][0], line).rstrip()


def shapes(lines: list[str]) -> list[str]:
    return [one for one in map(shape, lines) if not NEWS.match(one)]


def differs(command: Command, output: list[str]) -> str | None:
    """How the output differs in shape from what the page says; None when it does not."""
    expected = [line for line in shapes(command.printed) if line != "^C"]
    pattern = ""
    for line in expected:
        pattern += r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
    got = shapes(output)
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in got)):
        return None
    return "\n".join([f"$ {command.typed}", *difflib.unified_diff(expected, got, "the page", "printed", lineterm="")])


def test_a_changed_word_or_line_is_noticed_and_another_figure_is_not() -> None:
    page = Command("x", ["  0.1 s  · busy", "RUNNING  20261129-172225-a-63e9 on gpu1: step 3", "...", "  pid 22 ..."])
    same = ["RUNNING  20270101-000000-a-0f0f on gpu1: step 4,000", "what", "ever", "  pid 7 (x)"]
    assert differs(page, same) is None and differs(page, ["  9 s  · anything", *same]) is None
    assert differs(page, [same[0].replace("on", "of"), *same[1:]]) and differs(page, same[:-1])
    assert differs(page, [*same, "more"]) and differs(page, [same[0].replace("-a-", "-b-"), *same[1:]])


@pytest.fixture
def laptop(lab: Lab) -> Iterator[Specctl]:
    """A laptop from which `ssh pve` works, and container 200 on that node, after the page's first part: device files of
    a GPU are there and open. Nothing that the test runs computes on them."""
    lab.container(200)
    lab.inside(200, ["sh", "-c", f"echo '{GPU_FILES}; exec /usr/bin/sleep infinity' > /root/init"], check=True)
    lab.stop(200)
    lab.container(200, hostname="gpu1", entrypoint="/usr/bin/tini -s -- /bin/sh /root/init")
    driver = Specctl(SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    del driver.environ["SPECCTL_INVENTORY"]
    programs = driver.home / "bin"
    programs.mkdir()
    for name, argv in (("specctl", f"{sys.executable} -m orchestrator"), ("ssh", f"/usr/bin/ssh -F {lab.ssh_config}")):
        (programs / name).write_text(f'#!/bin/sh\nexec {argv} "$@"\n')
        (programs / name).chmod(0o755)
    driver.environ["PATH"] = f"{programs}:{driver.environ['PATH']}"
    driver.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    yield driver
    lab.stop(200)
    lab.undefine(200)
    driver.close()


def type_in(laptop: Specctl, command: Command) -> list[str]:
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command.typed}"], cwd=laptop.project, env=laptop.environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=as_from_a_terminal,
    )  # fmt: skip
    assert process.stdout is not None
    output = []
    if "^C" in command.printed:
        output = [process.stdout.readline().rstrip("\n") for _ in range(command.printed.index("^C"))]
        process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    return [*output, *rest.splitlines()]


def test_the_page_is_typed_as_it_stands_and_prints_what_it_says(laptop: Specctl) -> None:
    ran = 0
    for kind, what, language, text in BLOCK.findall(PAGE):
        if kind == "file":
            (laptop.project / what).write_text(text)
        elif language == "console" and not kind:
            for command in commands(text):
                difference = differs(command, type_in(laptop, command))
                assert difference is None, difference
                ran += 1
    assert ran >= 20
    load_config(str(laptop.project / "train.yaml"))


def test_what_the_lab_cannot_have_is_little_and_no_command_of_specctl_but_two() -> None:
    left_out = [command.typed for kind, _, language, text in BLOCK.findall(PAGE) if kind == "not in the lab"
                for command in commands(text) if language == "console"]  # fmt: skip
    assert [line for line in left_out if line.startswith("specctl")] == [
        "specctl push gpu1 ~/.cache/specctl/models/SmolLM2-135M-Instruct /data/SmolLM2-135M-Instruct",
        "specctl launch gpu1 --config train.yaml",
    ]
