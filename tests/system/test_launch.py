"""What `launch` says, and above all what it does not say, of programs that fail in each of their ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.agent import probe, records
from orchestrator.model import Process, RunPaths
from tests.driver import Specctl, poll_until

PYTHON = sys.executable
ALIVE = {"RUNNING", "STARTING", "STALLED"}


def test_a_program_that_steps_is_verified_by_each_rung(specctl: Specctl) -> None:
    done = specctl.launch("--", PYTHON, specctl.program("steps.py"))
    assert done.code == 0, done.err
    result = done.json
    assert result["verified"] and result["rung"] == "step" and result["state"] == "RUNNING"
    assert [item["what"] for item in result["evidence"]] == ["accepted", "session", "process", "log", "step"]
    assert result["tok_s"] > 0 and result["session"] == result["run_id"]
    assert specctl.processes(result["run_id"]), "it says RUNNING, and nothing carries its mark"


def test_until_process_is_content_with_a_living_process(specctl: Specctl) -> None:
    done = specctl.launch("--until", "process", "--", PYTHON, specctl.program("never_steps.py"))
    assert done.code == 0 and done.json["verified"]


def test_a_program_that_dies_at_import_is_reported_with_its_own_traceback(specctl: Specctl) -> None:
    done = specctl.launch("--", PYTHON, specctl.program("dies_at_import.py"))
    assert done.code == 1
    result = done.json
    assert result["state"] == "FAILED" and not result["verified"]
    assert result["error"]["type"] == "ModuleNotFoundError"
    assert "a_module_that_nobody_has" in result["error"]["traceback"]


@pytest.mark.parametrize("until", ["process", "step"])
def test_a_program_that_exits_0_at_once_is_not_verified(specctl: Specctl, until: str) -> None:
    done = specctl.launch("--until", until, "--", "true")
    assert done.code == 1
    assert done.json["state"] == "SUCCEEDED" and not done.json["verified"]
    assert f"it was over before a {until} was seen" in done.json["error"]["message"]
    assert ("without steps: --until process" in done.json["error"]["message"]) == (until == "step")


def test_an_exit_code_behind_a_shell_is_the_runs_own(specctl: Specctl) -> None:
    done = specctl.launch("--", "sh", "-c", "echo saved; exit 3")
    assert done.code == 1
    assert done.json["state"] == "FAILED" and "3" in done.json["error"]["message"]
    assert "saved" in done.json["tail"]


def test_a_program_that_never_steps_is_not_verified_and_goes_on(specctl: Specctl) -> None:
    done = specctl.launch("--timeout", "2", "--", PYTHON, specctl.program("never_steps.py"))
    assert done.code == 1
    assert not done.json["verified"] and done.json["rung"] == "log"
    assert "without steps: --until process" in done.json["error"]["message"]
    assert specctl.processes(done.json["run_id"])


def test_a_program_that_does_not_exist_never_started(specctl: Specctl) -> None:
    done = specctl.launch("--", "no-such-program-anywhere")
    assert done.code == 1
    assert done.json["state"] == "NEVER_STARTED" and "no-such-program-anywhere" in done.json["error"]["message"]
    row = specctl.status(done.json["run_id"])
    assert row["state"] == "NEVER_STARTED"


def test_a_dead_worker_is_degraded_however_well_the_others_step(specctl: Specctl) -> None:
    done = specctl.launch("--", PYTHON, specctl.program("one_thread_dies.py"))
    run_id = done.json["run_id"]
    row = poll_until(lambda: (found := specctl.status(run_id))["state"] == "DEGRADED" and found)
    assert {worker["name"]: worker["state"] for worker in row["workers"]} == {
        "drafter-0": "GONE", "drafter-1": "ALIVE", "drafter-2": "ALIVE",
    }  # fmt: skip
    assert "FX" in row["error"]["message"] and row["error"]["worker"] == "drafter-0"
    assert done.code == 1 and done.json["state"] == "DEGRADED" and not done.json["verified"]


def test_an_old_runs_traceback_in_the_text_is_not_this_runs_failure(specctl: Specctl) -> None:
    done = specctl.launch("--", PYTHON, specctl.program("old_traceback.py"))
    assert done.code == 0
    assert done.json["state"] == "RUNNING" and done.json["error"] is None
    assert "yesterday" in done.json["findings"][0]["message"]


def test_a_worker_that_steps_again_after_its_traceback_is_alive(specctl: Specctl) -> None:
    done = specctl.launch("--", PYTHON, specctl.program("worker_recovers.py"))
    run_id = done.json["run_id"]
    poll_until(lambda: (specctl.status(run_id)["step"] or 0) > 5)
    assert specctl.status(run_id)["state"] == "RUNNING"


def test_a_failing_grandchild_fails_the_run_that_left_it_behind(specctl: Specctl) -> None:
    run_id = specctl.launch("--until", "step", "--", PYTHON, specctl.program("daemon.py")).json["run_id"]
    row = poll_until(lambda: (found := specctl.status(run_id))["state"] not in ALIVE and found)
    assert row["state"] == "FAILED" and "9" in row["why"]


def test_a_run_whose_started_program_has_left_another_behind_is_a_process_that_lives(specctl: Specctl) -> None:
    done = specctl.launch("--until", "process", "--timeout", "30", "--", "sh", "-c", "sleep 600 & exit 0")
    assert done.code == 0 and done.json["verified"], done.out
    assert specctl.status(done.json["run_id"])["state"] == "STARTING"


def test_the_repeated_start_of_a_run_adopts_it_and_never_doubles_it(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py")).json["run_id"]
    code = """
import json, sys
from pathlib import Path
from orchestrator.fleet import Fleet
from orchestrator.inventory import load_inventory
import os
fleet = Fleet(load_inventory(None, environ=os.environ, cwd=Path.cwd(), home=Path.home()))
spec = json.loads(Path(sys.argv[1]).read_text())["spec"]
print(json.dumps(fleet.agent(fleet.inventory.resolve("local")).call("start", spec=spec, secrets={})))
"""
    before = specctl.processes(run_id)
    record = str(specctl.run_dir(run_id) / "run.json")
    answer = subprocess.run(
        [PYTHON, "-c", code, record], env=specctl.environ, cwd=specctl.project, capture_output=True, check=True
    ).stdout
    assert json.loads(answer)["adopted"] is True
    assert specctl.processes(run_id) == before


def test_secrets_reach_the_program_and_no_record(specctl: Specctl) -> None:
    specctl.inventory.write_text(f"targets:\n  local: {{workdir: {specctl.workdir}, secrets: [TOKEN]}}\n")
    program = "import os; print('length', len(os.environ['TOKEN'])); print('step=1 tok/s=1')"
    done = specctl.launch("--", PYTHON, "-c", program, TOKEN="hunter2-hunter2")
    assert done.code == 0, done.err
    run = specctl.run_dir(done.json["run_id"])
    assert "length 15" in (run / f"{run.name}.a1.log").read_text()
    for path in specctl.workdir.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
    missing = specctl("launch", "local", "--", "true")
    assert missing.code == 2 and "TOKEN" in missing.err


def test_hostile_words_arrive_as_they_are(specctl: Specctl) -> None:
    words = ["it's", '"$HOME"', "; echo X", "a\nb", "", "--", "-n", "{x}", "*", "ä漢"]
    program = "import sys, json; print(json.dumps(sys.argv[1:])); print('step=1 tok/s=1')"
    done = specctl.launch("--note", 'it\'s "$HOME"; echo X', "--", PYTHON, "-c", program, *words)
    assert done.code == 0, done.err
    run = specctl.run_dir(done.json["run_id"])
    lines = (run / f"{run.name}.a1.log").read_text().splitlines()
    assert json.loads(lines[1]) == words
    assert json.loads((run / "run.json").read_text())["spec"]["note"] == 'it\'s "$HOME"; echo X'


def test_a_plan_does_nothing(specctl: Specctl) -> None:
    done = specctl.launch("--plan", "--", "true")
    assert done.code == 0 and done.json["argv"] == ["true"]
    assert not specctl.workdir.exists()


def test_the_code_that_runs_is_the_code_that_was_there_at_the_launch(specctl: Specctl) -> None:
    (specctl.project / "main.py").write_text("print('step=1 tok/s=1 version=one')")
    first = specctl.launch("--", PYTHON, "main.py").json["run_id"]
    (specctl.project / "main.py").write_text("print('step=1 tok/s=1 version=two')")
    second = specctl.launch("--", PYTHON, "main.py").json["run_id"]
    assert "version=one" in specctl("logs", first).out
    assert "version=two" in specctl("logs", second).out
    assert len(list((specctl.workdir / "bundles").iterdir())) == 2


def test_a_bundle_that_was_tampered_with_is_not_run(specctl: Specctl) -> None:
    (specctl.project / "main.py").write_text("print('step=1 tok/s=1')")
    assert specctl.launch("--", PYTHON, "main.py").code == 0
    [bundle] = (specctl.workdir / "bundles").iterdir()
    (bundle / "project" / "main.py").write_text("print('step=1 tok/s=1 somebody else was here')")
    done = specctl.launch("--", PYTHON, "main.py")
    assert done.code == 1 and done.json["state"] == "NEVER_STARTED"
    assert "have been changed on the target" in done.json["error"]["message"]


def test_big_files_are_refused_by_name(specctl: Specctl) -> None:
    with (specctl.project / "weights.bin").open("wb") as file:
        os.truncate(file.fileno(), 30 << 20)
    done = specctl("launch", "local", "--", "true")
    assert done.code == 1 and "weights.bin (30 MiB)" in done.err


@pytest.mark.parametrize("ending", ["steps", "dies"])
def test_a_script_with_a_log_of_its_own_is_judged_by_what_comes_after_the_old_bytes(
    specctl: Specctl, ending: str
) -> None:
    log = specctl.home / "train_flex6.log"
    old = "Traceback (most recent call last):\n  File 'a.py'\nRuntimeError: the error of yesterday\nstep=900 tok/s=9\n"
    log.write_text(old)
    done = specctl.launch("--", "bash", specctl.program("own_log.sh"), ending, LOG=str(log))
    result = done.json
    [foreign] = result["foreign_logs"]
    assert foreign["path"] == str(log) and foreign["before"] == len(old) and foreign["base"] == len(old)
    run_id = result["run_id"]
    if ending == "steps":
        assert done.code == 0 and result["state"] == "RUNNING"
        assert not result["findings"]
    else:
        row = poll_until(lambda: (found := specctl.status(run_id))["state"] not in ALIVE and found)
        assert row["state"] == "FAILED" and "today" in row["error"]["message"]
    shown = specctl("logs", run_id)
    assert "yesterday" not in shown.out and "step=900" not in shown.out and "step=1 " in shown.out
    assert str(log) in shown.err
    assert specctl("logs", run_id, "--grep", "yesterday").code == 1


def test_a_program_starts_with_its_signals_as_they_are_by_default(specctl: Specctl) -> None:
    program = """
import signal
for name in ("SIGHUP", "SIGTERM", "SIGPIPE", "SIGINT"):
    held = signal.getsignal(getattr(signal, name))
    print(name, held is signal.SIG_IGN and name != "SIGPIPE", signal.pthread_sigmask(signal.SIG_BLOCK, []))
print("step=1 tok/s=1")
"""
    run_id = specctl.launch("--", PYTHON, "-c", program).json["run_id"]
    shown = specctl("logs", run_id, "--grep", "^SIG").out.splitlines()
    assert len(shown) == 4 and all(line.endswith("False set()") for line in shown), shown


def test_output_reaches_the_log_while_the_program_lives_without_a_flush(specctl: Specctl) -> None:
    program = "import time\nprint('not flushed by anybody')\ntime.sleep(1000)"
    run_id = specctl.launch("--until", "process", "--", PYTHON, "-c", program).json["run_id"]
    log = specctl.run_dir(run_id) / f"{run_id}.a1.log"
    poll_until(lambda: "not flushed by anybody" in log.read_text())


def test_until_process_is_not_deceived_by_a_program_that_is_about_to_die(specctl: Specctl) -> None:
    done = specctl.launch("--until", "process", "--", PYTHON, specctl.program("dies_at_import.py"))
    assert done.code == 1 and done.json["state"] == "FAILED"


def refused(specctl: Specctl) -> str:
    """The id of a launch that was refused."""
    before = specctl.inventory.read_text()
    specctl.inventory.write_text("targets:\n  local: {workdir: /proc/nowhere}\n")
    done = specctl("launch", "local", "--", "true")
    assert done.code == 1 and "; nothing was started\n" in done.err, done.err
    specctl.inventory.write_text(before)
    lines = (specctl.home / "state/specctl/launches.jsonl").read_text().splitlines()
    return str(json.loads(lines[-1])["run_id"])


def test_after_a_launch_that_was_refused_last_means_none_and_shows_nothing_of_the_run_before(specctl: Specctl) -> None:
    nothing = refused(specctl)
    done = specctl("status", "@last")
    assert done.code == 4 and f"@last: the launch of {nothing} on local failed before" in done.err, done.err
    program = "echo the old run; echo step=1; exec sleep 600"
    older = specctl.launch("--until", "process", "--", "sh", "-c", program).json["run_id"]
    nothing = refused(specctl)
    for verb in ("logs", "status", "show", "stop"):
        done = specctl(verb, "@last")
        assert done.code == 4 and done.out == "" and "the old run" not in done.err, done
        assert f"@last: the launch of {nothing} on local failed before anything was started" in done.err
        assert f"the run before it is {older}" in done.err
    assert specctl.status(older)["state"] == "RUNNING", "nothing is ended that may not be meant"
    assert specctl("status", nothing).code == 4 and nothing not in specctl("ls").out
    assert specctl("stop", older).code == 0


def test_last_is_a_launch_that_was_accepted_and_never_started(specctl: Specctl) -> None:
    assert specctl.launch("--until", "process", "--", "sleep", "600").code == 0
    never = specctl.launch("--", "./not-there")
    assert never.code == 1
    done = specctl("status", "@last")
    assert done.code == 1 and f"@last is {never.json['run_id']}" in done.err and "NEVER_STARTED" in done.out, done
    usage = specctl("launch", "local", "--config", "nowhere.yaml")
    assert usage.code == 2, usage
    assert f"@last is {never.json['run_id']}" in specctl("status", "@last").err, "and no launch at all changes that"


def test_a_run_of_another_hosts_yaml_is_said_to_be_that_and_last_is_not_silently_an_older_one(specctl: Specctl) -> None:
    program = (PYTHON, specctl.program("steps.py"))
    here, other = (f"targets:\n  {name}: {{workdir: {specctl.workdir}}}\n" for name in ("local", "other"))
    specctl.inventory.write_text(other)
    newest = specctl.launch("--name", "newest", "--", *program, target="other").json["run_id"]
    specctl.inventory.write_text(here.replace(str(specctl.workdir), f"{specctl.workdir}2"))
    for run in (newest, "@last"):
        done = specctl("status", run)
        assert done.code == 4 and f"{newest} was launched from here on other, which " in done.err, done.err
        assert "specctl --inventory FILE" in done.err
    specctl.inventory.write_text(here + other.partition("\n")[2])
    specctl.launch("--until", "process", "--", "sleep", "600")
    newest = specctl.launch("--name", "newest", "--", *program, target="other").json["run_id"]
    specctl.inventory.write_text(here)
    done = specctl("show", "@last")
    assert done.code == 0 and "sleep" in done.out and f"{newest} was launched from here on other" in done.err, done.err
    assert specctl("stop", "@last").code == 4, "nothing is ended that may not be meant"


def test_a_missing_gpu_is_the_reason_that_is_given(specctl: Specctl) -> None:
    specctl.inventory.write_text(f"targets:\n  local: {{workdir: {specctl.workdir}, gpus: [63]}}\n")
    done = specctl.launch("--timeout", "3", "--", PYTHON, specctl.program("steps.py"))
    assert done.code == 1 and "/dev/nvidia63 is not there" in done.json["error"]["message"]
    assert list((specctl.workdir / "runs").glob("*")) == []


def test_a_run_on_a_place_with_two_names_is_listed_once(specctl: Specctl) -> None:
    here = f"{{workdir: {specctl.workdir}}}"
    specctl.inventory.write_text(f"targets:\n  first: {here}\n  second: {here}\n")
    run_id = specctl.launch("--", PYTHON, specctl.program("steps.py"), target="second").json["run_id"]
    rows = specctl("status", "--json").json["runs"]
    assert [(row["run_id"], row["target"]) for row in rows] == [(run_id, "second")]
    assert specctl("stop", "steps").code == 0


def test_a_failure_is_told_with_the_exception_that_was_printed_before_it(specctl: Specctl) -> None:
    program = "print(('x' * 99 + chr(10)) * 400_000, flush=True); import nonexistent_module"
    script = f'sleep 1000 & exec {PYTHON} -c "$0"'
    done = specctl.launch("--", "sh", "-c", script, program)
    assert (done.json["state"], done.json["error"]["type"]) == ("FAILED", "ModuleNotFoundError")


def test_a_program_that_ends_during_a_look_is_no_process_that_is_left(specctl: Specctl) -> None:
    run_id = specctl.launch("--", PYTHON, "-c", "import nonexistent_module").json["run_id"]
    paths = RunPaths(root=str(specctl.run_dir(run_id)), run_id=run_id)
    poll_until(lambda: Path(paths.exit).exists())
    Path(paths.exit).unlink()
    supervisor, found = records.supervisor(paths), records.spec(paths)
    assert supervisor is not None and supervisor.program_pid is not None and found is not None
    walked = Process(pid=supervisor.program_pid, start_ticks=supervisor.program_start_ticks or 0, name="x", state="R")
    seen = probe._one(
        paths, *found, tree=[walked], boot=supervisor.boot, oom_kills=0, now=time.time(), elsewhere=None, disk=None
    )  # fmt: skip
    assert seen.tree == [] and seen.program is None
