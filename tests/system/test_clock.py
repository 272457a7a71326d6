"""What is said of a run whose clock was set, as its records have it; in the lab clocks do jump (docs/faults.md)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.driver import Specctl

SET_BY_S = 7200.0


def edit(specctl: Specctl, run_id: str, name: str, **by: float) -> None:
    path = specctl.run_dir(run_id) / name
    record: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **{key: record[key] + more for key, more in by.items()}}))


def test_a_run_took_as_long_as_it_took_whenever_the_clock_was_set(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "sh", "-c", "echo step=1 tok/s=1").json["run_id"]

    def seen() -> tuple[float, float]:
        row = specctl("ls", "--json").json["runs"][0]
        return float(row["took_s"]), time.time() - float(row["started_at"])

    took_s, ago_s = seen()
    edit(specctl, run_id, "run.json", booted_at=-SET_BY_S)  # set ahead since it ended
    assert seen()[0] == pytest.approx(took_s, abs=1) and seen()[1] == pytest.approx(ago_s - SET_BY_S, abs=30)
    edit(specctl, run_id, "exit.json", clock_set_by_s=SET_BY_S, at=SET_BY_S)  # before it ended
    assert seen()[0] == pytest.approx(took_s, abs=1)
    record = json.loads((specctl.run_dir(run_id) / "run.json").read_text())
    (specctl.run_dir(run_id) / "run.json").write_text(json.dumps({**record, "boot": "another"}))
    assert seen()[0] == pytest.approx(took_s, abs=1), "a reboot after that changes nothing"
