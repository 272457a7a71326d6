"""What a run saves, when, and what it goes on from.

`Rhythm` decides at which steps replicas agree, prove it, and are saved; `Saves` writes the run's checkpoints, and finds
the one to go on from, on the main thread before the first step. `checkpoint.py` is how one gets onto a disk and back.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer import checkpoint
from trainer.checkpoint import Checkpoint
from trainer.config import Config, ConfigError
from trainer.data.order import Cursor
from trainer.data.rows import Rows
from trainer.kept import changed
from trainer.model.drafter import DrafterShape
from trainer.model.target import Target
from trainer.replica import Replica
from trainer.report.reporter import Reporter

CHANGES_NOTHING = {
    "output_dir", "resume", "keep_checkpoints", "log_every", "evaluate_every", "evaluation", "replica_check_every",
    "on_worker_death", "on_nonfinite", "max_skipped", "watchdog", "tracking", "peak_tflops", "queue_depth",
    "cuda_graphs", "compile_cache", "target.path", "drafter.start_from", "data", "requirements", "patterns",
}  # fmt: skip
"""Keys, or sections, that a resume may change without a word: no bit of what is trained depends on them."""


class SaveFailed(RuntimeError):
    """A checkpoint could not, or must not, be written; those before it are as they were."""


class Rhythm:
    """All of it follows from the step alone: an interruption moves nothing, so that a resumed run is the same run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stop_at: int | None = None
        """After which step to stop before the last one, once somebody has asked for it."""

    def stop_after(self, step: int) -> int:
        """Stop after `step`, or after the next one at which all replicas agree: what is saved is what all hold."""
        while not self.agrees_after(step):
            step += 1
        self.stop_at = step
        return step

    def saves_after(self, step: int) -> bool:
        return step % self.config.checkpoint_every == 0 or step in (self.config.steps, self.stop_at)

    def evaluates_after(self, step: int) -> bool:
        return self.config.evaluate_every is not None and step % self.config.evaluate_every == 0

    def agrees_after(self, step: int) -> bool:
        """Whether all replicas hold the same weights then."""
        return step % self.config.sync_every == 0 or self.saves_after(step)

    def hashes_after(self, step: int) -> bool:
        """Whether they prove it: where a proof was due since they last agreed."""
        every = self.config.replica_check_every
        due = step // every > (step - self.config.sync_every) // every
        return self.saves_after(step) or (due and self.agrees_after(step))


class Saves:
    """The checkpoints of one run, in `root`. `must_keep` is `what_must_stay`."""

    def __init__(self, config: Config, reporter: Reporter, must_keep: dict[str, Any]) -> None:
        self.config, self.reporter, self.must_keep = config, reporter, must_keep
        self.root = reporter.identity.directory / "checkpoints"
        self.run: str | None = checkpoint.run_of_root(self.root)
        """Tells this run's checkpoints from those of another that have got into the same place."""
        self.start: dict[str, Any] | None = None
        """What its first weights were taken from: see `starting.Start.record`."""
        self.off = False
        """What is measured is not kept."""
        self.last = "none"
        """The last good checkpoint, for a person."""

    def find(self, *, must_resume: bool) -> Checkpoint | None:
        """The latest whole checkpoint of this run, if there is one. Raises `ConfigError` if it may not be gone on from.
        What may differ and does is said."""
        try:
            on_disk = checkpoint.steps_on_disk(self.root)
        except OSError as error:
            raise ConfigError(
                f"{self.root}, where checkpoints go, cannot be looked into: {error.strerror or error}; make room for"
                " that directory, or choose another output_dir"
            ) from None
        if self.config.resume == "never" and not must_resume:
            if on_disk:
                raise ConfigError(
                    f"{self.root} already holds checkpoints, up to step-{on_disk[-1]}; add --resume to go on from them,"
                    " or choose another output_dir"
                )
            return None
        found = checkpoint.latest(self.root, run=self.run, say=self.reporter.say)
        if found is None:
            if must_resume:
                raise ConfigError(f"--resume: no complete checkpoint in {self.root}")
            return None
        # As JSON, since that is what the file holds: a tuple comes back as a list.
        was, now = found.state["must_keep"], json.loads(json.dumps(self.must_keep))
        if others := changed(was, now):
            raise ConfigError(
                f"cannot go on from {self.root}/step-{found.step}: not the same {', '.join(others)} as then; restore"
                " that, or choose another output_dir"
            )
        if changes := list(self._changes(found.state)):
            self.reporter.say(f"resume with changes since step-{found.step}: {', '.join(changes)}")
        self.run, self.start = self.run or found.state.get("run"), found.state.get("start")
        self.last = str(self.root / f"step-{found.step}")
        return found

    def check_room(self, size_bytes: int, *, steps_done: int) -> None:
        """Raises `ConfigError` where checkpoints of `size_bytes` each, as many as are to lie there at once, have no
        room: said now, not after the hours that lead to it."""
        every, steps = self.config.checkpoint_every, self.config.steps
        to_come = steps // every - steps_done // every + (steps % every > 0)
        # The oldest goes when a new one is there.
        count = min(to_come, max(1, self.config.keep_checkpoints + 1 - len(checkpoint.steps_on_disk(self.root))))
        there = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        if steps_done < steps and not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"output_dir: nothing can be written to {there}, where checkpoints go; choose another")
        free_bytes = shutil.disk_usage(there).free
        if steps_done < steps and free_bytes < count * size_bytes:
            raise ConfigError(
                f"keep_checkpoints: {count} more checkpoints of {size_bytes / (1 << 20):,.0f} MiB each need room at"
                f" once, and {self.root} has {free_bytes / (1 << 20):,.0f} MiB free; make room there, keep fewer, or"
                " train where there is some"
            )

    def _changes(self, state: dict[str, Any]) -> Iterator[str]:
        """What is not as it was and makes other weights."""
        was, now = dict(_leaves(state["config"])), dict(_leaves(json.loads(self.config.model_dump_json())))
        nothing = CHANGES_NOTHING | ({"checkpoint_every"} if self.config.sync_every == 1 else set())
        for key, value in now.items():
            if was.get(key, value) != value and not {key, key.partition(".")[0]} & nothing:
                yield f"{key} {was[key]} -> {value}"
        if state["torch"] != torch.__version__:
            yield f"torch {state['torch']} -> {torch.__version__}"

    def save(self, member: Replica, *, step: int, cursor: Cursor, skipped: int, tokens: int) -> None:
        """What `member` and all others hold after `step`. Raises `SaveFailed`, and then nothing else has changed."""
        if self.off:
            return
        started = time.monotonic()
        broken = [name for name, weight in member.weights().items() if not bool(torch.isfinite(weight).all())]
        if broken:
            raise SaveFailed(
                f"checkpoint step-{step} is not written, as its weights are not finite ({', '.join(broken[:3])}): is"
                f" optimizer.lr too high, or the device broken? last good checkpoint: {self.last}"
            )
        self.reporter.phase("checkpoint")
        self.reporter.checkpointing(True)
        self.run = self.run or secrets.token_hex(8)
        state = {
            "run": self.run, "cursor": dataclasses.asdict(cursor), "skipped": skipped, "tokens": tokens,
            "must_keep": self.must_keep, "config": json.loads(self.config.model_dump_json()),
            "start": self.start, "torch": torch.__version__,
        }  # fmt: skip
        try:
            path = checkpoint.save(self.root, Checkpoint(
                step=step, weights=member.weights(), optimizer=member.moments(), averages=member.averages(), state=state
            ))  # fmt: skip
        except OSError as error:
            raise SaveFailed(
                f"checkpoint step-{step} cannot be written to {self.root}: {error.strerror or error} (it takes"
                f" {member.state_bytes / (1 << 20):,.1f} MiB); last good checkpoint: {self.last}"
            ) from None
        self.last = str(path)
        seconds = time.monotonic() - started
        self.reporter.say(f"checkpoint step-{step} saved in {seconds:.2f} s: {path}")
        self.reporter.event("checkpoint", step=step, path=str(path), seconds=round(seconds, 3))
        for left in checkpoint.prune(self.root, keep=self.config.keep_checkpoints, step=step, run=self.run):
            self.reporter.say(f"checkpoint {left}")
        self.reporter.checkpointing(False)
        self.reporter.phase("train")


def what_must_stay(config: Config, target: Target, rows: Rows, shape: DrafterShape) -> dict[str, Any]:
    """What has to be, when a checkpoint is gone on from, as it was when it was made; named as an error names it."""
    return {
        **config.what_a_resume_must_keep(),
        "shape": dataclasses.asdict(shape),
        "layer_ids": target.layer_ids,
        "rows of data": rows.digest(),
        **{f"{name} of the target": digest for name, digest in target.files.items()},
    }


def _leaves(section: Mapping[str, Any], prefix: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*prefix, key))
        else:
            yield ".".join((*prefix, key)), value
