"""A small evaluation every so many steps of a training: the acceptance length beside the loss.

The leader's thread decodes while the other drafters wait for it: a few prompts side by side, greedy, with a copy of the
weights that a server would be given. Nothing of it compiles: rounds are run as they are written or, on CUDA, as graphs
that are recorded on the main thread before a worker exists.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch

from trainer.config import Config, ConfigError, expand_path
from trainer.decode.acceptance import Acceptance
from trainer.decode.engine import BlockDrafter, Engine
from trainer.decode.generate import end_ids, run
from trainer.decode.prompts import PYTHON_DOCS, read_prompts
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.target import Target, drafter_dtype
from trainer.replica import Replica
from trainer.report.reporter import Reporter

TEXT_TOKENS = 64
"""Of a text that are its prompt."""


class Evaluations:
    """Those of one run, on the target's device. Raises `ConfigError` where there is nothing to decode, or a target that
    cannot be decoded."""

    def __init__(self, config: Config, reporter: Reporter, target: Target, shape: DrafterShape) -> None:
        self._most, self._reporter = config.evaluation.max_tokens, reporter
        block, dtype = config.drafter.block_size, drafter_dtype(config.drafter.dtype, target.device)
        self._prompts = [prompt.ids for prompt in read_prompts(
            _paths(config), target.tokenizer, kind=None if config.data.kind == PYTHON_DOCS else config.data.kind,
            count=config.evaluation.prompts, most_tokens=config.evaluation.prompt_tokens,
            text_tokens=min(TEXT_TOKENS, config.evaluation.prompt_tokens), text_field=config.data.text_field,
            key="evaluation.paths",
        )]  # fmt: skip
        self._drafter = Drafter(shape).requires_grad_(False).to(target.device, dtype)
        drafter = BlockDrafter(
            drafter=self._drafter, ends=target.ends.to(target.device, dtype), block_size=block,
            mask_token_id=config.drafter.mask_token_id,
        )  # fmt: skip
        self._engine = Engine(
            target, drafter, rows=len(self._prompts), stop_ids=end_ids(target), graphs=config.cuda_graphs != "off",
            capacity=max(map(len, self._prompts)) + self._most - 1 + block,
        )  # fmt: skip

    def get_ready(self) -> None:
        """Record what a GPU does in a round, on the main thread before any worker exists."""
        for line in self._engine.prepare():
            self._reporter.say(f"phase=compile_warmup graphs=evaluation: {line}")

    def evaluate(self, member: Replica, *, step: int) -> Acceptance:
        """What `member` would be worth as it is now; in its thread, while it has nothing else to do."""
        started = time.monotonic()
        self._reporter.phase("evaluate")
        member.wait()
        device = self._engine.target.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(), torch.no_grad():
            with self._engine.stream():
                self._drafter.load_state_dict(member.served())
            found = run(self._engine, self._prompts, max_tokens=self._most).acceptance
        self._reporter.event(
            "evaluation", step=step, tau=found.tau, kept_by_slot=found.by_slot, verifications=found.verifications,
            prompts=len(self._prompts), seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip
        self._reporter.phase("train")
        return found


def _paths(config: Config) -> list[Path]:
    """Of what is decoded; what is trained on, where nothing else is named."""
    if config.evaluation.paths:
        return [expand_path(path, key="evaluation.paths") for path in config.evaluation.paths]
    if config.data.kind == PYTHON_DOCS:
        return [Path(PYTHON_DOCS)]
    return [expand_path(path, key="data.paths") for path in config.data.paths]


def evaluations_for(config: Config, reporter: Reporter, target: Target, shape: DrafterShape) -> Evaluations | None:
    """None where none are asked for. Raises `ConfigError`."""
    if config.evaluate_every is None:
        return None
    try:
        return Evaluations(config, reporter, target, shape)
    except ConfigError as error:
        raise ConfigError(f"evaluate_every: {error}; leave evaluate_every out to train without") from None
