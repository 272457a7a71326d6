"""TensorBoard, Weights & Biases and trackio behind one small interface (`tracking.Tracker`).

Each is imported when it is made, by its own thread. A run that goes on after an interruption goes on in them too, and
no step is there twice.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from typing import Any

from trainer.report.tracking import TrackedRun
from trainer.sections import TrackioConfig, WandbConfig

FLUSH_KEY, FLUSH_S = "x_transaction_log_flush_interval", 1.0
"""How often W&B writes to its file, where it can be told: it works in a process of its own, which ends at once when
somebody stops all processes of a run."""


class TensorBoard:
    """Event files in `tensorboard/`, one a process, on disk whenever nothing more is waiting."""

    def __init__(self, run: TrackedRun) -> None:
        # Of tensorboardX only what makes the bytes: its writers have a thread and a queue, which are here already.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import text

        self._event, self._summary = Event, Summary
        folder = run.directory / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # By the second alone two processes might have one name; and the later one's has to sort behind.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        # Readers drop what earlier files say of this step and any after it.
        began = Event(step=run.steps_done + 1, session_log=SessionLog(status=SessionLog.START))
        settings = f"    {json.dumps(run.settings, indent=1)}".replace("\n", "\n    ")
        for event in (began, Event(step=run.steps_done + 1, summary=text("configuration", settings))):
            self._writer.write_event(event)
        self.flush()

    def log(self, step: int, scalars: Mapping[str, float], time_s: float) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.write_event(self._event(step=step, wall_time=time_s, summary=self._summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, code: int) -> None:
        self._writer.close()


class Wandb:
    """A run whose id and name are ours, in `wandb/` as well as, if `online`, on the server."""

    def __init__(self, run: TrackedRun, config: WandbConfig) -> None:
        import wandb

        self._tracked = run.tracked
        # The log is the run's own, and nobody is there to answer a question.
        settings: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
        if FLUSH_KEY in wandb.Settings.model_fields:
            settings[FLUSH_KEY] = FLUSH_S
        self._run = wandb.init(
            project=config.project, entity=config.entity, mode=config.mode, dir=str(run.directory), name=run.name,
            id=run.id, resume="allow", config=dict(run.settings),
            settings=wandb.Settings(**settings),
        )  # fmt: skip

    def log(self, step: int, scalars: Mapping[str, float], time_s: float) -> None:
        if step > self._tracked:
            self._run.log({**scalars, "_timestamp": time_s}, step=step)

    def flush(self) -> None:
        """It writes by itself."""

    def close(self, code: int) -> None:
        self._run.finish(exit_code=code)


class Trackio:
    """A run in trackio's own folder, whose name is ours."""

    def __init__(self, run: TrackedRun, config: TrackioConfig) -> None:
        import trackio

        self._tracked = run.tracked
        # It prints as it goes, in colours, and the log is the run's own.
        for module in (trackio, importlib.import_module("trackio.run"), importlib.import_module("trackio.utils")):
            vars(module)["print"] = lambda *_, **__: None
        self._run = trackio.init(
            project=config.project, name=run.name, config=dict(run.settings), embed=False,
            resume="allow" if run.steps_done or run.id == run.name else "never",
        )  # fmt: skip

    def log(self, step: int, scalars: Mapping[str, float], time_s: float) -> None:
        if step > self._tracked:
            self._run.log(dict(scalars), step=step)

    def flush(self) -> None:
        """It writes by itself, twice a second."""

    def close(self, code: int) -> None:
        self._run.finish()
