"""`requirements:` makes one environment for each list, and a program without them gets nothing prepared."""

from __future__ import annotations

import json

from tests.driver import Specctl

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
