"""The race is alive on this machine, and the plan leaves it no room: many starts of a process, and processes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.proxy import TracerBase

from bench.compile_race import start
from tests.trainer.support import TrainerProcess, losses, write_config

CUDA = torch.device("cuda:0")
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


@pytest.mark.usefixtures("slow_tracer")
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch keeps the flag by thread from 2.14 on")
def test_threads_without_the_plan_kill_each_other() -> None:
    for _ in range(10):
        raised, _ = start(CUDA, planned=False, threads=3, steps=2, graphs=False)
        if any(NESTED in error for error in raised):
            return
    pytest.fail("ten naive starts lost no thread: the race that the plan is there for was not met")


@pytest.mark.usefixtures("slow_tracer")
@pytest.mark.parametrize("graphs", [False, True])
def test_fresh_starts_with_the_plan_lose_no_thread_and_compile_nothing_later(graphs: bool) -> None:
    for _ in range(10):
        assert start(CUDA, planned=True, threads=3, steps=5, graphs=graphs) == ([], 0)


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
