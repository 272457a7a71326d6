"""What a command costs before it does anything: told by what it imports, for beside other tests no clock tells much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.inventory import Target
from orchestrator.remote import Agent
from orchestrator.transport.local import LocalTransport
from tests.driver import Specctl
from tests.sshd import LoopbackSshd

PYTHON = sys.executable
HEAVY = {
    "torch", "transformers", "paramiko.transport", "libtmux", "invoke.config", "asyncio", "unittest",
    "importlib.metadata", "zipfile", "email.message", "textual",
}  # fmt: skip
SCANNING = {f"orchestrator.logscan.{name}" for name in ("scanner", "grammar", "reader", "names", "templates")}
PROBE = {
    "orchestrator", "orchestrator.frames", "orchestrator.record", "orchestrator.errors", "orchestrator.ailments",
    *(f"orchestrator.model{name}" for name in ("", ".gpus", ".logs", ".names", ".records", ".verdict", ".wire")),
    "orchestrator.agent",
    *(f"orchestrator.agent{name}" for name in (
        ".main", ".probe", ".clock", ".proc", ".cgroup", ".gpu", ".system", ".records", ".files", ".space", ".ownlog",
        ".merge",
    )),
}  # fmt: skip
"""All that a look at a run needs of specctl; each module more is paid for in every container, at every look."""


NOT_PROBED = ("subprocess", "ctypes", "shutil", "inspect", "ast", "dis")


def imported(specctl: Specctl, *words: str, **environ: str) -> set[str]:
    done = subprocess.run(
        [PYTHON, "-X", "importtime", "-m", "orchestrator", *words], cwd=specctl.project, capture_output=True, text=True,
        env={**specctl.environ, **environ}, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr[-2000:]
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_help_imports_no_command_and_nothing_that_one_needs(specctl: Specctl) -> None:
    found = imported(specctl, "--help")
    assert not found & (HEAVY | SCANNING | {"pydantic", "yaml", "orchestrator.fleet", "orchestrator.inventory"})
    assert not {name for name in found if name.startswith(("orchestrator.verbs", "orchestrator.agent"))}


def test_status_as_json_imports_neither_rich_nor_what_scans_a_log(specctl: Specctl) -> None:
    found = imported(specctl, "status", "--json")
    assert not found & (HEAVY | SCANNING)
    assert not {name for name in found if name.startswith(("rich", "orchestrator.agent"))}
    assert {name for name in found if name.startswith("orchestrator.verbs.")} == {"orchestrator.verbs.status"}


def test_a_target_by_ssh_brings_paramiko_without_what_paramiko_brings(specctl: Specctl) -> None:
    specctl.inventory.write_text("targets: {there: {ssh: 127.0.0.1:9}}\n")
    found = imported(specctl, "status", "--json")
    assert found & HEAVY == {"paramiko.transport"}


def test_a_probe_imports_what_it_needs_and_from_bytecode(specctl: Specctl) -> None:
    launched = specctl.launch("--until", "process", "--", "sleep", "1000")
    assert launched.code == 0, launched.err
    agent = Agent(Target(name="local", workdir=str(specctl.workdir)), LocalTransport("local"))
    program, *rest = agent.argv()
    done = subprocess.run(
        [program, "-v", *rest], input=agent.request("probe", "feedfeedfeedfeed", 20.0), capture_output=True, check=False
    )
    said = done.stderr.decode(errors="replace").splitlines()
    found = {line.split("'")[1] for line in said if line.startswith("import 'orchestrator")}
    assert "orchestrator.agent.probe" in found and found <= PROBE, sorted(found - PROBE)
    assert not [line for line in said if line.startswith(tuple(f"import '{name}'" for name in NOT_PROBED))]
    home = f"{specctl.workdir}/agents/"
    assert not [line for line in said if line.startswith("# code object from") and home in line and ".pyc" not in line]
    assert len([line for line in said if line.startswith("# code object from") and home in line]) == len(found)
    answer = json.loads(done.stdout.split(b" ", 3)[3])
    assert [run["run_id"] for run in answer["runs"]] == [launched.json["run_id"]]


def test_lines_of_a_log_travel_as_they_are(specctl: Specctl) -> None:
    line = 'say "so" \\ \u00e4'
    launched = specctl.launch("--until", "process", "--", "sh", "-c", 'printf "%s\\n" "$1"; sleep 1000', "sh", line)
    assert launched.code == 0, launched.err
    agent = Agent(Target(name="local", workdir=str(specctl.workdir)), LocalTransport("local"))
    request = agent.request("logs", "feedfeedfeedfeed", 20.0, run_id=launched.json["run_id"], grep="so")
    done = subprocess.run(agent.argv(), input=request, capture_output=True, check=False)
    assert f"\n{line}\n\x1e".encode() in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="sshd of this test is root's")
def test_a_launch_over_ssh_asks_starts_and_watches(specctl: Specctl, tmp_path: Path) -> None:
    with LoopbackSshd(tmp_path / "sshd", options="LogLevel VERBOSE") as sshd:
        specctl.inventory.write_text(f"targets: {{there: {{ssh: {sshd.alias}, workdir: {specctl.workdir}}}}}\n")
        specctl.environ["SPECCTL_SSH_CONFIG"] = str(sshd.ssh_config)

        def execs(*words: str) -> int:
            before = sshd.log.count("Starting session: command")
            done = specctl(*words)
            assert done.code == 0, done.out + done.err
            return sshd.log.count("Starting session: command") - before

        launch = ("launch", "there", "--until", "process", "--", "sleep", "1000")
        execs(*launch)
        assert execs(*launch) == 3, "what is there, the start, and one exec that looks again and again"
        (specctl.project / "changed.py").write_text("# changed\n")
        assert execs(*launch) == 4, "and the code"
        assert execs("status") == 1
