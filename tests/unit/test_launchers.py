"""What launchers say of a process that has failed, as they really say it, and which of several reports is believed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.blame import cause, killed
from orchestrator.logscan import Scanner
from orchestrator.logscan.launchers import death
from orchestrator.model import Finding, LogSummary

FRAMES = '  File "train.py", line 3, in main\n    train()\n'
BROKEN = f"Traceback (most recent call last):\n{FRAMES}ValueError: two\n\nparagraphs {'=' * 60}\n"
REPORTED = 'Traceback (most recent call last):\n  File "/venv/bin/torchrun", line 8, in <module>\n    main()\n'
COMMAND = "subprocess.CalledProcessError"
GROUP = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"


def read(text: str) -> LogSummary:
    scanner = Scanner()
    for at in range(0, len(text), 777):
        scanner.feed(text[at : at + 777].encode(), now=1.0)
    scanner.finish(now=1.0)
    return scanner.summary()


def group(folder: Path, *found: tuple[int, int, int, str], more: str = "") -> str:
    """torchrun's own words for processes (rank, local rank, exit code, traceback), the first as the root cause."""
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    failures = {}
    for at, (rank, local, code, raised) in enumerate(found):
        file = folder / f"{rank}.json"
        if raised:
            extra = {"py_callstack": raised, "timestamp": str(1000 + at)}
            file.write_text(json.dumps({"message": {"message": raised, "extraInfo": extra}}))
        failures[rank] = errors.ProcessFailure(local_rank=local, pid=9616, exitcode=code, error_file=str(file))
        failures[rank].timestamp = 1000 + at
    ordered = dict(sorted(failures.items()))
    return f"{REPORTED}{GROUP}: {errors.ChildFailedError('train.py', ordered)}\n{more}"


def test_a_table_that_holds_tracebacks_is_one_report(tmp_path: Path) -> None:
    raised = f"{BROKEN}rank : 7\nexitcode : -9\n"
    table = group(tmp_path, (1, 1, 1, raised), (0, 0, 1, raised), (2, 2, -15, ""))
    summary = read(f"step=1 loss=2\n[rank1]: {BROKEN}{table}")
    assert [one.type for one in summary.tail] == ["ValueError", GROUP]
    assert summary.tail[-1].message.startswith("rank 1 ended with exit code 1\n")
    assert summary.tail[-1].traceback.endswith("=" * 60)
    assert cause(summary.tail).worker == "rank1"


def test_who_was_killed_is_found_in_a_table_that_is_too_long_to_be_kept(tmp_path: Path) -> None:
    long = f"Traceback (most recent call last):\n{FRAMES * 400}ValueError: x\n"
    table = group(tmp_path, (0, 0, 1, long), (1, 1, -9, ""), (2, 2, 1, long))
    summary = read(table)
    assert len(summary.tail[-1].traceback) < len(table) / 2
    assert str(killed(summary.tail)) == "rank 1 was killed by SIGKILL"


def test_what_is_printed_behind_a_table_is_no_part_of_it(tmp_path: Path) -> None:
    table = group(tmp_path, (1, 1, 1, BROKEN), more=f"{'=' * 60}\n  rank      : 7\nbye FAILED\n")
    (report,) = read(table).findings
    assert report.traceback.endswith("=" * 60) and report.message.startswith("rank 1 ended with exit code 1\n")


def test_a_command_that_a_rank_ran_is_what_failed_and_torchruns_table_only_its_report(tmp_path: Path) -> None:
    command = "subprocess.CalledProcessError: Command '['tool']' died with <Signals.SIGSEGV: 11>."
    raised = f"Traceback (most recent call last):\n{FRAMES}{command}\n"
    tail = read(raised + group(tmp_path, (1, 1, 1, raised))).tail
    assert len(tail) == 2 and cause(tail) == tail[0]
    assert killed(tail) is None, "the rank itself ended with an exit code"


def test_of_launchers_that_start_launchers_the_one_that_saw_the_process_is_believed(tmp_path: Path) -> None:
    reset = f"[rank0]: Traceback (most recent call last):\n[rank0]: {FRAMES}[rank0]: RuntimeError: Connection reset\n"
    outer = f"Traceback (most recent call last):\n{FRAMES}subprocess.CalledProcessError: Command '['torchrun']' "
    outer += "returned non-zero exit status 1.\n"
    tail = read(reset + group(tmp_path, (1, 1, -9, ""), (0, 0, 1, "")) + outer).tail
    assert len(tail) == 3
    assert cause(tail) == tail[1] and str(killed(tail)) == "rank 1 was killed by SIGKILL"


def finding(worker: str | None, kind: str = "ValueError", message: str = "x") -> Finding:
    return Finding(type=kind, message=message, traceback="", worker=worker, offset=0, at=0.0, hint=None,
                   fingerprint=f"{worker}", before_first_step=False)  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "said", "named"),
    [
        (["default0", "default1"], "rank 9 (local rank 1) ended with exit code 1", "default1"),
        (["rank8", "rank9"], "rank 9 (local rank 1) ended with exit code 1", "rank9"),
        (["rank1", "rank11"], "rank 11 ended with exit code 1", "rank11"),
        (["rank0", "Thread-1", "drafter-1"], "rank 1 ended with exit code 1", "drafter-1"),
        ([None, "Process-1"], "rank 1 ended with exit code 1", None),
        (["rank0", "rank2"], "rank 1 ended with exit code 1", "rank0"),
    ],
)
def test_whose_exception_it_is_that_a_table_names(workers: list[str | None], said: str, named: str | None) -> None:
    assert cause([*map(finding, workers), finding(None, GROUP, f"{said}\n====")]).worker == named


def speaking(worker: str | None, traceback: str) -> Finding:
    return dataclasses.replace(finding(worker, "Fatal"), traceback=traceback)


KILLED = "rank 1 was killed by SIGKILL\n===="
ABORTED = "rank 1 was killed by SIGABRT\n===="
DIED = "Command 'a' died with <Signals.SIGKILL: 9>."
NATIVE = "Fatal Python error: Aborted\n"


@pytest.mark.parametrize(
    ("findings", "at"),
    [
        # Killed from outside: what the others, or it itself before, have said is no cause.
        ([finding("rank1"), finding("rank0"), finding(None, GROUP, KILLED)], 2),
        ([speaking("rank1", NATIVE), finding(None, GROUP, KILLED)], 1),
        # A fault of its own, of which it may have spoken: by name first, then as such a fault speaks.
        ([finding("rank0"), finding("rank1"), finding(None, GROUP, ABORTED)], 1),
        ([speaking(None, NATIVE), finding("rank1"), finding(None, GROUP, ABORTED)], 1),
        ([finding("rank0"), speaking(None, NATIVE), finding(None, GROUP, ABORTED)], 1),
        ([finding("rank0"), finding(None, GROUP, ABORTED)], 1),
        # A number of a machine is none of the whole.
        ([finding("default1"), finding("default5"), finding(None, GROUP, "rank 5 ended with exit code 1\n====")], 1),
        # Of commands that ran commands the innermost has seen it; what came before the last reports is another story.
        ([finding(None, COMMAND, DIED), finding(None, COMMAND, "outer")], 0),
        ([finding(None, COMMAND, DIED), finding("rank0"), finding(None, COMMAND, "last")], 1),
    ],
)  # fmt: skip
def test_which_finding_is_the_cause_behind_launchers_reports(findings: list[Finding], at: int) -> None:
    assert cause(findings) is findings[at]


def test_a_command_that_was_killed_inside_of_another_is_known_to_have_been() -> None:
    inner, outer = finding(None, COMMAND, DIED), finding(None, COMMAND, "Command 'b' returned non-zero exit status 1.")
    assert str(killed([inner, outer])) == "a process was killed by SIGKILL"
    assert killed([inner, finding("rank0")]) is None, "it was caught, and the run ended with something else"


@pytest.mark.parametrize(
    ("code", "told"),
    [("sys.exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "SIGKILL"), ("os.kill(os.getpid(), 40)", "signal 40")],
)
def test_how_a_command_ended_is_read_in_pythons_own_words(code: str, told: str) -> None:
    """Of an exit code nothing is said: the message is whole without."""
    with pytest.raises(subprocess.CalledProcessError) as raised:
        subprocess.run([sys.executable, "-c", f"import os, sys; {code} # died with <Signals.SIGTERM: 15>."], check=True)
    found = death(str(raised.value))
    assert (found is None) if "exit code" in told else str(found) == f"a process was killed by {told}"


def test_how_a_spawned_process_ended_is_read_in_torchs_own_words() -> None:
    spawn = pytest.importorskip("torch.multiprocessing.spawn")
    for code, name in ((3, None), (-9, "SIGKILL")):
        told = f"process 1 terminated with {f'signal {name}' if name else f'exit code {code}'}"
        error = spawn.ProcessExitedException(told, 1, 9616, exit_code=code, signal_name=name)
        found = death(str(error))
        assert found is not None and (found.rank, found.code) == (1, code)
    assert death("Command 'x # process 3 terminated with signal SIGSEGV' returned non-zero exit status 1.") is None


def test_reports_are_alike_by_how_a_process_ended_whichever_it_was(tmp_path: Path) -> None:
    found = [read(group(tmp_path, one)).findings[0] for one in ((0, 0, -9, ""), (1, 1, -9, ""), (1, 1, -11, ""))]
    prints = [one.fingerprint for one in found]
    assert prints[0] == prints[1] != prints[2]
