"""The race is alive on this machine, and the plan leaves it no room: many starts of a process, and processes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.proxy import TracerBase

from bench.compile_race import Start, start
from tests.trainer.support import TrainerProcess, losses, write_config
from trainer.replica import Replica

CUDA = torch.device("cuda:0")
PATIENCE_S = 60.0
"""After which who waits for others goes on; then what was to be shown is not."""
SOUND = Start(raised=[], late=0, equal=True)
NESTED = "Detected that you are using FX to symbolically trace a dynamo-optimized function"


@pytest.fixture
def slow_tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every node that the tracer makes takes a while, in which the other threads run."""
    create_node = TracerBase.create_node

    def slowly(*positional: Any, **named: Any) -> Any:
        time.sleep(0.0005)
        return create_node(*positional, **named)

    monkeypatch.setattr(TracerBase, "create_node", slowly)
    yield


@pytest.fixture
def unlucky_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is the first to step; the others come to their first step in the midst of its first trace, which goes
    on once they have been through it or are dead. Nothing but the time at which they come is different."""
    step, create_node = Replica.step, TracerBase.create_node
    first, tracing, answered = threading.Lock(), threading.Event(), threading.Event()

    def create_node_when_others_have_come(*positional: Any, **named: Any) -> Any:
        # Dynamo makes nodes too, in a trace of its own that disturbs nobody.
        if torch.fx._symbolic_trace._is_fx_tracing_flag:
            tracing.set()
            if not answered.wait(PATIENCE_S):
                answered.set()
        return create_node(*positional, **named)

    def step_in_the_midst_of_a_trace(self: Replica, *positional: Any, **named: Any) -> Any:
        if first.acquire(blocking=False):
            return step(self, *positional, **named)
        tracing.wait(PATIENCE_S)
        try:
            return step(self, *positional, **named)
        finally:
            answered.set()

    monkeypatch.setattr(TracerBase, "create_node", create_node_when_others_have_come)
    monkeypatch.setattr(Replica, "step", step_in_the_midst_of_a_trace)


@pytest.mark.usefixtures("unlucky_threads")
@pytest.mark.skipif(
    hasattr(torch.compiler, "_compile_session_context"), reason="this torch hides its compiler's traces from others"
)
def test_threads_without_the_plan_kill_each_other() -> None:
    raised = start([CUDA] * 3, planned=False, steps=2, graphs=False).raised
    assert any(NESTED in error for error in raised), raised


@pytest.mark.usefixtures("slow_tracer")
@pytest.mark.parametrize("graphs", [False, True])
def test_fresh_starts_with_the_plan_lose_no_thread_and_compile_nothing_later(graphs: bool) -> None:
    for _ in range(10):
        assert start([CUDA] * 3, planned=True, steps=5, graphs=graphs) == SOUND


@pytest.mark.usefixtures("slow_tracer")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("graphs", [False, True])
def test_fresh_starts_with_a_device_for_each_thread_lose_none_and_end_with_equal_replicas(graphs: bool) -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for _ in range(5):
        assert start(devices, planned=True, steps=5, graphs=graphs) == SOUND


def test_twenty_processes_four_at_a_time_share_compiled_code_and_lose_no_thread(
    start_trainer: Callable[..., TrainerProcess], on_gpu: dict[str, Any], tmp_path: Path
) -> None:
    def one(number: int) -> list[float]:
        (run_dir := tmp_path / f"run-{number}").mkdir()
        settings = {**on_gpu, "compile_cache": str(tmp_path / "cache"), "output_dir": str(run_dir / "out")}
        code, out, err = start_trainer(write_config(settings, run_dir / "config.yaml"), run_dir=run_dir).finish(300)
        assert (code, err) == (0, ""), out + err
        assert re.search(r"compiled=\d+ seconds=", out)
        return losses(run_dir)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(20)))
    # What torch tunes by measuring, it may tune differently where several compile at once.
    assert all(len(one) == 30 and one == pytest.approx(found[0], rel=2e-2) for one in found)
