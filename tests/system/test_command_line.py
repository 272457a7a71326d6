"""The command line itself: streams, Ctrl-C, usage errors, and what is said before and after the verbs do their work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver import Specctl, as_from_a_terminal

PYTHON = sys.executable


def shell(specctl: Specctl, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`line` with `specctl` in it, as bash runs it."""
    program = f'specctl() {{ "{PYTHON}" -m orchestrator "$@"; }}; set -o pipefail; {line}'
    return subprocess.run(
        ["bash", "-c", program], cwd=specctl.project, env={**specctl.environ, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def steps(specctl: Specctl, *options: str) -> str:
    return str(specctl.launch(*options, "--", PYTHON, specctl.program("steps.py")).json["run_id"])


# --- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--help", "launch --help", "--version", "status --json"])
@pytest.mark.parametrize(
    ("sink", "code", "said"),
    [
        ("| true", 141, ""),
        (">/dev/full", 1, "No space left on device"),
        (">&-", 1, "Bad file descriptor"),
    ],
)
def test_output_that_nobody_takes_ends_the_command_without_a_traceback(
    specctl: Specctl, words: str, sink: str, code: int, said: str
) -> None:
    # `true` has gone long before specctl has imported what it needs.
    done = shell(specctl, f"specctl {words} {sink}")
    assert done.returncode == code, done.stderr
    assert said in done.stderr and len(done.stderr.splitlines()) <= 1


def test_log_lines_that_nobody_takes_end_the_command_too(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "sh", "-c", "seq 100000; echo step=1 tok/s=1").json["run_id"]
    piped = shell(specctl, f"specctl logs {run_id} | head -n 1")
    assert (piped.stdout, piped.returncode, piped.stderr) == ("1\n", 141, "")
    full = shell(specctl, f"specctl logs {run_id} >/dev/full")
    assert full.returncode == 1 and "No space left on device" in full.stderr and "Traceback" not in full.stderr
    closed = shell(specctl, f"specctl logs {run_id} >&-")
    assert closed.returncode == 1 and "Bad file descriptor" in closed.stderr


def test_words_on_stderr_can_be_lost_without_harm(specctl: Specctl) -> None:
    specctl.program("steps.py")
    for sink in ("2>/dev/full", "2>&-"):
        done = shell(specctl, f"specctl launch local --json -- '{PYTHON}' steps.py {sink}")
        assert done.returncode == 0 and '"verified": true' in done.stdout


def test_a_locale_without_unicode_costs_no_answer(specctl: Specctl) -> None:
    specctl.program("steps.py")
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = specctl("launch", "local", "--note", "größer 漢", "--", PYTHON, "steps.py", **posix)
    assert done.code == 0 and "verified" in done.out, done.err
    assert specctl("status", **posix).code == 0
    run_id = specctl.launch("--", "printf", "größer\n").json["run_id"]
    assert specctl("logs", run_id, **posix).out == "größer\n", "a log's lines are passed on as they are"


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


INTERRUPTED_AT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from orchestrator.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["orchestrator.streams", "orchestrator.cli", "typer", "pydantic", "rich.console"])
def test_ctrl_c_while_modules_are_imported_ends_the_command_without_a_word(specctl: Specctl, module: str) -> None:
    done = subprocess.run(
        [PYTHON, "-c", INTERRUPTED_AT, "status"], cwd=specctl.project, capture_output=True, text=True, timeout=60,
        env={**specctl.environ, "INTERRUPT_AT": module}, check=False, preexec_fn=as_from_a_terminal,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_leaving_a_followed_log_says_of_what_it_was_and_that_the_run_goes_on(specctl: Specctl) -> None:
    run_id = steps(specctl)
    following = specctl.start("logs", "-f", "steps")
    assert following.stderr is not None and following.stdout is not None
    assert following.stderr.readline() == f"'steps' is {run_id}\n", "which run it is comes before its first line"
    assert following.stdout.readline().startswith("step=")
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=30)
    assert following.returncode == 130
    assert f"{run_id} attempt 1 on local: last seen RUNNING" in err and "lines shown" in err
    assert "stopped following; the run goes on" in err and specctl.processes(run_id)


def test_a_followed_log_whose_link_is_lost_says_so_and_that_the_state_is_unknown(specctl: Specctl) -> None:
    run_id = steps(specctl)
    following = specctl.start("logs", "-f", run_id, "--patience", "0")
    assert following.stdout is not None and following.stdout.readline().startswith("step=")
    for pid in _children(following.pid):
        os.kill(pid, signal.SIGKILL)
    _, err = following.communicate(timeout=30)
    assert following.returncode == 3 and f"{run_id} attempt 1 on local: last seen RUNNING" in err
    assert "link lost, state unknown" in err


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def test_leaving_a_launch_that_has_been_seen_says_what_was_seen(specctl: Specctl) -> None:
    specctl.program("never_steps.py")
    watching = specctl.start("launch", "local", "--json", "--", PYTHON, "never_steps.py")
    assert watching.stderr is not None
    for line in watching.stderr:
        if " log " in line:
            break
    watching.send_signal(signal.SIGINT)
    out, err = watching.communicate(timeout=30)
    assert watching.returncode == 130 and "that does not stop it" in err and "if" not in err.split()
    result = json.loads(out)
    assert result["rung"] == "log" and not result["verified"] and result["run_id"] in err
    assert specctl.processes(result["run_id"])


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["launch", "bash", "t.sh"], "(t.sh)", "specctl launch [TARGET] -- bash t.sh"),
        (["launch", "--note", "x", "local", "bash", "t.sh"], "(bash t.sh)", "specctl launch local -- bash t.sh"),
        (["launch", "bash", "-c", "echo 1"], "no such option: -c", "specctl launch [TARGET] -- bash -c 'echo 1'"),
        (["launch", "--bogus"], "no such option: --bogus", "specctl launch --help"),
        (["launch", "--timeout", "nan", "--", "true"], "'nan' is no number of seconds", "specctl launch --help"),
        (["stop", "--grace", "inf"], "'inf' is no number of seconds between 0 and 86,400", "specctl stop --help"),
        (["stop", "--grace", "1e12"], "'1e12' is no number of seconds", "specctl stop --help"),
        (["logs", "-n", "x"], "invalid value for '-n'", "specctl logs --help"),
        (["logs", "-i", "-A", "1"], "-A, -i without --grep", "add --grep ERE"),
        (["statu"], "no such command 'statu'", "specctl --help"),
        (["--inventory", "/tmp", "status"], "/tmp: is a directory", "--inventory names it"),
    ],
)
def test_a_usage_error_is_one_line_and_what_to_type_instead(
    specctl: Specctl, words: list[str], said: str, hint: str
) -> None:
    done = specctl(*words)
    assert done.code == 2 and done.out == ""
    error, *rest = done.err.splitlines()
    assert error.startswith("error: ") and said in error
    assert rest == [f"  {hint}"]


def test_a_configuration_beside_a_command_holds_only_what_specctl_knows(specctl: Specctl) -> None:
    config = specctl.project / "run.yaml"
    config.write_text("requirements: []\npaterns: {step: '('}\n")
    done = specctl("launch", "local", "--config", "run.yaml", "--", "true")
    assert done.code == 2 and "error: run.yaml:2: paterns: unknown key; did you mean 'patterns'?" in done.err
    config.write_text("requirements: []\npatterns: {step: '('}\n")
    done = specctl("launch", "local", "--config", "run.yaml", "--", "true")
    assert done.code == 2 and done.err.startswith("error: run.yaml:2: patterns.step: '(' is not a regular expression")


# --- which run ------------------------------------------------------------------------------------------------------


def test_a_stop_names_the_run_it_was_not_given_in_full_before_it_touches_it(specctl: Specctl) -> None:
    run_id = steps(specctl)
    short = specctl("stop", run_id[-2:])
    assert short.code == 4 and "too short" in short.err and specctl.processes(run_id)
    by_part = specctl("stop", "steps")
    assert by_part.code == 0 and by_part.err.startswith(f"'steps' is {run_id}\n")
    run_id = steps(specctl)
    unnamed = specctl("stop")
    assert unnamed.code == 0 and unnamed.err.startswith(f"your only live run is {run_id} on local\n")


def test_a_long_wait_for_a_stop_is_told_by_its_news_only(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "bash", specctl.program("stubborn.sh")).json["run_id"]
    done = specctl("stop", run_id, "--grace", "3")
    assert done.code == 0
    waiting = [line for line in done.err.splitlines() if line.startswith("waiting")]
    assert len(waiting) == 1 and "of 3 s, then KILL: " in waiting[0], done.err


def test_candidates_beyond_the_first_few_are_counted(specctl: Specctl) -> None:
    for _ in range(7):
        specctl.launch("--name", "many", "--", "no-such-program")
    done = specctl("logs", "nothing-like-it")
    assert done.code == 4 and done.err.count("-many-") == 5 and "and 2 more" in done.err


def test_looking_at_a_target_leaves_no_workdir_there(specctl: Specctl) -> None:
    status = specctl("status")
    assert status.code == 0 and f"no runs there, nor its workdir {specctl.workdir}" in status.out
    assert specctl("logs", "20260101-000000-x-0000").code == 4
    assert specctl("stop", "20260101-000000-x-0000").code == 4
    assert not specctl.workdir.exists()


# --- logs -----------------------------------------------------------------------------------------------------------


def test_no_lines_of_a_log_that_has_some_is_a_yes(specctl: Specctl) -> None:
    run_id = steps(specctl)
    done = specctl("logs", run_id, "-n", "0")
    assert (done.code, done.out) == (0, "")
    assert specctl("logs", specctl.launch("--", "true").json["run_id"], "-n", "0").code == 1


def test_a_pattern_in_another_language_is_told_when_it_matches_nothing(specctl: Specctl) -> None:
    run_id = steps(specctl)
    assert "write [0-9] for a digit" in specctl("logs", run_id, "--grep", r"step=\d+").err
    assert "[0-9]" not in specctl("logs", run_id, "--grep", "step=x").err
    assert "[0-9]" not in specctl("logs", run_id, "--grep", "(step)? *=").err


# --- what is shown --------------------------------------------------------------------------------------------------


def test_what_to_type_next_fits_what_was_seen(specctl: Specctl) -> None:
    def following(*words: str) -> list[str]:
        done = specctl("launch", "local", *words)
        return [line.split("specctl ", 1)[1] for line in done.out.partition("Next:\n")[2].splitlines()]

    good = following("--", PYTHON, specctl.program("steps.py"))
    assert [line.split()[0] for line in good] == ["status", "logs", "stop"] and "tok/s" in good[1]
    never = following("--", "no-such-program")
    assert [line.split()[0] for line in never] == ["status"]
    failed = following("--", "ls", "/nowhere")
    assert [line.split()[0] for line in failed] == ["status", "logs"] and "tok/s" not in failed[1]


def test_a_plan_shows_values_of_the_environment_and_only_names_of_secrets(specctl: Specctl) -> None:
    specctl.inventory.write_text(
        f"targets:\n  local: {{workdir: {specctl.workdir}, env: {{A: 'b c'}}, secrets: [TOKEN]}}\n"
    )
    specctl.program("steps.py")
    done = specctl("launch", "--plan", "--", "bash", "-c", "cd . && exec python steps.py", TOKEN="hunter2")
    assert "A='b c'" in done.out and "TOKEN" in done.out and "hunter2" not in done.out
    assert "(1 file)" in done.out and "-steps-" in done.out


def test_a_status_row_is_short_and_the_whole_reason_is_below(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    own = specctl.launch("--", "bash", specctl.program("own_log.sh"), "steps", LOG=str(log)).json["run_id"]
    never = specctl.launch("--", "no-such-program").json["run_id"]
    done = specctl("status")
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.startswith(("2", " "))}
    assert f"log {log}" in rows[own]
    why = specctl.status(never)["why"]
    assert why not in rows[never] and f"NEVER_STARTED {never}: {why}" in done.out
    specctl("stop", own)
