"""The memory planner against a real step: to a few percent, for shapes and settings of all kinds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.trainer.support import IMPORTS, REPOSITORY, documents
from tests.trainer.test_doctor import examined
from trainer.doctor.checks_memory import peak_of
from trainer.plan.live_bytes import LiveBytes, bytes_of

SMOLLM2 = Path("~/.cache/specctl/models/SmolLM2-135M-Instruct").expanduser()


def test_storages_count_once_and_for_as_long_as_anything_holds_them() -> None:
    before = torch.ones(1000)
    with LiveBytes() as live:
        made = before + 1
        part = made[:10]
        before.add_(1)
        assert live.now == live.peak == bytes_of(made) == bytes_of(made, part) == 4000
        del made
        assert live.now == 4000, "the part holds all of it"
        del part
        assert live.now == 0 and live.peak == 4000


def allocated(work: Callable[[], Any]) -> int:
    """What the CPU's own allocator says of the same."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    now = peak = 0
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_what_is_counted_of_a_step_is_what_the_allocator_gave_out(
    train: Callable[..., Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.micro_batch import MicroBatch
    from trainer.replica import Replica

    batches: list[MicroBatch] = []
    original = Replica.loss_and_gradients

    def noted(self: Replica, batch: MicroBatch) -> None:
        batches.append(batch)
        original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", noted)
    member = train({**settings, "steps": 2}).members[0]

    def step() -> None:
        member.step(batches[:1], lr=1e-3, hashed=False)

    step()
    assert peak_of(member.device, step) == pytest.approx(allocated(step), rel=0.02)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"data": {"packing": True, "sequence_length": 64, "buckets": [32, 64]}},
        {"loss": {"kernel": "chunked", "chunk_rows": 20}},
        {"loss": {"weights": "d-pace"}, "optimizer": {"lr": 1e-3, "ema": 0.99}},
        {"drafter": {"dtype": "bfloat16", "layers": 3, "anchors": 40}},
        {"target": {"dtype": "bfloat16"}, "sync": "params"},
        {"drafter": {"layers": 4, "anchors": 40, "block_size": 8, "intermediate_size": 512}, "batch_size": 6},
        {"compile_on_cpu": "aot_eager"},
    ],
    ids=lambda change: " ".join(change) or "as it is",
)
def test_the_plan_is_within_ten_percent_of_a_real_step(
    settings: dict[str, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    for key, value in change.items():
        settings[key] = {**settings[key], **value} if key in settings and isinstance(value, dict) else value
    if settings["data"].get("packing"):
        settings["data"]["paths"] = documents(tmp_path)
    found = examined(settings, "memory")["memory"]
    assert found.status == "ok", found.evidence
    planned, measured = found.facts["planned"]["cpu"], found.facts["measured"]["cpu"]
    for part in ("drafters", "queues", "work", "peak"):
        assert planned[part] == pytest.approx(measured[part], rel=0.1), part
    assert planned["target"] == pytest.approx(measured["target"], rel=0.1)


@pytest.mark.timeout(600)
def test_the_doctor_finds_the_demo_well_and_its_memory_as_planned(tmp_path: Path) -> None:
    if not (SMOLLM2 / "COMPLETE.json").exists():
        missing = f"no target in {SMOLLM2}: run scripts/fetch_smollm2.py"
        if os.environ.get("CI") == "true":
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    config = str(REPOSITORY / "configs" / "smollm2-cpu.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "doctor", config, "--quick", "--json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": IMPORTS}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads(done.stdout)
    # Cores and disk are this machine's own affair.
    assert not [check for check in report["checks"] if check["status"] in ("fail", "skip")]
    (memory,) = [check for check in report["checks"] if check["name"] == "memory"]
    assert abs(memory["facts"]["apart"]["cpu"]) < 0.1
    loss = next(check["facts"] for check in report["checks"] if check["name"] == "first loss")
    assert loss["ln_vocabulary"] == pytest.approx(10.80, abs=0.01)
