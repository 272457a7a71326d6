"""AdamW over flat float32 weights, and the learning rate as a pure function of the step.

A replica's weights and gradients are two flat buffers, of which the parameters are views: averaging, clipping, the
optimizer and the proof of equality each touch one tensor. Matrices come first and decay; norms follow and do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.config import OptimizerConfig

ALIGN = 64
"""Floats; every parameter starts on a 256-byte boundary, as if it had been allocated alone."""


def learning_rate(step: int, *, config: OptimizerConfig, steps: int) -> float:
    """Of step 1..steps: linear warm-up, then constant or cosine down to `final_lr_fraction`."""
    warmup = max(1, round(config.warmup_fraction * steps))
    if step <= warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup) / max(1, steps - warmup)
    floor = config.final_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a parameter lives in the flat buffers."""

    name: str
    start: int
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


class FlatWeights:
    """Moves a module's parameters into one buffer, and their gradients into another."""

    def __init__(self, module: nn.Module) -> None:
        named = sorted(module.named_parameters(), key=lambda item: item[1].dim() < 2)
        self.places: list[Place] = []
        size = decaying = 0
        for name, parameter in named:
            self.places.append(Place(name=name, start=size, shape=parameter.shape))
            size += -(-parameter.numel() // ALIGN) * ALIGN
            if parameter.dim() >= 2:
                decaying = size
        device = named[0][1].device
        self.weights = torch.zeros(size, device=device)
        self.gradients = torch.zeros(size, device=device)
        self.decaying = decaying
        for place, (_, parameter) in zip(self.places, named, strict=True):
            place.of(self.weights).copy_(parameter.data)
            parameter.data = place.of(self.weights)
            parameter.grad = place.of(self.gradients)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` (weights, or anything laid out like them) by parameter name."""
        return {place.name: place.of(flat) for place in self.places}

    def fill(self, flat: Tensor, named: dict[str, Tensor]) -> None:
        for place in self.places:
            place.of(flat).copy_(named[place.name])


class AdamW:
    """torch's fused AdamW on the two ends of the flat buffer."""

    def __init__(self, flat: FlatWeights, config: OptimizerConfig) -> None:
        self.flat, self.config = flat, config
        self._parts = []
        groups = []
        for start, stop, decay in ((0, flat.decaying, config.weight_decay), (flat.decaying, len(flat.weights), 0.0)):
            part = nn.Parameter(flat.weights[start:stop])
            part.grad = flat.gradients[start:stop]
            self._parts.append(part)
            groups.append({"params": [part], "weight_decay": decay})
        self._torch = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8, fused=True)

    def clip(self, norm: float) -> None:
        """Scale the gradients, whose norm is `norm`, down to `clip_norm`."""
        if norm > self.config.clip_norm:
            self.flat.gradients.mul_(self.config.clip_norm / norm)

    def step(self, lr: float) -> None:
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()

    def state(self) -> dict[str, Tensor]:
        """Both moments, flat: `exp_avg` and `exp_avg_sq`. Zeros before the first step."""
        return {
            key: torch.cat([self._torch.state[part].get(key, torch.zeros_like(part)) for part in self._parts]).detach()
            for key in ("exp_avg", "exp_avg_sq")
        }

    def restore(self, moments: dict[str, Tensor], *, steps_done: int) -> None:
        start = 0
        for part in self._parts:
            stop = start + part.numel()
            self._torch.state[part] = {
                "step": torch.tensor(float(steps_done), device=part.device),
                **{key: flat[start:stop].clone() for key, flat in moments.items()},
            }
            start = stop
