"""What a check of the doctor's is: what it looks at (`Patient`), what it says (`Finding`), and how all is got ready.

`examine.py` makes the round; `checks_model.py`, `checks_data.py`, `checks_step.py` and `checks_memory.py` are the
checks. Getting ready is
made of checks too, so that what fails there is a finding like any other, and only what needs it is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from trainer import compile_plan, kept, starting
from trainer.config import Config, ConfigError
from trainer.data.rows import Rows, check_bad, load_rows
from trainer.model.drafter import DrafterShape
from trainer.model.target import Target, drafter_shape, load_targets, see_that_documents_stay_apart
from trainer.replica import Replica
from trainer.report.reporter import Reporter, RunIdentity
from trainer.setup import make_replicas
from trainer.warmup import Warmup

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check has found."""

    status: Status
    evidence: str
    advice: str = ""
    """What to do; empty where nothing is to be done."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The figures behind it, for `--json`."""


def ok(evidence: str, **facts: Any) -> Finding:
    return Finding(status="ok", evidence=evidence, facts=facts)


def warn(evidence: str, advice: str, **facts: Any) -> Finding:
    return Finding(status="warn", evidence=evidence, advice=advice, facts=facts)


def fail(evidence: str, advice: str, **facts: Any) -> Finding:
    return Finding(status="fail", evidence=evidence, advice=advice, facts=facts)


class Quiet(Reporter):
    """For what reports as it gets ready: the doctor has a voice of its own, and leaves no run's records."""

    def __init__(self, identity: RunIdentity) -> None:
        super().__init__(identity)
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def event(self, name: str, **facts: Any) -> None:
        """No run, no record."""


@dataclass(kw_only=True, slots=True)
class Patient:
    """What the checks look at; filled by the first of them, so that what fails there is a finding too."""

    config: Config
    reporter: Quiet
    quick: bool = False
    targets: list[Target] = field(default_factory=list)
    loaded_rows: Rows | None = None
    members: dict[int, Replica] = field(default_factory=dict)
    warmup: Warmup | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    """What one check has worked out and another one needs."""

    @property
    def target(self) -> Target:
        if not self.targets:
            raise Missing("the target")
        return self.targets[0]

    @property
    def rows(self) -> Rows:
        if self.loaded_rows is None:
            raise Missing("the data")
        return self.loaded_rows

    @property
    def shape(self) -> DrafterShape:
        try:
            return drafter_shape(self.target, self.config.drafter)
        except ConfigError:  # which the check of the mask token tells
            raise Missing("the drafter's shape") from None

    @property
    def member(self) -> Replica:
        if not self.members:
            raise Missing("the drafters")
        return self.members[0]

    @property
    def share(self) -> int:
        """Rows of a micro-batch."""
        return self.config.batch_size // len(self.config.devices.drafter)


class Missing(Exception):
    """What a check needs, and an earlier one has not got ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    what: str
    look: Callable[[Patient], Finding]


# --- getting ready, which is a check too ----------------------------------------------------------------------------


def load_the_target(patient: Patient) -> Finding:
    devices = [torch.device(name) for name in patient.config.devices.target]
    compile_plan.settle_thread(devices[0], cpu_threads=patient.config.cpu_threads.target, compiles=False)
    patient.targets = load_targets(patient.config.target, devices)
    target = patient.target
    said = f"{type(target.model).__name__} in {str(next(target.model.parameters()).dtype).removeprefix('torch.')}"
    said += f" on {', '.join(map(str, devices))}"
    if patient.config.data.packing:
        see_that_documents_stay_apart(target)
        said += "; keeps the documents of a row apart"
    return ok(said)


def load_the_data(patient: Patient) -> Finding:
    config = patient.config
    rows = load_rows(
        config.data, patient.target.tokenizer, mask_token_id=config.drafter.mask_token_id, seed=config.seed,
        cache=kept.token_cache(config.data, patient.reporter.identity.directory, os.environ), say=patient.reporter.say,
    )  # fmt: skip
    check_bad(rows.dropped, config.data.max_bad_fraction)
    patient.loaded_rows = rows
    epochs, bad = config.steps * config.batch_size / len(rows), rows.dropped.bad_count
    said = f"{len(rows):,} rows, {int(rows.lengths_R.sum()):,} tokens, {rows.trained_tokens:,} trained on;"
    said += f" {config.steps:,} steps are {epochs:.1f} epochs"
    if bad:
        first = rows.dropped.first[0]
        said += f"; {bad} of {rows.dropped.records} records are bad, the first: {first.where}: {first.why}"
        return warn(said, "mend or remove them", rows=len(rows), bad=bad)
    return ok(said, rows=len(rows), bad=0)


def make_the_drafters(patient: Patient) -> Finding:
    config = patient.config
    rows = patient.rows
    patient.members = make_replicas(config, patient.targets, patient.shape)
    start = starting.find(config, patient.target, patient.shape, say=patient.reporter.say)
    if start is not None:
        for member in patient.members.values():
            member.begin_with(start.weights)
    patient.warmup = Warmup(config, patient.reporter, rows, dict(enumerate(patient.targets)), patient.members)
    compiled_before = compile_plan.watch.compiles
    patient.warmup.compile()
    weights = sum(parameter.numel() for parameter in patient.member.drafter.parameters())
    said = f"{len(patient.members)} of {weights / 1e6:.1f} M weights on {', '.join(config.devices.drafter)}"
    if start is not None:
        said += f", those of {start.path} ({start.what})"
    if units := len(patient.warmup.units):
        said += f"; {units} shapes compiled, forward and backward"
    return ok(said, weights=weights, compiles=compile_plan.watch.compiles - compiled_before)
