"""What only a GPU can show; skipped, with its reason, where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import settings, start_trainer, taught_run, taught_target, tiny_target, torchrun, train
from trainer.compile_plan import watch
from trainer.kernels import kernels_for

__all__ = ["settings", "start_trainer", "taught_run", "taught_target", "tiny_target", "torchrun", "train"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled() -> None:
    """Another file's runs may have had the same shapes in another type: a second form, which no run accepts."""
    torch._dynamo.reset()
    kernels_for.cache_clear()


@pytest.fixture(autouse=True)
def may_compile() -> None:
    """Until the test's own warm-up is over; another test of this process may have forbidden it, or gone to another
    device."""
    watch.open()
    torch.cuda.set_device(0)


@pytest.fixture
def on_gpu(settings: dict[str, Any]) -> dict[str, Any]:
    """Three drafters and the target on one device; 30 steps."""
    settings["devices"] = {"target": ["cuda:0"], "drafter": ["cuda:0"] * 3}
    settings["drafter"] |= {"anchors": 16, "block_size": 8, "head_dim": 64, "heads": 4, "kv_heads": 2}
    settings["data"]["sequence_length"] = 128
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0}
    return {**settings, "steps": 30, "batch_size": 6, "checkpoint_every": 100_000}
