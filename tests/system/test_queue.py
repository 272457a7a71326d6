"""GPUs that a run claims, and the line of those that wait for them, as a user meets both: `--gpus`, `--queue`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.agent import proc
from tests.driver import Specctl, poll_until
from tests.smi import ONE, TWO, Smi

SLEEPS = ("--no-source", "--until", "process", "--", "sh", "-c", "echo gpus=$CUDA_VISIBLE_DEVICES; exec sleep 600")


class Box(Specctl):
    """A machine with two GPUs, as its nvidia-smi says."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = self.home / "claims"
        self.claims.mkdir()
        self.claims.chmod(0o1777)
        self.inventory.write_text(f"targets:\n  local: {{workdir: {self.workdir}, claims_dir: {self.claims}}}\n")
        self.smi = Smi(self.home / "bin")
        self.environ["PATH"] = f"{self.home}/bin:{os.environ['PATH']}"
        self.environ.pop("CUDA_VISIBLE_DEVICES", None)

    def started(self, *words: str, name: str) -> str:
        """The id of a run that was launched, and sees the GPUs that it has."""
        done = self.launch("--name", name, *words, *SLEEPS)
        assert done.code == 0 and done.json["verified"], done
        return str(done.json["run_id"])

    def queued(self, *words: str, name: str) -> str:
        done = self.launch("--name", name, "--queue", *words, *SLEEPS)
        found = done.json
        assert (done.code, found["state"], found["verified"], found["queued"]) == (0, "QUEUED", False, True), done
        assert found["error"] is None and found["rung"] == "session"
        return str(found["run_id"])

    def sees(self, run_id: str) -> str:
        """What the program saw as its GPUs, by its own words."""
        log = self.run_dir(run_id) / f"{run_id}.a1.log"
        line = poll_until(lambda: next((one for one in log.read_text().splitlines() if one.startswith("gpus=")), None))
        return str(line).removeprefix("gpus=")

    def running(self, run_id: str) -> dict[str, Any]:
        row = poll_until(lambda: (found := self.status(run_id))["state"] != "QUEUED" and found, what="its turn")
        return dict(row)

    def supervisor(self, run_id: str) -> int:
        return int(json.loads((self.run_dir(run_id) / "supervisor.json").read_text())["pid"])


@pytest.fixture
def box() -> Iterator[Box]:
    found = Box()
    yield found
    found.close()


def test_a_second_launch_on_claimed_gpus_is_refused_by_the_name_of_who_has_them(box: Box) -> None:
    first = box.started(name="first")
    assert box.sees(first) == f"{ONE},{TWO}", "by UUID, and all that there are, since nothing was said"
    assert sorted(path.name for path in box.claims.iterdir()) == sorted([f"{ONE}.lock", f"{TWO}.lock", "turn.lock"])
    held = {path for pid in box.processes(first) for _, path in proc.open_paths(pid)}
    assert held and not [path for path in held if path.startswith(str(box.claims))], "the lock is its supervisor's"
    done = box("launch", "local", *SLEEPS)
    assert done.code == 1 and f"GPU 0, 1 cannot be claimed: GPU 0, 1 held by run {first} of " in done.err, done.err
    assert "; nothing was started" in done.err and "--queue waits in line" in done.err
    assert [run.name for run in (box.workdir / "runs").iterdir()] == [first]
    shown = box("show", first).out
    assert f"has claimed 0 ({ONE}), 1 ({TWO}) in {box.claims}" in " ".join(shown.split())
    assert box("launch", "local", "--gpus", "none", "--plan", "--", "true").out.count("none is claimed") == 1
    free = box.started("--gpus", "none", name="free")
    shared = box.started("--no-claim", name="shared")
    assert (box.sees(free), box.sees(shared)) == ("", "")
    assert box.status(free)["gpu_claim"] is None is box.status(shared)["gpu_claim"]


def test_two_runs_have_a_gpu_each_and_the_third_none(box: Box) -> None:
    first = box.started("--gpus", "1", name="first")
    second = box.started("--gpus", TWO[:8], name="second")
    assert (box.sees(first), box.sees(second)) == (ONE, TWO)
    done = box("launch", "local", "--gpus", "1", *SLEEPS)
    assert done.code == 1 and "1 of GPU 0, 1 cannot be claimed" in done.err and first in done.err and second in done.err
    changes = {one["word"]: (one["a"], one["b"]) for one in box("compare", first, second, "--json").json["changes"]}
    assert ONE in changes["GPUs"][0] and TWO in changes["GPUs"][1]
    box.smi.lists(TWO, ONE)  # as after a reboot with another order: a number means another one, a UUID does not
    row = box.status(first)
    assert [one["uuid"] for one in row["gpu_claim"]["held"]] == [ONE]
    assert box("stop", second, "--now").code == 0
    third = box.started("--gpus", "1", name="third")
    assert box.sees(third) == TWO


def test_a_queued_run_is_told_where_it_stands_and_starts_when_it_is_its_turn(box: Box) -> None:
    first = box.started(name="first")
    second, third = box.queued(name="second"), box.queued("--gpus", "GPU-58", name="third")
    row = box.status(third)
    assert row["state"] == "QUEUED" and row["why"].startswith(f"2nd in line for GPU 1 held by run {first} of ")
    assert f"next before it: run {second}; queued " in row["why"] and row["in_line"]["position"] == 2
    said = box("status").out
    assert "QUEUED" in said and f"GPU 1 NVIDIA H200: 0 % busy, 3 of 143,771 MiB  idle  claimed by {first}" in said
    assert "QUEUED" in box("ls").out and "QUEUED" in box("show", third).out
    logs = box("logs", third)
    assert logs.out == "" and "QUEUED (2nd in line" in logs.err and "its program has not started" in logs.err
    assert box("launch", "local", "--gpus", "GPU-58", *SLEEPS).code == 1
    watch = box.start("watch", second)
    assert box("stop", first, "--now").code == 0
    assert box.running(second)["state"] in ("STARTING", "RUNNING") and box.sees(second) == f"{ONE},{TWO}"
    row = box.status(third)
    assert row["state"] == "QUEUED" and f"1st in line for GPU 1 held by run {second}" in row["why"]
    assert box("stop", second, "--now").code == 0
    told, _ = watch.communicate(timeout=60)
    assert f"waits in line for GPU 0, 1: GPU 0, 1 held by run {first}" in told and "has GPU 0, 1 after " in told, told
    box.running(third)
    assert box.sees(third) == TWO and box.status(third)["in_line"] is None


def test_a_run_that_is_stopped_in_line_is_stopped_and_makes_room(box: Box) -> None:
    first = box.started(name="first")
    second, third = box.queued(name="second"), box.queued(name="third")
    done = box("stop", second)
    assert done.code == 0 and "STOPPED" in done.out and "while it waited in line for GPU 0, 1" in done.out, done
    row = box.status(second)
    assert row["state"] == "STOPPED" and "while it waited" in row["why"]
    assert box("logs", second).out == "" and not box.processes(second)
    assert box.status(third)["in_line"]["position"] == 1
    os.kill(pid := box.supervisor(third), signal.SIGSTOP)
    poll_until(lambda: (found := proc.stat(pid)) is not None and found[0].stopped)
    row = box.status(third)
    assert row["state"] == "QUEUED" and f"its supervisor is stopped (state T; there: kill -CONT {pid})" in row["why"]
    assert box("stop", third).code == 0, "a stop wakes it"
    assert box.status(third)["state"] == "STOPPED" and box.processes(first)


def test_who_dies_in_line_never_started_and_keeps_nobody_waiting(box: Box) -> None:
    first = box.started(name="first")
    second, third = box.queued(name="second"), box.queued(name="third")
    subprocess.run(["tmux", "-S", box.workdir / f"tmux-{os.geteuid()}", "kill-server"], check=True)
    assert box.status(second)["state"] == "QUEUED", "it is its supervisor that waits, not tmux"
    os.kill(box.supervisor(second), signal.SIGKILL)
    row = poll_until(lambda: (found := box.status(second))["state"] != "QUEUED" and found)
    assert row["state"] == "NEVER_STARTED" and "its supervisor is gone while it waited in line" in row["why"]
    assert box.status(third)["in_line"]["position"] == 1
    record = box.run_dir(second) / "supervisor.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "boot": "another"}))
    row = box.status(second)
    assert row["state"] == "NEVER_STARTED" and "the container restarted while it waited in line" in row["why"]
    box.kill(first)
    box.running(third)
    assert box.sees(third) == f"{ONE},{TWO}"


def test_a_start_that_is_repeated_adopts_the_run_that_waits(box: Box) -> None:
    first = box.started(name="first")
    second = box.queued(name="second")
    code = """
import json, os, sys
from pathlib import Path
from orchestrator.fleet import Fleet
from orchestrator.inventory import load_inventory
fleet = Fleet(load_inventory(None, environ=os.environ, cwd=Path.cwd(), home=Path.home()))
spec = {**json.loads(Path(sys.argv[1]).read_text())["spec"], **json.loads(sys.argv[2])}
print(json.dumps(fleet.agent(fleet.inventory.resolve("local")).call("start", spec=spec, secrets={})))
"""

    def start(**changes: Any) -> Any:
        words = [sys.executable, "-c", code, box.run_dir(second) / "run.json", json.dumps(changes)]
        return json.loads(
            subprocess.run(words, env=box.environ, cwd=box.project, capture_output=True, check=True).stdout
        )

    before, answer = box.supervisor(second), start()
    assert answer["adopted"] is True and answer["never_started"] is None
    assert box.supervisor(second) == before and box.status(second)["state"] == "QUEUED"
    # Of two launches at once that have both found the GPUs free, one is second.
    late = start(run_id="late", nonce="n" * 32, wish={"wanted": True, "must": True, "claims_dir": str(box.claims)})
    assert f"GPU 0, 1 cannot be claimed: GPU 0, 1 held by run {first}" in late["never_started"], late
    assert box.status("late")["state"] == "NEVER_STARTED"


def test_memory_that_somebody_has_who_cannot_be_seen_is_a_neighbour(box: Box) -> None:
    box.smi.uses(20480, 3)
    done = box("launch", "local", *SLEEPS)
    assert done.code == 1, done
    assert "GPU 0 used by something not visible from here (20,480 of 143,771 MiB), which has no claim" in done.err
    other = box.started("--gpus", "1", name="other")
    assert box.sees(other) == TWO, "the one that nobody uses"
    waits = box.queued("--gpus", "GPU-b4", name="waits")
    assert "something not visible from here" in box.status(waits)["why"]
    box.smi.uses(3, 3)
    box.running(waits)
    assert box.sees(waits) == ONE


def test_a_claim_ends_with_its_supervisor_although_the_run_goes_on_whose_memory_is_seen(box: Box) -> None:
    first = box.started("--gpus", "GPU-b4", name="first")
    (lock := box.claims / f"{ONE}.lock").rename(box.home / "away")
    record = box.run_dir(first) / "gpus.json"
    claim = json.loads(record.read_text())
    for wrong in ({"number": "x"}, {"uuid": "\x1b[2J"}, {"number": 7}):  # as a program may write it
        record.write_text(json.dumps({**claim, "held": [{**claim["held"][0], **wrong}]}))
        assert box.status(first)["gpu_claim"] is None, wrong
    record.write_text(json.dumps(claim))
    poll_until(lock.exists, what="its supervisor made it anew")
    assert "its claim" not in box.status(first)["why"]
    os.kill(box.supervisor(first), signal.SIGKILL)
    poll_until(lambda: "supervisor gone, and with it its claim of GPU 0" in box.status(first)["why"])
    box.smi.uses(20480, 3)
    done = box("launch", "local", "--gpus", "GPU-b4", *SLEEPS)
    assert done.code == 1 and "GPU 0 used by " in done.err and "held by" not in done.err


def test_claims_that_cannot_be_kept_are_refused_before_anything_is_sent(box: Box) -> None:
    box.inventory.write_text(f"targets:\n  local: {{workdir: {box.workdir}, claims_dir: {box.home}/not-mounted}}\n")
    done = box("launch", "local", *SLEEPS)
    assert done.code == 1 and "not-mounted: No such file or directory; nothing was started" in done.err, done.err
    assert "mount it into the container" in done.err and "--no-claim" in done.err
    box.smi.lists()
    assert box("launch", "local", *SLEEPS).code == 0, "where no GPU is, nothing is claimed"
    done = box("launch", "local", "--queue", *SLEEPS)
    assert done.code == 1 and "nvidia-smi -L lists no GPU there" in done.err
