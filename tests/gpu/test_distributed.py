"""One training over two GPUs by torch's engines, over NCCL: the steps that threads take, and none compiled late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import TrainerProcess, losses, write_config

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_take_the_steps_that_two_threads_take(
    torchrun: Callable[..., TrainerProcess], start_trainer: Callable[..., TrainerProcess], on_gpu: dict[str, Any],
    tmp_path: Path, engine: str,
) -> None:  # fmt: skip
    threads = {**on_gpu, "devices": {"target": ["cuda:0", "cuda:1"], "drafter": ["cuda:0", "cuda:1"]}}
    alone = start_trainer(write_config(threads, tmp_path / "threads.yaml"))
    assert alone.finish(timeout_s=300)[0] == 0
    own = {**on_gpu, "devices": "auto", "engine": engine, "output_dir": str(tmp_path / engine)}
    together = torchrun(write_config(own, tmp_path / "together.yaml"), torch.cuda.device_count())
    code, out, err = together.finish(timeout_s=300)
    assert code == 0, out + err
    assert losses(together.run_dir) == pytest.approx(losses(alone.run_dir), rel=0.02)
    assert "phase=compile_warmup unit=1/1 device=cuda:0 " in out
