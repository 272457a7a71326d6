"""`logs -f` when things go wrong: links that break, logs that move or are emptied, readers that stall or leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.fleet import Fleet
from orchestrator.inventory import load_inventory
from orchestrator.verbs import logs as verb
from tests.driver import Specctl, poll_until
from tests.sshd import LoopbackSshd
from tests.system.test_logs import finished, log_of

TWO_LOGS = """
import os, sys, time
log, n = open(sys.argv[1], 'a'), 0
while n % 100 or not os.path.exists('end'):
    n += 1
    print(f'own {n}', flush=True)
    print(f'mine {n}', file=log, flush=True)
    time.sleep(.005)
"""
MANY = "import sys\nfor n in range(200000): sys.stdout.write(f'{n} ' + 'x' * 90 + '\\n')"


@pytest.fixture
def remote(sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Specctl]:
    monkeypatch.setenv("SPECCTL_SSH_CONFIG", str(sshd.ssh_config))
    driver = Specctl(SPECCTL_SSH_CONFIG=str(sshd.ssh_config))
    driver.inventory.write_text(
        f"targets:\n  box: {{ssh: node1, workdir: {driver.workdir}, python: {sys.executable}}}\n"
    )
    yield driver
    driver.close()


def code(specctl: Specctl, run_id: str) -> Path:
    return specctl.run_dir(run_id) / "code"


def test_a_link_that_breaks_again_and_again_costs_no_line_and_doubles_none(
    remote: Specctl, sshd: LoopbackSshd
) -> None:
    log = remote.home / "mine.log"
    launched = remote.launch("--until", "process", "--", sys.executable, "-c", TWO_LOGS, str(log), target="box")
    run_id = str(launched.json["run_id"])
    followers, said = [], []
    for number, words in enumerate((["--json"], ["--grep", "(own|mine) [0-9]*[05]$"])):
        said.append(remote.home / f"said{number}")
        with (remote.home / f"lines{number}").open("wb") as out, said[-1].open("wb") as err:
            followers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "orchestrator", "logs", run_id, "-f", *words], cwd=remote.project,
                    env=remote.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                )
            )  # fmt: skip
    lines = [remote.home / f"lines{number}" for number in range(2)]

    def times(word: str) -> list[int]:
        return [path.read_text().count(word) for path in said]

    for number in range(1, 4):
        sizes = [path.stat().st_size for path in lines]
        poll_until(lambda sizes=sizes: all(path.stat().st_size > size for path, size in zip(lines, sizes, strict=True)))
        assert sshd.drop()
        poll_until(lambda number=number: min(times("resumed at byte")) >= number, what=f"{said[0].read_text()}")
    (code(remote, run_id) / "end").touch()
    assert [follower.wait(timeout=90) for follower in followers] == [0, 0], said[0].read_text()
    found: dict[str, list[str]] = {}
    for row in map(json.loads, lines[0].read_text().splitlines()):
        found.setdefault(row["log"], []).append(row["line"])
    own = str(log_of(remote, run_id))
    count = len(log.read_text().splitlines())
    assert found == {own: [f"own {n + 1}" for n in range(count)], str(log): [f"mine {n + 1}" for n in range(count)]}
    grepped = lines[1].read_text().splitlines()
    for name in ("own", "mine"):
        wanted = [f"{name} {n}" for n in range(5, count + 1, 5)]
        assert [line for line in grepped if line.startswith(name)] == wanted
    assert f"{2 * count:,} of {2 * count:,} lines" in said[0].read_text()
    assert f"{2 * count // 5:,} of {2 * count:,} lines" in said[1].read_text()


def test_a_link_that_stays_away_ends_the_following_with_3_and_claims_nothing(
    remote: Specctl, sshd: LoopbackSshd
) -> None:
    run_id = remote.launch("--", sys.executable, remote.program("steps.py"), target="box").json["run_id"]
    follower = remote.start("logs", run_id, "-f", "-n", "1", "--patience", "2")
    leaver = remote.start("logs", run_id, "-f", "-n", "1")
    for one in (follower, leaver):
        assert one.stdout is not None and one.stdout.readline()
    sshd.stop()
    assert leaver.stderr is not None and "link lost" in leaver.stderr.readline()
    leaver.send_signal(signal.SIGINT)
    _, err = leaver.communicate(timeout=60)
    assert leaver.returncode == 130 and "what has become of the run is not known" in err and "goes on" not in err
    _, err = follower.communicate(timeout=60)
    assert follower.returncode == 3 and "reconnecting (2nd try)" in err and "state unknown" in err
    assert "tries did not bring it back" in err


def test_a_reader_who_stalls_is_no_dead_link_and_fills_no_memory(
    remote: Specctl, sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = remote.launch("--until", "process", "--", sys.executable, "-c", MANY, target="box")
    poll_until(lambda: remote.status("--all")["state"] == "SUCCEEDED")
    monkeypatch.setattr(verb, "IDLE_S", 2.5)
    fleet = Fleet(load_inventory(None, environ=remote.environ, cwd=remote.project, home=remote.home))
    try:
        with verb.run(fleet, verb.Request(run=launched.json["run_id"], follow=True, patience_s=0)) as found:
            numbers = []
            stalled = False
            for item in found.items:
                if isinstance(item, verb.Lines):
                    numbers += [line.partition(" ")[0] for line in item.text.splitlines()]
                    if not stalled:
                        stalled = True
                        before = time.monotonic()
                        poll_until(lambda before=before: time.monotonic() - before > 3.5)
                        held = [rss_kib(pid) for pid in agents_of(remote)]
                        assert held and max(held) < 30 << 10, "a bare agent has 19 MiB, and the log 19 MB"
    finally:
        fleet.close()
    assert numbers == [str(n) for n in range(200_000)]


def agents_of(specctl: Specctl) -> list[int]:
    """The agents that answer for the workdir just now."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(specctl.workdir).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def rss_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)


def test_a_reader_who_leaves_ends_both_sides_though_the_run_is_silent(specctl: Specctl) -> None:
    program = "echo step=1 tok/s=1; sleep 1000"
    run_id = specctl.launch("--", "sh", "-c", program).json["run_id"]
    follower = specctl.start("logs", run_id, "-f")
    assert follower.stdout is not None and follower.stdout.readline() == "step=1 tok/s=1\n"
    assert agents_of(specctl)
    follower.stdout.close()
    assert follower.wait(timeout=30) == 141
    poll_until(lambda: not agents_of(specctl))


def test_logs_that_are_rotated_and_emptied_are_followed_on_and_it_is_said(specctl: Specctl) -> None:
    log = specctl.home / "train.log"
    program = (
        "import os, sys, time\n"
        "log = open(sys.argv[1], 'a')\n"
        "def wait(name):\n    while not os.path.exists(name): time.sleep(.02)\n"
        "def say(n): print(f'mine {n}', file=log, flush=True); print(f'own {n}', flush=True)\n"
        "say(1); wait('rotate'); say(2); os.rename(sys.argv[1], sys.argv[1] + '.1')\n"
        "print('mine last', file=log, flush=True); log = open(sys.argv[1], 'a'); say(3)\n"
        "wait('empty'); log.truncate(0); say(4); wait('cut'); say(5); wait('end')\n"
    )
    run_id = specctl.launch("--until", "process", "--", sys.executable, "-c", program, str(log)).json["run_id"]
    out, err = specctl.home / "out", specctl.home / "err"
    with out.open("wb") as lines, err.open("wb") as said:
        follower = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "logs", run_id, "-f"], cwd=specctl.project, env=specctl.environ,
            stdin=subprocess.DEVNULL, stdout=lines, stderr=said,
        )  # fmt: skip

    def step(name: str, *after: str) -> None:
        poll_until(lambda: all(f"{one}\n" in out.read_text() for one in after), what=f"{after} in {out.read_text()!r}")
        (code(specctl, run_id) / name).touch()

    step("rotate", "mine 1", "own 1")
    step("empty", "mine 3", "mine last", "own 3")
    poll_until(lambda: "mine 4\n" in out.read_text() and "own 4\n" in out.read_text())
    os.truncate(log_of(specctl, run_id), 0)
    step("cut")
    step("end", "mine 5", "own 5")
    follower.wait(timeout=60)
    shown = out.read_text().splitlines()
    assert [line for line in shown if "mine" in line] == ["mine 1", "mine 2", "mine last", "mine 3", "mine 4", "mine 5"]
    assert [line for line in shown if "own" in line] == [f"own {n}" for n in range(1, 6)]
    told = err.read_text()
    assert "was rotated" in told and f"{log} was emptied" in told and "header is gone" in told


def test_a_damaged_run_directory_is_named_at_once(specctl: Specctl) -> None:
    run_id = finished(specctl, "step=1 tok/s=1\n")
    (specctl.run_dir(run_id) / "run.json").write_text("{")
    for words in ([], ["-f"], ["--errors"]):
        done = specctl("logs", run_id, *words)
        assert done.code == 3 and done.out == "" and "lost" not in done.err.lower()
        assert done.err.startswith(f"error: local {run_id}: its run directory is damaged")
