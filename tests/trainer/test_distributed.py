"""One training in several processes, under torch's DDP and FSDP2: the same steps as in threads, and the same files."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.trainer.support import TrainerProcess, events, losses, records, write_config
from trainer.checkpoint import Checkpoint, latest, steps_on_disk
from trainer.config import Config, ConfigError, load_config
from trainer.distributed.ranks import Ranks, ranks_from_environment, settled
from trainer.plan import forecast

Run = Callable[..., str]
PACED = {"loss": {"weights": "d-pace"}, "optimizer": {"lr": 3e-3, "ema": 0.9}}
"""What has to be known of all processes together before a step: the weights' sum, and what is not finite."""
BREAK = """
import os, trainer.replica
original = trainer.replica.Replica._begin
def broken(self, batch):
    if batch.step == 3 and os.environ["RANK"] == "1":
        raise ValueError("planted in one process")
    return original(self, batch)
trainer.replica.Replica._begin = broken
"""
KILL = """
import os, signal, trainer.replica, trainer.distributed.neighbours as neighbours
original = trainer.replica.Replica._begin
def killed(self, batch):
    if batch.step == 3 and os.environ["RANK"] == "{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch)
trainer.replica.Replica._begin = killed
"""
HANG_WITHOUT_A_WORD = """
import time, trainer.train
trainer.train.FAILED_WORKERS_TIMEOUT_S = 0.1
def hang_as_a_kernel_does(self, batch):
    if batch.step == 3 and os.environ["RANK"] == "0":
        time.sleep(600)
    return killed(self, batch)
trainer.replica.Replica._begin = hang_as_a_kernel_does
"""
HANG_ON_THE_MAIN_THREAD = """
import trainer.distributed.training as training
neighbours.LEAVE_S = 0.1
def hang(self, *, must_resume):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()
import threading
training.RankTraining.go_on = hang
"""
LOSE_THE_STORE = """
import contextlib, torch.distributed as dist, trainer.distributed.world as world
original = world.World.leave
def alone(self):
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    self._store = dist.TCPStore("127.0.0.1", keeper.port, is_master=False)
    del keeper
    with contextlib.suppress(RuntimeError):
        while True:
            self._store.set("still", "there")
    original(self)
world.World.leave = alone
"""
HANG = """
import os, time, trainer.replica, trainer.train
trainer.train.FAILED_WORKERS_TIMEOUT_S = 1.0
original = trainer.replica.Replica._begin
def hang_in_one_process(self, batch):
    if batch.step == 3 and os.environ["RANK"] == "1":
        time.sleep(600)
    return original(self, batch)
trainer.replica.Replica._begin = hang_in_one_process
"""
BREAK_WHILE_LOADING = """
import os, sys, time, trainer.train
original = trainer.train.load_targets
def broken(*given):
    if os.environ["RANK"] == "1":
        raise ValueError("planted while loading")
    time.sleep(600)
trainer.train.load_targets = broken
"""
OTHERWISE = """
import os, trainer.config
original = trainer.config.Config.what_a_resume_must_keep
def otherwise(self):
    return {**original(self), "seed": os.environ["RANK"]}
trainer.config.Config.what_a_resume_must_keep = otherwise
"""
REFUSE = """
import os, trainer.train, trainer.distributed.reporting
from trainer.config import ConfigError
trainer.distributed.reporting.OTHERS_REFUSE_S = {wait_s}
original = trainer.train.load_rows
def refuse(*given, **more):
    if os.environ["RANK"] in {ranks!r}:
        raise ConfigError("data.paths: planted")
    return original(*given, **more)
trainer.train.load_rows = refuse
"""
WEIGH = """
import os, trainer.distributed.replica as module
original = module.RankReplica._update
def weigh(self):
    grads = [module._local(one.grad) for one in self._parameters.values()]
    sizes = sum(one.untyped_storage().nbytes() for one in self.state()), sum(one.nbytes for one in grads)
    os.write(1, f"holds {sum(sizes)} bytes\\n".encode())
    return original(self)
module.RankReplica._update = weigh
"""
TELL_MULTICAST = """
import os, torch.distributed as dist
os.environ.pop("NCCL_NVLS_ENABLE", None)
if os.environ["RANK"] == "1":
    os.environ["NCCL_NVLS_ENABLE"] = "1"
original = dist.init_process_group
def told(*given, **more):
    os.write(1, "NCCL_NVLS_ENABLE={NCCL_NVLS_ENABLE} in process {RANK}\\n".format_map(os.environ).encode())
    return original(*given, **more)
dist.init_process_group = told
"""
SPOIL = """
import os, trainer.model.target
original = trainer.model.target.Target.features
calls = []
def spoilt(self, *inputs):
    calls.append(1)
    features = original(self, *inputs)
    return features * float("nan") if len(calls) == 2 and os.environ["RANK"] == "1" else features
trainer.model.target.Target.features = spoilt
"""


@pytest.fixture
def run(forks: subprocess.Popen[str], settings: dict[str, Any], tmp_path: Path) -> Run:
    """Train in so many processes, or in threads, with changed settings; returns what was printed."""

    def start(run_dir: Path, processes: int | None = None, *, expect: int = 0, planted: str = "", **changed: Any
              ) -> str:  # fmt: skip
        run_dir.mkdir(exist_ok=True)
        own = {**settings, **changed}
        if processes:
            own["devices"] = {"target": ["cpu"], "drafter": ["cpu"] * processes}
        config, out = write_config(own, tmp_path / "config.yaml"), tmp_path / f"{run_dir.name}.log"
        request = {
            "argv": ["train", str(config)], "save": 0, "run_dir": str(run_dir), "death": None, "out": str(out),
            **({"processes": processes, "planted": planted} if processes else {}),
        }  # fmt: skip
        out.write_text("")
        assert forks.stdin is not None and forks.stdout is not None
        forks.stdin.write(json.dumps(request) + "\n")
        forks.stdin.flush()
        forks.stdout.readline()
        code = os.waitstatus_to_exitcode(int(forks.stdout.readline()))
        text = out.read_text()
        assert code == expect, text
        return text

    return start


def saved(run_dir: Path) -> Checkpoint:
    found = latest(run_dir / "checkpoints", say=pytest.fail)
    assert found is not None
    return found


def alike(one: Checkpoint, other: Checkpoint) -> None:
    for part in ("weights", "optimizer", "averages"):
        tensors, others = getattr(one, part), getattr(other, part)
        assert tensors.keys() == others.keys(), part
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, others[name], rtol=2e-3, atol=2e-4)


# --- the same as in threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "changed"), [("ddp", {}), ("fsdp2", {}), ("ddp", PACED), ("fsdp2", PACED)])
def test_processes_take_the_steps_that_threads_take(run: Run, tmp_path: Path, engine: str, changed: dict[str, Any]
                                                    ) -> None:  # fmt: skip
    run(tmp_path / "threads", **changed)
    out = run(tmp_path / "processes", 2, engine=engine, **changed)
    assert losses(tmp_path / "processes") == pytest.approx(losses(tmp_path / "threads"), rel=1e-5)
    one, other = saved(tmp_path / "processes"), saved(tmp_path / "threads")
    alike(one, other)
    assert all(one.state[key] == other.state[key] for key in ("cursor", "tokens", "skipped", "must_keep"))

    def of_workers(run_dir: Path) -> dict[tuple[int, str], float]:
        rows = records(run_dir, "metrics.jsonl")
        return {(row["step"], row["worker"]): row["loss"] for row in rows if row["loss"] and row["worker"]}

    assert of_workers(tmp_path / "processes") == pytest.approx(of_workers(tmp_path / "threads"), rel=1e-5)
    assert sorted(event["worker"] for event in events(tmp_path / "processes", "worker_up")) == [
        "drafter-0", "drafter-1", "loader-0", "loader-1", "target-0", "target-1",
    ]  # fmt: skip
    assert [event["phase"] for event in events(tmp_path / "processes", "phase")] == [
        "import", "data", "load_target", "compile_warmup", "train", "checkpoint", "train",
    ]  # fmt: skip
    assert "step=6 worker=drafter-0 " in out and "step=6 worker=drafter-1 " in out and out.count("\nstep=6 loss=") == 1
    (ended,) = events(tmp_path / "processes", "ended")
    assert (ended["code"], ended["stopped"]) == (0, False)


def test_a_run_goes_on_in_threads_or_processes_whatever_it_was_before(run: Run, tmp_path: Path) -> None:
    schedule = {"optimizer": {**PACED["optimizer"], "schedule": "constant"}}
    run(tmp_path / "threads", steps=8, **schedule)
    for steps, (engine, processes) in enumerate([("fsdp2", 4), ("auto", None), ("ddp", 1), ("fsdp2", 2)], start=1):
        out = run(tmp_path / "changing", processes, engine=engine, steps=2 * steps, **schedule)
        assert steps == 1 or f"resume from step-{2 * steps - 2} " in out
    assert "engine ddp -> fsdp2" in out and out.count("resume from") == 1
    assert losses(tmp_path / "changing") == pytest.approx(losses(tmp_path / "threads"), rel=1e-5)
    alike(saved(tmp_path / "changing"), saved(tmp_path / "threads"))


def test_weights_to_start_from_and_evaluations_on_the_way_are_the_same_in_shards(
    run: Run, settings: dict[str, Any], tmp_path: Path
) -> None:
    run(tmp_path / "first", steps=2)
    changed = {
        "drafter": {**settings["drafter"], "start_from": str(tmp_path / "first")}, "optimizer": PACED["optimizer"],
        "evaluate_every": 2, "evaluation": {"prompts": 2, "max_tokens": 4}, "steps": 4,
    }  # fmt: skip
    run(tmp_path / "threads", **changed)
    run(tmp_path / "shards", 2, engine="fsdp2", **changed)
    assert losses(tmp_path / "shards") == pytest.approx(losses(tmp_path / "threads"), rel=1e-5)
    taus = [[event["tau"] for event in events(tmp_path / name, "evaluation")] for name in ("shards", "threads")]
    assert taus[0] == taus[1] and len(taus[0]) == 2


def test_layers_are_compiled_once_each_in_processes_that_shard_them(run: Run, settings: dict[str, Any], tmp_path: Path
                                                                    ) -> None:  # fmt: skip
    settings["drafter"]["layers"] = 3  # the last two by one function
    out = run(tmp_path / "run", 1, engine="fsdp2", compile_on_cpu="aot_eager", steps=2)
    assert "phase=compile_warmup unit=1/1 device=cpu shape=4x48+8x4 compiled=" in out
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_what_processes_hold_is_what_is_planned(
    run: Run, settings: dict[str, Any], tiny_target: Path, tmp_path: Path, engine: str
) -> None:
    changed = {"engine": engine, "steps": 1, "optimizer": PACED["optimizer"]}
    out = run(tmp_path / "run", 2, planted=WEIGH, **changed)
    held = [int(line.split()[1]) for line in out.splitlines() if line.startswith("holds ")]
    config, model = Config.model_validate({**settings, **changed}), AutoConfig.from_pretrained(tiny_target)
    shape = forecast.shape_for(model, config.drafter, captured=3)
    found = forecast.memory(config, model, shape, layer_ids=[1, 2, 3], parameters=1000)
    assert len(held) == 2 and found["cpu"].drafters == pytest.approx(sum(held), rel=0.01)
    assert found["cpu"].target == 2 * 4000


# --- how it ends ----------------------------------------------------------------------------------------------------


def test_what_fails_in_one_process_ends_all_with_its_own_traceback_once(run: Run, tmp_path: Path) -> None:
    out = run(tmp_path / "run", 2, engine="ddp", planted=BREAK, expect=1)
    assert out.count("Exception in thread") == out.count("Exception in thread drafter-1:") == 1, out
    (told,) = events(tmp_path / "run", "exception")
    assert (told["worker"], told["type"], told["message"]) == ("drafter-1", "ValueError", "planted in one process")
    (ended,) = events(tmp_path / "run", "ended")
    assert ended["code"] == 1


HOW_IT_WENT = "(was killed by SIGKILL|has gone without a word)"
"""The second where torchrun has asked the kernel for its exit code before its neighbour could look."""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_is_why_the_others_end(run: Run, tmp_path: Path, rank: int) -> None:
    out = run(tmp_path / "run", 2, engine="ddp", planted=KILL.format(rank=rank), expect=1)
    assert len(re.findall(rf"process {rank} \(pid \d+\) {HOW_IT_WENT}; the others end for it\n", out)) == 1, out
    assert "Exception in thread" not in out and "phase=stopping" not in out
    assert not events(tmp_path / "run", "exception")
    (gone,) = events(tmp_path / "run", "process_gone")
    assert gone["rank"] == rank and gone["code"] in (-9, None)
    ends = [one["error"] for one in events(tmp_path / "run", "ended")]  # the first one's
    said = re.compile(rf"process 1 \(pid {gone['pid']}\) {HOW_IT_WENT}; this one ended for it")
    assert len(ends) == rank and all(map(said.fullmatch, ends))


def test_a_training_that_its_launcher_did_not_outlive_ends_well_all_the_same(run: Run, tmp_path: Path) -> None:
    out = run(tmp_path / "run", 2, engine="ddp", planted=LOSE_THE_STORE)
    assert "sendBytes failed" in out and "Traceback" not in out, out
    (ended,) = events(tmp_path / "run", "ended")
    assert (ended["code"], saved(tmp_path / "run").step) == (0, 6)


def test_who_waits_for_a_killed_one_in_what_cannot_be_interrupted_ends_all_the_same(run: Run, tmp_path: Path) -> None:
    out = run(tmp_path / "run", 2, engine="ddp", planted=KILL.format(rank=1) + HANG_WITHOUT_A_WORD, expect=1)
    assert "process 1 (pid " in out and "trainer: left behind: drafter-0\n" in out, out
    (ended,) = events(tmp_path / "run", "ended")
    assert re.search(HOW_IT_WENT, ended["error"])


def test_nobody_is_stuck_for_a_killed_one_on_the_main_thread(run: Run, tmp_path: Path) -> None:
    out = run(tmp_path / "run", 2, planted=KILL.format(rank=None) + HANG_ON_THE_MAIN_THREAD, expect=1)
    assert re.search(rf"trainer: stuck for 0 s since process 1 \(pid \d+\) {HOW_IT_WENT}: ends now\n", out), out


def test_who_is_ended_for_another_that_has_failed_does_not_say_that_it_was_asked_to_stop(
    run: Run, tmp_path: Path
) -> None:
    out = run(tmp_path / "run", 2, engine="ddp", planted=BREAK_WHILE_LOADING, expect=1)
    assert "ValueError: planted while loading" in out
    assert [one for one in events(tmp_path / "run", "ended") if one["stopped"] or not one["code"]] == []


def test_a_step_that_is_not_finite_in_one_process_changes_nothing_in_any(run: Run, tmp_path: Path) -> None:
    out = run(tmp_path / "run", 2, engine="fsdp2", on_nonfinite="skip", planted=SPOIL)
    assert "not finite, so nothing changes at step 2 (skipped 1 of at most 10): drafter-1; samples " in out
    assert saved(tmp_path / "run").state["skipped"] == 1
    out = run(tmp_path / "other", 2, engine="ddp", planted=SPOIL, expect=1)
    assert out.count("NonFinite: drafter-1: loss nan") == 1
    assert [event["worker"] for event in events(tmp_path / "other", "exception")] == ["drafter-1"]


@pytest.mark.timeout(400)
def test_torchrun_that_is_told_to_stop_stops_all_after_the_same_step_with_a_checkpoint(
    torchrun: Callable[..., TrainerProcess], settings: dict[str, Any], tmp_path: Path
) -> None:
    settings |= {"steps": 100_000, "checkpoint_every": 100_000, "output_dir": str(tmp_path / "run")}
    started = torchrun(write_config(settings, tmp_path / "long.yaml"), 2)
    started.wait_for_step(3, timeout_s=150)
    started.terminate()
    _, out, err = started.finish(timeout_s=150)
    assert "phase=stopping\n" in out and "Exception" not in err.replace("SignalException", "")
    (step,) = steps_on_disk(tmp_path / "run" / "checkpoints")
    last = {row["worker"]: row["step"] for row in records(tmp_path / "run", "metrics.jsonl")}
    assert last == dict.fromkeys([None, "drafter-0", "drafter-1", "target-0", "target-1", "loader-0", "loader-1"], step)
    (ended,) = events(tmp_path / "run", "ended")
    assert (ended["code"], ended["stopped"]) == (0, True)


def test_who_hangs_in_another_process_is_in_the_log_of_that_process(run: Run, tmp_path: Path) -> None:
    out = run(tmp_path / "run", 2, engine="ddp", planted=HANG, watchdog={"least_s": 2, "factor": 1}, expect=1)
    assert "when drafter-0 gave up" in out
    stacks = {event["worker"]: event["stacks"] for event in events(tmp_path / "run", "no_progress")}
    assert "hang_in_one_process" in stacks["drafter-1"]["drafter-1"]
    assert [event["type"] for event in events(tmp_path / "run", "exception")] == ["trainer.watchdog.NoProgress"]


@pytest.mark.parametrize(
    ("ranks", "wait_s", "said"),
    [("01", 600.0, "trainer: data.paths: planted\n"), ("1", 0.1, "trainer: process 1: data.paths: planted\n")],
)
def test_a_refusal_is_said_once_whoever_finds_the_reason(
    run: Run, tmp_path: Path, ranks: str, wait_s: float, said: str
) -> None:
    out = run(tmp_path / "run", 2, planted=REFUSE.format(ranks=ranks, wait_s=wait_s), expect=1)
    assert said in out and out.count("data.paths: planted") == 1, out


# --- what is asked for ----------------------------------------------------------------------------------------------


def test_multicast_between_gpus_is_off_before_nccl_begins_unless_the_environment_says_otherwise(
    run: Run, tmp_path: Path
) -> None:
    out = run(tmp_path / "run", 2, planted=TELL_MULTICAST, steps=1)
    assert sorted(line for line in out.splitlines() if line.startswith("NCCL_")) == [
        "NCCL_NVLS_ENABLE=0 in process 0", "NCCL_NVLS_ENABLE=1 in process 1",
    ]  # fmt: skip


def test_machines_with_other_data_or_another_target_do_not_train_together(run: Run, tmp_path: Path) -> None:
    out = run(tmp_path / "run", 2, planted=OTHERWISE, expect=1)
    assert out.count("trainer: process 1 has not the same seed as process 0; give all machines the same") == 1


def ranks(size: int) -> Ranks:
    return Ranks(rank=0, size=size, local_rank=0, local_size=size)


def configured(settings: dict[str, Any], path: Path, **changed: Any) -> Config:
    return load_config(str(write_config({**settings, **changed}, path / "config.yaml")))


def test_the_engine_follows_from_who_started_the_process(settings: dict[str, Any], tmp_path: Path) -> None:
    config = configured(settings, tmp_path)
    assert settled(config, None).engine == "threads"
    assert settled(config, ranks(2)).engine == "ddp"
    environment = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert ranks_from_environment(environment) == Ranks(rank=3, size=8, local_rank=1, local_size=2)
    assert ranks_from_environment({"RANK": "3"}) is None


@pytest.mark.parametrize(
    ("changed", "size", "said"),
    [
        ({"engine": "fsdp2"}, None, "engine: fsdp2 needs a process for each device, which torchrun starts: python -m"),
        ({"engine": "threads"}, 2, "engine: threads is one process, and torchrun has started 2; say ddp or fsdp2"),
        ({"batch_size": 2, "devices": "auto"}, 4, "batch_size: must be a multiple of the 4 processes, is 2"),
        ({}, 4, "devices: under torchrun each of the 4 processes has one device"),
        ({"devices": {"target": ["cuda:0"], "drafter": ["cuda:1", "cuda:2"]}}, 2, "devices: under torchrun each"),
        ({"sync": "params"}, 2, "sync: params is not there under torchrun (engine: ddp); leave it out, or train in"),
        ({"on_worker_death": "degrade"}, 2, "on_worker_death: degrade is not there under torchrun"),
        ({"engine": "fsdp2", "cuda_graphs": "on"}, 2, "cuda_graphs: on is not there under torchrun (engine: fsdp2)"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_in_a_line(
    settings: dict[str, Any], tmp_path: Path, changed: dict[str, Any], size: int | None, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settled(configured(settings, tmp_path, **changed), size and ranks(size))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
