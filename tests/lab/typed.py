"""Pages of docs/ are typed line by line against a real node and container, and printed is what the page says.

Their ```console blocks hold commands (`$ ...`) and their output, stdout and stderr as a terminal shows them. Compared
is the shape: run ids, hashes, times and figures are any; `...` is anything in a line, or any lines; a line `^C` is
Ctrl-C, typed once what stands before it was printed. A comment before a block says that it is no test's to run, or
names the file that it is.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.driver import Specctl, as_from_a_terminal
from tests.lab.lab import Lab

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?:<!-- (not in the lab|file): (.*?) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NEWS = re.compile(r" *N s [·-] |waiting N of N s, ")
"""What a launch or a stop is busy with depends on the moment."""


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


def laptop_of(lab: Lab) -> Specctl:
    """A laptop from which `ssh pve` works, with `specctl` on its PATH and no hosts.yaml yet."""
    driver = Specctl(SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    del driver.environ["SPECCTL_INVENTORY"]
    programs = driver.home / "bin"
    programs.mkdir()
    for name, argv in (("specctl", f"{sys.executable} -m orchestrator"), ("ssh", f"/usr/bin/ssh -F {lab.ssh_config}")):
        (programs / name).write_text(f'#!/bin/sh\nexec {argv} "$@"\n')
        (programs / name).chmod(0o755)
    driver.environ["PATH"] = f"{programs}:{driver.environ['PATH']}"
    driver.environ["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    return driver


def type_page(laptop: Specctl, page: str, *, after: Callable[[Command], object] = lambda command: None) -> int:
    """How many commands of `page` were typed, in its order, each having printed what the page says. `after` is told of
    each."""
    typed = 0
    for kind, what, language, text in BLOCK.findall(page):
        if kind == "file":
            (laptop.project / what).write_text(text)
        elif language == "console" and not kind:
            for command in commands(text):
                difference = differs(command, type_in(laptop, command))
                assert difference is None, difference
                after(command)
                typed += 1
    return typed


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
    rest, _ = process.communicate(timeout=400)
    return [*output, *rest.splitlines()]
