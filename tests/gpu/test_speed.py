"""How fast a run on a GPU says it is: stages by the device's own clock, an MFU that can be, memory beside its plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import write_config
from trainer.__main__ import main
from trainer.model.flops import peak_flop_s


def test_a_bench_on_a_gpu_measures_stages_on_the_device_and_compiles_nothing_late(
    on_gpu: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config({**on_gpu, "log_every": 1}, tmp_path / "config.yaml")
    assert main(["bench", str(config), "--steps", "20", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    print(json.dumps(found, indent=1))
    assert found["steps"] == 20 and found["compiles"]["after"] == 0 < found["compiles"]["warm_up"]
    stages = found["stages"]
    assert set(stages) == {
        "data", "target forward", "hand-over", "drafter forward + backward", "exchange", "optimizer", "step",
    }  # fmt: skip
    for stage in ("target forward", "drafter forward + backward", "optimizer"):
        assert stages[stage]["median_ms"] > 0
    # What one drafter's device does in a step lies within that step, give or take what two steps overlap.
    own = stages["drafter forward + backward"]["median_ms"] + stages["optimizer"]["median_ms"]
    assert own < 2 * stages["step"]["median_ms"]
    assert found["memory"]["cuda:0"]["measured_bytes"] > 0 < found["memory"]["cuda:0"]["planned_bytes"]
    if peak_flop_s(torch.device("cuda:0"), torch.bfloat16) is not None:
        assert 0 < found["mfu"] < 1
