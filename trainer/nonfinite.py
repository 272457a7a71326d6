"""A loss or gradient that is not finite: in which worker and layer, of which samples, and whether the run goes on.

The devices have refused such a step by themselves, all of them, before anybody here knows of it (`replica.py`).
`Refusals` counts it once its figures have reached the host. Where the run has to end, weights are still what the step
met; so the share of the worker whose own figures are not finite is done once more, kernel by kernel, and whatever it
makes is looked at on its way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import Config
from trainer.data.rows import Rows
from trainer.kernels import Kernels, RunLayer
from trainer.micro_batch import MicroBatch
from trainer.replica import Replica
from trainer.report.reporter import Reporter
from trainer.steps import Share, Step

NAMED_CHARACTERS = 300
"""Of a message, for samples; the event has them all."""


class NonFinite(ArithmeticError):
    """A loss or gradient of `worker` is nan or infinite; no replica's weights have been touched by it."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class Refusals:
    """Of a run and all that it resumes: how many steps have changed nothing because they were not finite."""

    def __init__(self, config: Config, reporter: Reporter, rows: Rows) -> None:
        self.config, self.reporter, self.rows = config, reporter, rows
        self.count, self._allowed = 0, config.max_refused
        self.no_culprit = "each drafter's own are finite, their sum is not"

    def go_on(self, count: int) -> None:
        """As after so many."""
        self.count, self._allowed = count, max(self.config.max_refused, count)

    def add(self, step: Step, *, last_checkpoint: str, look_again: Callable[[Share], tuple[str, list[int]]]) -> None:
        """One more. Raises `NonFinite` if it is one too many; `look_again` is then asked where in a share the first
        trouble is, and in which rows."""
        self.count += 1
        own = [share for share in step.shares if not _is_finite(share)]
        share = own[0] if own else step.shares[0]
        worker, figures = share.worker, share.figures
        rows = share.rows if own else [row for one in step.shares for row in one.rows]
        what = f"loss {figures.loss}, gradient norm {figures.own_norm}"
        if not own:
            what = f"all drafters together: gradient norm {step.norm}"
        facts = {"step": step.number, "worker": worker, "what": what, "skipped": self.count}
        if self.count <= self._allowed:
            samples = self._samples(rows)
            self.reporter.event("nonfinite", action="skip", rows=rows, samples=samples, **facts)
            self.reporter.say(
                f"not finite, so nothing changes at step {step.number} (skipped {self.count} of at most"
                f" {self._allowed}): {worker}; {_few('samples', samples)}"
            )
            return
        where = self.no_culprit
        if own:
            where, rows = look_again(share)
        samples = self._samples(rows)
        self.reporter.event("nonfinite", action="stop", rows=rows, samples=samples, where=where, **facts)
        allowed = self.config.max_refused
        too_many = f" {self.count} such steps are more than max_skipped: {allowed};" if allowed else ""
        raise NonFinite(
            worker,
            f"{worker}: {what} at step {step.number}: {where}; {_few('samples', samples)} (data rows {rows});{too_many}"
            f" no optimizer step has been taken since; last good checkpoint: {last_checkpoint}",
        )

    def _samples(self, rows: Sequence[int]) -> list[str]:
        return [self.rows.where(row) for row in rows]


def _is_finite(share: Share) -> bool:
    return math.isfinite(share.figures.loss) and math.isfinite(share.figures.own_norm)


def _few(what: str, names: Sequence[str]) -> str:
    """As many as a line has room for."""
    told: list[str] = []
    for name in names:
        if told and len(", ".join([*told, name])) > NAMED_CHARACTERS:
            break
        told.append(name if len(name) <= NAMED_CHARACTERS else f"{name[:NAMED_CHARACTERS]}...")
    more = f" and {len(names) - len(told)} more" if len(told) < len(names) else ""
    return f"{what} {', '.join(told)}{more}"


def first_trouble(member: Replica, batch: MicroBatch, layer_ids: Sequence[int]) -> tuple[str, list[int]] | None:
    """Do `batch` once more: what is the first that is not finite, forward before backward, and in which of its rows?
    None if everything is finite now. Changes the gradients, and nothing that is trained."""
    forward, backward = _Look(batch.rows), _Look(batch.rows)
    if batch.ready is not None:
        batch.ready.synchronize()
    parts = batch.features_BSF.unflatten(-1, (len(layer_ids), -1)).unbind(dim=2)
    for layer_id, part in zip(layer_ids, parts, strict=True):
        forward.at(f"the target's features are not finite, those of its layer {layer_id} first", part)
    if forward.found:
        return forward.found
    probe = _Probe(member.drafter, forward, backward)
    with probe.hooks(inside_layers=not member.kernels.compiles):
        loss = member.again(batch, probe.around(member.kernels.of(batch.shape)))
    forward.at("in the forward: the loss", loss)
    gradients = member.drafter.apart(member.flat.named(member.flat.gradients))
    # Forward, more or less, is the order in which they were made.
    for name in reversed(list(member.drafter.state_dict())):
        backward.at(f"in the backward: the gradient of {name}", gradients[name], by_row=False)
    if forward.found or backward.found or bool(torch.isfinite(member.flat.norm())):
        return forward.found or backward.found
    largest = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    return f"in the backward: gradients are too large for a norm, that of {largest} most", batch.rows


class _Look:
    """Notes the first thing that is not finite, and in which rows."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.found: tuple[str, list[int]] | None = None

    def at(self, what: str, tensor: Tensor, *, by_row: bool = True) -> None:
        if self.found is not None or bool(torch.isfinite(tensor).all()):
            return
        rows = self.rows
        if by_row and tensor.dim() > 1:
            bad_B = ~torch.isfinite(tensor).flatten(1).all(dim=1)
            rows = [row for row, bad in zip(rows, bad_B.tolist(), strict=True) if bad]
        self.found = what, rows


class _Probe:
    """Looks at what the modules of a drafter make, and at the gradients that come back to it."""

    def __init__(self, drafter: nn.Module, forward: _Look, backward: _Look) -> None:
        self.names = {module: name for name, module in drafter.named_modules() if name}
        self.forward, self.backward = forward, backward

    def look(self, module: nn.Module, _inputs: Any, output: Tensor) -> None:
        name = self.names[module]
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())
        its = "" if finite else ", whose weights are not finite"
        self.forward.at(f"in the forward: the output of {name}{its}", output)
        if output.requires_grad:
            said = f"in the backward: the gradient at the output of {name}"
            output.register_hook(functools.partial(self.backward.at, said))

    @contextlib.contextmanager
    def hooks(self, *, inside_layers: bool) -> Iterator[None]:
        """In what is compiled a hook would be another form of it."""
        handles = [
            module.register_forward_hook(self.look) for module, name in self.names.items()
            if (inside_layers or not name.startswith("layers")) and not isinstance(module, nn.ModuleList)
        ]  # fmt: skip
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def around(self, kernels: Kernels) -> Kernels:
        """`kernels` whose layers are looked at from outside, compiled or not."""

        def looked_at(run: RunLayer) -> RunLayer:
            def layer(module: Any, slots_BTH: Tensor, *rest: Any) -> Tensor:
                self.forward.at(f"in the forward: the slots that {self.names[module]} is given", slots_BTH)
                output = run(module, slots_BTH, *rest)
                self.look(module, None, output)
                return output

            return layer

        return dataclasses.replace(
            kernels, first_layer=looked_at(kernels.first_layer), layer=looked_at(kernels.layer)
        )  # fmt: skip
