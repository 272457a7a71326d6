"""Group B of the public bug reports, and C5: what tmux does to whoever trusts it. Each test names its cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.driver import Specctl, poll_until

PYTHON = sys.executable


def environ_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_b1_b7_only_the_run_itself_is_stopped_not_a_session_whose_name_begins_alike(specctl: Specctl) -> None:
    run_id = specctl.launch("--until", "process", "--", "bash", specctl.program("stubborn.sh")).json["run_id"]
    socket = specctl.workdir / f"tmux-{os.geteuid()}"
    for name in (f"{run_id}-2", run_id[:-1]):
        tmux = ["tmux", "-S", str(socket), "new-session", "-d", "-P", "-F", "#{pane_pid}", "-s", name, "sleep 1000"]
        neighbour = int(subprocess.run(tmux, capture_output=True, text=True, check=True).stdout)
        assert specctl("stop", f"{run_id}-2").code == 4
        assert len(specctl.processes(run_id)) >= 3
    done = specctl("stop", run_id, "--grace", "1")
    assert done.code == 0 and "no process of it is left" in done.out
    assert not specctl.processes(run_id) and Path(f"/proc/{neighbour}").exists()
    left = ["tmux", "-S", str(socket), "list-sessions", "-F", "#{session_name}"]
    assert f"{run_id}-2" in subprocess.run(left, capture_output=True, text=True, check=True).stdout.split()


def test_b3_b4_d4_a_second_run_has_its_own_environment_whatever_server_and_shell_there_are(specctl: Specctl) -> None:
    for name in (".bashrc", ".profile", ".bash_profile", ".zshrc"):
        (specctl.home / name).write_text("sleep 1000\n")  # a shell that is typed to would never get to the command
    local = f"workdir: {specctl.workdir}"
    specctl.inventory.write_text(
        f"targets:\n  a: {{{local}, env: {{WHICH: '0'}}}}\n  b: {{{local}, env: {{WHICH: '1'}}}}\n"
    )
    program = specctl.program("never_steps.py")
    for target, which in (("a", b"WHICH=0"), ("b", b"WHICH=1")):
        done = specctl.launch("--until", "process", "--", PYTHON, program, target=target)
        assert done.code == 0, done.err
        [pid] = specctl.processes(done.json["run_id"])
        assert which in environ_of(pid) and b"PYTHONUNBUFFERED=1" in environ_of(pid)
        log = specctl.run_dir(done.json["run_id"]) / f"{done.json['run_id']}.a1.log"
        poll_until(lambda log=log: "loading weights" in log.read_text(), timeout_s=10)


def test_b9_b10_a_tmux_that_fails_after_it_made_the_session_starts_one_program_whose_log_is_whole(
    specctl: Specctl,
) -> None:
    (specctl.home / "bin").mkdir()
    liar = specctl.home / "bin" / "tmux"
    liar.write_text('#!/bin/sh\n/usr/bin/tmux "$@"; rc=$?\ncase "$*" in *new-session*) exit 1;; esac\nexit $rc\n')
    liar.chmod(0o755)
    program = "open('started', 'a').write('x')\nfor n in range(10_000): print('line', n)\nraise OSError('last')"
    done = specctl.launch("--", PYTHON, "-c", program, PATH=f"{liar.parent}:{os.environ['PATH']}")
    assert done.code == 1 and done.json["state"] == "FAILED", done.out + done.err
    assert (done.json["error"]["type"], done.json["error"]["message"]) == ("OSError", "last")
    run = specctl.run_dir(done.json["run_id"])
    assert (run / "code" / "started").read_text() == "x"
    lines = (run / f"{run.name}.a1.log").read_text().splitlines()
    assert lines[1:10_001] == [f"line {n}" for n in range(10_000)] and lines[-1] == "OSError: last"


def test_c5_loaders_that_outlive_their_parent_and_its_supervisor_are_found_by_their_mark(specctl: Specctl) -> None:
    program = "import os, time\nfor _ in range(2):\n  if not os.fork(): os.setsid(); time.sleep(1000)\ntime.sleep(1000)"
    run_id = specctl.launch("--until", "process", "--", PYTHON, "-c", program).json["run_id"]
    assert len(poll_until(lambda: len(found := specctl.processes(run_id)) == 3 and found)) == 3
    record = json.loads((specctl.run_dir(run_id) / "supervisor.json").read_text())
    for name in ("pid", "program_pid"):
        os.kill(record[name], signal.SIGKILL)
    poll_until(lambda: len(specctl.processes(run_id)) == 2)
    assert specctl("stop", run_id, "--now").code == 0
    assert not specctl.processes(run_id)
