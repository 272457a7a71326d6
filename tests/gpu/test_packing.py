"""Packed rows on a GPU: the recorded forward of the target keeps documents apart, and so does FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import documents, losses
from trainer.micro_batch import MicroBatch
from trainer.replica import Replica


@pytest.fixture
def packed(on_gpu: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    on_gpu["data"] |= {"paths": documents(tmp_path) * 5, "packing": True, "buckets": [64, 128]}
    return on_gpu


def test_recorded_features_of_a_document_in_a_packed_row_are_those_of_the_document_alone(
    train: Callable[..., Any], packed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, batches = Replica.loss_and_gradients, []

    def noted(self: Replica, batch: MicroBatch) -> None:
        batches.append(batch)
        original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", noted)
    training = train({**packed, "cuda_graphs": "on"})
    rows, target, several = training.rows, training.targets[0], 0
    for batch in (batch for batch in batches if batch.step):
        for number, row in enumerate(batch.rows):
            length = int(rows.lengths_R[row])
            ids_BS, _, starts_BS = rows.cut(torch.tensor([row]), length)
            starts = starts_BS.unique().tolist()
            several += len(starts) > 1
            for start, end in zip(starts, [*starts[1:], length], strict=True):
                alone = target.features(ids_BS[:, start:end])[0]
                assert (batch.features_BSF[number, start:end] - alone).norm() < 1e-3 * alone.norm()
    assert several > 10


def test_packed_rows_train_on_a_gpu_as_on_the_cpu_and_recorded_as_launched(
    train: Callable[..., Any], packed: dict[str, Any], tmp_path: Path
) -> None:
    packed["drafter"]["dtype"] = "float32"
    found = {}
    for name, device, graphs in (("cpu", "cpu", "off"), ("off", "cuda:0", "off"), ("on", "cuda:0", "on")):
        devices = {"target": [device], "drafter": [device]}
        out = tmp_path / name
        train({**packed, "steps": 10, "devices": devices, "cuda_graphs": graphs, "output_dir": str(out)})
        found[name] = losses(out)
    assert found["off"] == pytest.approx(found["cpu"], rel=1e-2)
    assert found["on"] == pytest.approx(found["off"], rel=1e-3)
