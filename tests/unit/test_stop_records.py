"""What the records of a stop prove of the run's end."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.agent import files, records
from orchestrator.model import StopperRecord, StopRequest, WorkPaths, to_json

NOW = 1_000_000.0
NOBODY = 2**22 + 1
"""No pid of any machine."""


@pytest.mark.parametrize("finished", [True, False], ids=["it gave up", "it was killed"])
def test_a_stop_whose_kill_waits_in_the_kernel_goes_on_until_the_end_which_is_its_doing(
    tmp_path: Path, finished: bool
) -> None:
    paths = WorkPaths(workdir=str(tmp_path)).run("r")
    Path(paths.root).mkdir(parents=True)
    request = StopRequest(at=NOW, by="me", grace_s=2.0)
    stopper = StopperRecord(
        pid=NOBODY, start_ticks=1, request_at=NOW, by="me", doing="done" if finished else "kill", signalled_at=NOW + 1,
        alive_at=NOW + 9, finished=finished,
    )  # fmt: skip
    files.write_json(paths.stop, to_json(request))
    files.write_json(paths.stopper, to_json(stopper))
    assert records.stop_under_way(paths, NOW + 3600) == (request if finished else None)
    assert records.stopped(paths, NOW + 3600) == finished
    assert records.stopped(paths, NOW + 10)
    assert not records.stopped(paths, NOW), "before its first signal"
