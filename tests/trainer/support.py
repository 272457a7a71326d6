"""What the trainer's tests share: configurations as files, a run's records, and real trainer processes to watch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
IMPORTS = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
"""PYTHONPATH of a trainer's process: this repository, and what these tests themselves were given."""


def write_config(settings: dict[str, Any], path: Path) -> Path:
    """As YAML, of which JSON is a part."""
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return path


def small_run(target: Path, output_dir: Path) -> dict[str, Any]:
    """A configuration as plain data for the tiny target: 2 drafters, 6 steps."""
    return {
        "seed": 11,
        "steps": 6,
        "batch_size": 4,
        "output_dir": str(output_dir),
        "checkpoint_every": 100,
        "replica_check_every": 1,
        "devices": {"target": ["cpu"], "drafter": ["cpu", "cpu"]},
        "target": {"path": str(target), "dtype": "float32", "captured_layers": 3},
        "data": {"kind": "text", "paths": [subprocess.__file__], "sequence_length": 48},
        "drafter": {"layers": 2, "block_size": 4, "anchors": 8, "mask_token_id": 3},
        "optimizer": {"lr": 3e-3},
    }


def train_here(settings: dict[str, Any], *, expect: int = 0, before: Callable[[Any], None] | None = None, **options: Any
               ) -> Any:  # fmt: skip
    """Train in this process, into the configuration's output directory; returns what `Training` held at the end."""
    from trainer import train as module
    from trainer.config import Config
    from trainer.report.records import RunIdentity
    from trainer.report.reporter import Reporter
    from trainer.stopping import StopRequest

    config = Config.model_validate(settings)
    reporter = Reporter(RunIdentity(directory=Path(config.output_dir), run_id="test"))
    reporter.open()
    try:
        training = module.prepare(config, reporter, StopRequest(), **options)
        if before:
            before(training)
        ending = training.run()
    finally:
        reporter.ended(code=expect, stopped=False)
    assert ending.code == expect
    assert not ending.stuck
    return training


def documents(directory: Path) -> list[str]:
    """Ten files of 10, of 20 or of 40 tokens each."""
    paths = [directory / f"document-{number}.txt" for number in range(10)]
    for number, path in enumerate(paths):
        path.write_text("0123456789" * (1, 2, 4)[number % 3], encoding="utf-8")
    return [str(path) for path in paths]


def records(directory: Path, name: str) -> list[dict[str, Any]]:
    """All whole lines; the last one may be half there while its writer is at it."""
    try:
        text = (directory / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


def events(directory: Path, name: str | None = None) -> list[dict[str, Any]]:
    """All, or those of one name."""
    return [event for event in records(directory, "events.jsonl") if name in (None, event["event"])]


def losses(directory: Path) -> list[float]:
    """Of the whole run, by step."""
    return [record["loss"] for record in records(directory, "metrics.jsonl") if record["worker"] is None]


def poll(what: Callable[[], Any], *, timeout_s: float = 150.0) -> Any:
    """The first true value of `what`."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
    return value


@dataclass
class TrainerProcess:
    """A real trainer process in a run directory of its own."""

    process: subprocess.Popen[str]
    run_dir: Path

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return events(self.run_dir, name)

    def heartbeat(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "heartbeat.json").read_text(encoding="utf-8")))

    def wait_for_step(self, step: int, *, timeout_s: float = 150.0) -> None:
        poll(lambda: self.process.poll() is not None or self._stepped(step), timeout_s=timeout_s)
        assert self._stepped(step), self.process.communicate()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def finish(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)"""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def _stepped(self, step: int) -> bool:
        return any(record["step"] >= step for record in records(self.run_dir, "metrics.jsonl"))


def all_rows(rows: Any) -> Any:
    """Ids, loss mask and starts of documents of all rows, at their full length."""
    import torch

    return rows.cut(torch.arange(len(rows)), rows.length)
