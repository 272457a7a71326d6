"""AdamW over flat float32 weights, and their moving average.

A replica's weights and gradients are two flat float32 buffers: averaging, clipping, the optimizer and the proof of
equality each touch one tensor. What the module computes with is a third, in the type of its arithmetic, of which its
parameters are views; it is the first one itself where that type is float32. Norms come first and do not decay; matrices
follow and do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.exchange import Part
from trainer.sections import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGN = 64
"""Floats; every parameter starts on a 256-byte boundary, as if it had been allocated alone."""
PART_BYTES = 16 << 20
"""At least so many of gradients travel between devices at a time: over NVLink in about 40 us, which is what a thread
takes to tell two devices of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a parameter lives in the flat buffers."""

    name: str
    start: int
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


class FlatWeights:
    """Moves a module's parameters, which are float32, into flat buffers."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        named = sorted(module.named_parameters(), key=lambda item: item[1].dim() > 1)
        self.places: list[Place] = []
        size = decays_from = 0
        for name, parameter in named:
            self.places.append(Place(name=name, start=size, shape=parameter.shape))
            size += -(-parameter.numel() // ALIGN) * ALIGN
            if parameter.dim() < 2:
                decays_from = size
        device = named[0][1].device
        self.weights = torch.zeros(size, device=device)
        self.exchanged = torch.zeros(size + ALIGN, device=device)
        """What replicas add up: `gradients`, and behind them `weight`."""
        self.gradients = self.exchanged[:size]
        self.weight = self.exchanged[size]
        """What the gradients have to be divided by, where that is only known with them: see `replica._finish`."""
        self.decays_from = decays_from
        """Where the matrices begin."""
        self.parts: list[Part] = []
        """See `collect_early`."""
        self._norms: list[Tensor] = []
        """Of each part, as it was taken."""
        self._members: list[list[int]] = []
        self._missing: list[set[int]] = []
        """Of each part: its parameters, and those of them that the backward has not come to."""
        self.adds = False
        """Whether `collect` adds to what is there: the second and later micro-batches of a step."""
        self._parameters = [parameter for _, parameter in named]
        self._gradient_of = [place.of(self.gradients) for place in self.places]
        for place, parameter in zip(self.places, self._parameters, strict=True):
            place.of(self.weights).copy_(parameter.data)
        self._working = self.weights if dtype == torch.float32 else self.weights.to(dtype)
        for place, parameter in zip(self.places, self._parameters, strict=True):
            parameter.data = place.of(self._working)

    def collect(self) -> None:
        """Take the gradients that a backward left at the parameters, instead of the ones before, or beside them."""
        if not self.parts:
            self._take(range(len(self._parameters)))

    def norm(self) -> Tensor:
        """Of what was collected. Of parts the norms were taken with them: since then others may have been added up
        in their places."""
        return torch.stack(self._norms).norm() if self.parts else self.gradients.norm()

    def drop(self) -> None:
        """Forget what a backward that was broken off has left, so that the next one finds nothing of it."""
        for parameter in self._parameters:
            parameter.grad = None
        for number, part in enumerate(self._members):
            self._missing[number].update(part)

    def collect_early(self, event: Callable[[], Any], *, least_bytes: int = PART_BYTES) -> None:
        """From now on take them during the backward, a few layers at a time: `parts`, in the order in which they come,
        each of `least_bytes` and with the `event` at which it was taken."""
        if self.parts:
            return
        self._members = _joined(self._as_they_come(), self.places, least_bytes)
        self._missing = [set(members) for members in self._members]
        self._norms = list(self.gradients.new_zeros(len(self._members)).unbind())
        lows = [self.places[members[0]].start for members in self._members]
        # `weight` travels with the first: it is there before the backward, and any part would do.
        self.parts = [
            Part(low=low, high=high) for low, high in zip(lows, [len(self.exchanged), *lows[:-1]], strict=True)
        ]

        def taken(_parameter: Tensor, *, index: int, number: int) -> None:
            members, missing, part = self._members[number], self._missing[number], self.parts[number]
            missing.discard(index)
            if not missing:
                missing.update(members)
                self._take(members)
                self._norms[number].copy_(self.gradients[part.low : part.high].norm())
                self.parts[number] = dataclasses.replace(part, ready=event())

        for number, members in enumerate(self._members):
            for index in members:
                hook = functools.partial(taken, index=index, number=number)
                self._parameters[index].register_post_accumulate_grad_hook(hook)

    def _as_they_come(self) -> list[list[int]]:
        """The parameters, layer by layer: from the end of the buffer to its beginning, as a backward goes. Last come
        what stands before the layers, and the norms, which are all over them."""
        layer = re.compile(r"layers\.\d+\.")
        groups: dict[str, list[int]] = {}
        for index, place in enumerate(self.places):
            found = layer.match(place.name) if len(place.shape) > 1 else None
            groups.setdefault(found[0] if found else "", []).append(index)
        found = sorted(groups.values(), key=min, reverse=True)
        assert [index for group in reversed(found) for index in group] == list(range(len(self.places)))
        return found

    def _take(self, indices: Sequence[int]) -> None:
        # Each backward makes fresh ones: cheaper than to clear a buffer and have them added to it.
        take = torch._foreach_add_ if self.adds else torch._foreach_copy_
        take([self._gradient_of[index] for index in indices], [self._parameters[index].grad for index in indices])
        for index in indices:
            self._parameters[index].grad = None

    def spread(self) -> None:
        """Let the parameters be what `weights` holds now."""
        if self._working is not self.weights:
            self._working.copy_(self.weights)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` (weights, or anything laid out like them) by parameter name."""
        return {place.name: place.of(flat) for place in self.places}


def _joined(groups: Iterable[Sequence[int]], places: Sequence[Place], least_bytes: int) -> list[list[int]]:
    """Neighbours together until each has `least_bytes`; what is too small at the end goes with the one before."""
    joined: list[list[int]] = [[]]
    sizes = [0]
    for group in groups:
        if sizes[-1] >= least_bytes:
            joined.append([])
            sizes.append(0)
        joined[-1] = [*group, *joined[-1]]
        sizes[-1] += sum(4 * places[index].shape.numel() for index in group)
    if len(joined) > 1 and sizes[-1] < least_bytes:
        last = joined.pop()
        joined[-1] = [*last, *joined[-1]]
    return joined


class Ema:
    """The mean of the weights after each step so far, a step's share `decay` times that of the one after it.

    Corrected for its beginning: after step 1 it is that step's weights, whatever was there before; unless it `begins`
    with those, which were worth something. In float32, laid out like the weights, which are changed in place.
    """

    def __init__(self, weights: Tensor, decay: float) -> None:
        self._of = weights
        self.weights = weights.clone()
        self._log_decay = math.log(decay)
        self.begins = False

    def update(self, *, taken: Tensor, broken: Tensor) -> None:
        """Take in the weights after the step that made `taken` steps; where `broken` is 1 there was none, and nothing
        changes. Both are on the device, and nothing here waits for them."""
        self.take(self.share(taken=taken, broken=broken))

    def share(self, *, taken: Tensor, broken: Tensor) -> Tensor:
        """Of the weights after that step."""
        # (1 - decay) / (1 - decay ** taken), by which the shares of all steps so far add up to 1; or, with what was
        # there before the first, 1 - decay.
        share = torch.expm1(torch.full_like(taken, self._log_decay))
        share = -share if self.begins else share / torch.expm1(taken * self._log_decay)
        return torch.where(broken > 0, 0.0, share)

    def take(self, share: Tensor) -> None:
        self.weights.lerp_(self._of, share)


class AdamWInPlace:
    """torch's fused AdamW on float32 tensors in place, each with its weight decay and its two moments."""

    def __init__(self, tensors: Sequence[Tensor], decays: Sequence[float], moments: Sequence[dict[str, Tensor]],
                 config: OptimizerConfig) -> None:  # fmt: skip
        self.config = config
        self.parts = [nn.Parameter(tensor) for tensor in tensors]
        """The same memory; whoever calls `step` has given them their gradients."""
        by_decay: dict[float, list[nn.Parameter]] = {}  # torch's kernel does all of a group at once
        for part, decay in zip(self.parts, decays, strict=True):
            by_decay.setdefault(decay, []).append(part)
        groups = [{"params": parts, "weight_decay": decay} for decay, parts in by_decay.items()]
        device = tensors[0].device
        self.lr = torch.full((), config.lr, device=device)
        """Whoever calls `step` fills it first."""
        self._torch = torch.optim.AdamW(
            groups, lr=self.lr, betas=(config.beta1, config.beta2), eps=1e-8, fused=True,
            capturable=device.type == "cuda",
        )  # fmt: skip
        for part, own in zip(self.parts, moments, strict=True):
            self._torch.state[part] = {"step": torch.zeros((), device=device), **own}

    def step(self, *, norm: Tensor, broken: Tensor, weight: Tensor | None = None) -> None:
        """Divide the gradients by `weight` if there is one, scale them, whose norm is `norm` then, down to `clip_norm`,
        and take a step; where `broken` is 1 leave weights and moments as they are. All are on the device, and nothing
        here waits for them."""
        # torch's kernel divides by the one and skips everything by the other, in the pass that it makes anyway.
        scale = (norm / self.config.clip_norm).clamp(min=1.0)
        self._torch.grad_scale = scale if weight is None else scale * weight
        self._torch.found_inf = broken
        self._torch.step()

    @property
    def taken(self) -> Tensor:
        """Steps that were taken, on the device: without those that were left out as broken."""
        step: Tensor = next(iter(self._torch.state.values()))["step"]
        return step

    def resume_at(self, steps_done: int) -> None:
        """Go on as after `steps_done` steps, with whatever `moments` hold."""
        for state in self._torch.state.values():
            state["step"].fill_(steps_done)


class AdamW(AdamWInPlace):
    """On the two ends of a flat buffer."""

    def __init__(self, flat: FlatWeights, config: OptimizerConfig) -> None:
        self.flat = flat
        self.moments = {key: torch.zeros_like(flat.weights) for key in MOMENTS}
        """Laid out like the weights; updated in place."""
        ends = [slice(flat.decays_from, None), slice(0, flat.decays_from)]
        super().__init__(
            [flat.weights[end] for end in ends], [config.weight_decay, 0.0],
            [{key: moment[end] for key, moment in self.moments.items()} for end in ends], config,
        )  # fmt: skip
        for part, end in zip(self.parts, ends, strict=True):
            part.grad = flat.gradients[end]

    def step(self, *, norm: Tensor, broken: Tensor, weight: Tensor | None = None) -> None:
        super().step(norm=norm, broken=broken, weight=weight)
        self.flat.spread()
