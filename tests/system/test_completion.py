"""TAB, in real shells: commands, targets and runs, quickly, and without a word to any target."""

from __future__ import annotations

import inspect
import json
import os
import resource
import shutil
import subprocess
import sys
import typing
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from orchestrator.commands import COMMANDS, FILE
from tests.driver import Specctl
from tests.terminal import Typed

RUNS = ["20261128-101010-sweep-lr-aaaa", "20261129-101010-smollm2-bbbb", "20261129-111111-eval-cccc"]
HOSTS = """
targets:
  gpu1: {ssh: 'root@192.0.2.1', vmid: 101}
  gpu2: {ssh: 'root@192.0.2.1', vmid: 102}
  local: {workdir: WORKDIR}
  $(touch broken): {}
groups: {lab: [gpu1, gpu2]}
"""


@pytest.fixture
def offering(specctl: Specctl) -> Specctl:
    """A user who has launched RUNS, beside whose targets nothing answers; with a `specctl` in PATH."""
    specctl.inventory.write_text(HOSTS.replace("WORKDIR", str(specctl.workdir)))
    state = specctl.home / "state/specctl"
    state.mkdir(parents=True)
    (state / "launches.jsonl").write_text(
        "".join(json.dumps({"run_id": run_id, "target": "gpu1"}) + "\n" for run_id in RUNS)
    )
    (specctl.workdir / "runs/20261129-121212-here-dddd").mkdir(parents=True)
    program = specctl.home / "bin/specctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m orchestrator "$@"\n')
    program.chmod(0o755)
    specctl.environ["PATH"] = f"{program.parent}:{specctl.environ['PATH']}"
    return specctl


@cache
def source() -> str:
    """The script that a bash user has in a start-up file."""
    environ = {**os.environ, "_SPECCTL_COMPLETE": "source_bash"}
    argv = [sys.executable, "-m", "orchestrator"]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout


def bash(specctl: Specctl, line: str) -> list[str]:
    """What bash offers at the end of `line`, by that script."""
    words = line.split(" ")
    script = (
        f"{source()}\n"
        f"COMP_WORDS=({' '.join(map(repr, words))}) COMP_CWORD={len(words) - 1}\n"
        'complete -p specctl >/dev/null && _specctl_completion specctl; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=specctl.environ, cwd=specctl.project, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("specctl la", ["launch"]),
        ("specctl launch ", ["gpu1", "gpu2", "local"]),
        ("specctl targets l", ["local", "lab"]),
        ("specctl show 20261129-1", ["20261129-121212-here-dddd", RUNS[2], RUNS[1]]),
        ("specctl logs smollm2", [RUNS[1]]),
        ("specctl stop @", ["@last"]),
        ("specctl stop @ la", ["last"]),
        ("specctl status gpu1 l", ["local", "lab"]),
        ("specctl pull smollm2 ch", []),
        ("specctl logs --json 20261128", [RUNS[0]]),
        ("specctl schema co", ["config", "command", "compare"]),
        ("specctl ls --target g", ["gpu1", "gpu2"]),
        ("specctl ls --state un", ["unreachable"]),
        ("specctl logs --foll", ["--follow"]),
    ],
)
def test_bash_is_offered_what_fits_the_place(offering: Specctl, line: str, offered: list[str]) -> None:
    assert bash(offering, line) == offered


@pytest.mark.parametrize(
    ("shell", "start"),
    [
        (["bash", "--norc", "-i"], 'eval "$(_SPECCTL_COMPLETE=source_bash specctl)"'),
        (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -D; eval "$(_SPECCTL_COMPLETE=source_zsh specctl)"'),
    ],
    ids=["bash", "zsh"],
)
def test_a_person_presses_tab(offering: Specctl, shell: list[str], start: str) -> None:
    program = shutil.which(shell[0])
    if program is None:
        pytest.skip(f"no {shell[0]} here")
    environ = {**offering.environ, "TERM": "xterm", "PS1": "PROMPT ", "HISTFILE": "/dev/null"}
    with Typed([program, *shell[1:]], cwd=offering.project, environ=environ, columns=120) as terminal:
        terminal.type(f"{start}; echo rea''dy\r")
        terminal.until("ready")
        terminal.type("specctl show 20261128-1\t")
        terminal.until(f"specctl show {RUNS[0]}")
        terminal.type("; specctl launch gp\t")
        terminal.until("specctl launch gpu")
        terminal.type("\t\t")
        terminal.until("gpu2")
        assert "rror" not in terminal.text
    assert not (offering.project / "broken").exists(), "a name in hosts.yaml is no command of the shell's"


def test_it_is_quick(offering: Specctl) -> None:
    environ = {
        **offering.environ, "_SPECCTL_COMPLETE": "complete_bash", "COMP_WORDS": "specctl\nshow\n", "COMP_CWORD": "2",
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchestrator"], env=environ, cwd=offering.project,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(done.stdout.split()) == 5
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"typer", "pydantic", "rich", "paramiko", "orchestrator.fleet", "orchestrator.cli"}
    # Not the clock on the wall: other tests share this machine. Half a second is the time of the long way round.
    assert after.ru_utime - before.ru_utime < 0.4


def test_every_run_and_target_of_the_command_line_is_completed() -> None:
    for name, places in COMMANDS.items():
        function = getattr(import_module(f"orchestrator.cli.{name}"), name)
        found: list[str] = []
        for hint in typing.get_type_hints(function, include_extras=True).values():
            for info in getattr(hint, "__metadata__", ()):
                metavar: Any = getattr(info, "metavar", None)
                if metavar in ("RUN", "A", "B", "TARGET", "RUN|TARGET", "T"):
                    assert info.autocompletion is not None, f"{name} {metavar}"
                    found += [metavar] if type(info).__name__ == "ArgumentInfo" else []
        named = [place for place in places if place != FILE]  # those are typed by the parser itself
        assert bool(found) == bool(named), f"{name}: commands.py and its own arguments do not agree"
        assert inspect.getdoc(function)


def test_what_cannot_be_read_offers_nothing_and_says_nothing(offering: Specctl) -> None:
    offering.inventory.write_text("targets: [")
    assert bash(offering, "specctl launch ") == []
    offering.inventory.unlink()
    assert bash(offering, "specctl launch ") == ["local"]
    (offering.project / "hosts.yaml").write_text("targets: {here: {}}")
    del offering.environ["SPECCTL_INVENTORY"]
    assert bash(offering, "specctl launch ") == ["here"]
