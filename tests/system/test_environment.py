"""`requirements:` makes one environment for each list, and a program without them gets nothing prepared."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import wheelhouse
from orchestrator.errors import BundleError
from orchestrator.inventory import Target
from orchestrator.remote import Agent
from orchestrator.transport import LocalTransport
from tests.driver import Specctl, poll_until
from tests.wheels import make_wheel

PROGRAM = "import sys, small; print('step=1 tok/s=1', sys.prefix, small.__file__)"


def small_package(specctl: Specctl) -> str:
    """A package that pip can install without any index."""
    root = specctl.home / "small-1.0"
    root.mkdir()
    (root / "small.py").write_text("")
    setup = "from setuptools import setup\nsetup(name='small', version='1.0', py_modules=['small'])\n"
    (root / "setup.py").write_text(setup)
    return str(root)


def test_requirements_are_installed_once_in_an_environment_named_by_them(specctl: Specctl) -> None:
    (specctl.project / "run.yaml").write_text(f"requirements: ['{small_package(specctl)}']\n")
    done = specctl.launch("--config", "run.yaml", "--", "python", "-c", PROGRAM)
    assert done.code == 0, done.err
    assert "environment:" in done.err
    [env] = [path for path in (specctl.workdir / "envs").iterdir() if path.is_dir()]
    assert str(env) in specctl("logs", done.json["run_id"]).out
    assert "Successfully installed" not in done.err, "without a terminal only the commands are shown"
    again = specctl.launch("--config", "run.yaml", "--", "python", "-c", PROGRAM)
    assert again.code == 0 and "pip install" not in again.err
    record = json.loads((specctl.run_dir(again.json["run_id"]) / "run.json").read_text())
    assert record["spec"]["env_hash"] == env.name


def test_a_requirement_that_cannot_be_had_stops_the_launch_with_pips_own_words(specctl: Specctl) -> None:
    (specctl.project / "run.yaml").write_text("requirements: ['/nowhere/to/be/found']\n")
    done = specctl.launch("--config", "run.yaml", "--", "true")
    assert done.code == 1 and done.json["state"] == "NEVER_STARTED"
    assert "/nowhere/to/be/found" in done.json["error"]["message"]
    assert specctl.status("@last")["state"] == "NEVER_STARTED", "a failed start leaves a record that says why"


def test_patterns_teach_another_way_to_print_steps(specctl: Specctl) -> None:
    (specctl.project / "run.yaml").write_text("patterns: {step: 'round (\\d+) of', tok_s: '(\\d+) words a second'}\n")
    program = "import time\nfor n in range(1, 100): print(f'round {n} of 100, {n + 50} words a second'); time.sleep(.1)"
    done = specctl.launch("--config", "run.yaml", "--", "python3", "-c", program)
    assert done.code == 0 and done.json["tok_s"] > 50
    (specctl.project / "run.yaml").write_text("patterns: {step: '('}\n")
    done = specctl("launch", "local", "--config", "run.yaml", "--", "true")
    assert done.code == 2 and "step" in done.err


def test_a_broken_configuration_is_one_line_with_file_and_line(specctl: Specctl) -> None:
    (specctl.project / "run.yaml").write_text("steps: 12\nrequirements: torch\n")
    done = specctl("launch", "local", "--config", "run.yaml")
    assert done.code == 2 and "run.yaml:2" in done.err
    assert specctl("launch", "local", "--config", "missing.yaml").code == 2
    assert specctl("launch", "local").code == 2
    assert specctl("launch", "nowhere", "--", "true").code == 4


def test_a_wheelhouse_is_part_of_what_names_the_environment(specctl: Specctl) -> None:
    (specctl.project / "run.yaml").write_text("requirements: [small]\n")
    house = specctl.project / "wheels"
    words = ("launch", "local", "--plan", "--config", "run.yaml", "--wheelhouse")
    named = set()
    for text in ("", "changed = True"):
        make_wheel(house, "small", text=text)
        done = specctl(*words, "wheels", "--", "true")
        assert done.code == 0 and "out of wheels alone (1 file, " in done.out
        assert (
            "small-1.0" not in done.out and "wheels/small" not in specctl(*words, "wheels", "--json", "--", "true").out
        )
        named |= set(re.findall(r"env ([0-9a-f]{16}),", done.out))
    moved = house.rename(specctl.project / "moved")
    named |= set(re.findall(r"env ([0-9a-f]{16}),", specctl(*words, moved.name, "--", "true").out))
    assert len(named) == 2, "another content is another environment, another folder is not"


def test_what_is_no_wheelhouse_or_would_not_be_used_is_refused(specctl: Specctl) -> None:
    (specctl.project / "empty").mkdir()
    (specctl.project / "run.yaml").write_text("requirements: [small]\n")
    for folder, said in (("nowhere", "No such file"), ("empty", "no wheels"), ("run.yaml", "Not a directory")):
        done = specctl("launch", "local", "--config", "run.yaml", "--wheelhouse", folder, "--", "true")
        assert done.code == 2 and f"--wheelhouse {folder}" in done.err and said in done.err
    make_wheel(specctl.project / "wheels", "small")
    done = specctl("launch", "local", "--wheelhouse", "wheels", "--", "true")
    assert done.code == 2 and "requirements:" in done.err


def test_an_index_that_cannot_be_reached_is_met_with_the_word_for_a_wheelhouse(specctl: Specctl) -> None:
    (specctl.project / "run.yaml").write_text("requirements: [small]\n")
    unreachable = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    done = specctl.launch("--config", "run.yaml", "--", "true", PIP_FIND_LINKS="", **unreachable)
    said = done.json["error"]["message"]
    assert done.code == 1 and "no package index can be reached" in said and "--wheelhouse wheels" in said
    assert "pip download -d wheels" in said and "pip small" in said
    assert not [path for path in (specctl.workdir / "envs").iterdir() if path.is_dir()], "nothing half-made is left"


def test_a_wheelhouse_that_was_cut_off_goes_on_with_the_files_that_are_not_there(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_wheel(tmp_path / "wheels", name, text="#" * 300_000)
    house = wheelhouse.collect(tmp_path / "wheels")
    agent = Agent(Target(name="here", workdir=str(tmp_path / "w")), LocalTransport("here"))
    agent.call("put", bundle="none", ask=True)

    def missing() -> list[str]:
        with agent.stream("wheels", deadline_s=60, wheels=house.listing(), ask=True) as frames:
            return list(next(frame for frame in frames if frame.get("final"))["missing_wheels"])

    def send(part: slice) -> None:
        payload = b"".join(wheelhouse.tar(house.wheels))[part]
        with agent.stream("wheels", payload=[payload], deadline_s=60, wheels=house.listing()) as frames:
            for _ in frames:
                pass

    names = [wheel.name for wheel in house.wheels]
    assert missing() == names
    with pytest.raises(BundleError, match="damaged"):
        send(slice(400_000))  # the first file whole, and a part of the second
    assert missing() == names[1:]
    send(slice(None))
    assert missing() == []
    [path] = (tmp_path / "w" / "wheels").glob("*/second-*")
    path.write_bytes(b"x" * path.stat().st_size)
    assert missing() == names[1:], "what has changed over there is not believed"


def test_two_launches_may_send_the_same_wheels_at_once_and_two_names_have_one_content(tmp_path: Path) -> None:
    one = make_wheel(tmp_path / "wheels", "first", text="#" * 300_000)
    shutil.copy(one, one.with_name("first-1.0-py3-none-any (1).whl"))
    house = wheelhouse.collect(tmp_path / "wheels")
    agent = Agent(Target(name="here", workdir=str(tmp_path / "w")), LocalTransport("here"))
    agent.call("put", bundle="none", ask=True)
    data = b"".join(wheelhouse.tar(house.wheels))

    def asks() -> list[str]:
        answer = agent.call("wheels", wheels=house.listing(), ask=True)
        return list(answer["missing_wheels"])

    def slowly() -> Iterator[bytes]:
        yield data[:200_000]
        poll_until(lambda: list((tmp_path / "w" / "wheels").rglob("*.tmp")), what="the first file to arrive in part")
        assert asks() == [wheel.name for wheel in house.wheels], "another launch looks meanwhile"
        yield data[200_000:]

    with agent.stream("wheels", payload=slowly(), deadline_s=60, wheels=house.listing()) as frames:
        assert list(frames)[-1]["final"]
    assert asks() == []
    assert sorted(path.name for path in (tmp_path / "w" / "wheels").glob("*/*")) == [w.name for w in house.wheels]
    assert not list((tmp_path / "w" / "wheels").rglob("*.tmp"))
