"""What a drafter takes in each of several processes, under torch's DDP or FSDP2 (`distributed/replica.py`).

DDP holds all weights, and gradients in buckets, whose views they are. FSDP2 holds a share of weights, gradients,
moments and averages; a layer's weights are gathered in the type of the arithmetic when it is computed, while the next
one's are under way, and its gradients added up in float32, so that what passes through grows with the largest layer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.config import Config
from trainer.model.drafter import Drafter, DrafterShape
from trainer.optim import MOMENTS

ENGINES = ("ddp", "fsdp2")
UNDER_WAY = 3
"""Gathered weights of so many layers at once: of the one that is computed, its neighbour's, and what arrived of it."""


def held(drafter: Drafter, config: Config, *, processes: int) -> int:
    """Bytes of weights, gradients, moments and moving average, all float32, that one process has all the time."""
    copies = 2 + len(MOMENTS) + (config.optimizer.ema is not None)
    share = processes if config.engine == "fsdp2" else 1
    # By rows, of which the last processes may have fewer.
    return sum(4 * copies * -(-len(one) // share) * (one.numel() // len(one)) for one in drafter.parameters())


def module(shape: DrafterShape, config: Config, dtype: torch.dtype) -> Drafter:
    """As a step computes with it, without content; its gradients are moved elsewhere as they come."""
    drafter = Drafter.without_content(shape)
    if config.engine == "fsdp2":
        drafter.to(dtype)
    for parameter in drafter.parameters():
        parameter.register_post_accumulate_grad_hook(_moved)
    return drafter


def passing(shape: DrafterShape, config: Config, dtype: torch.dtype) -> int:
    """Bytes of what FSDP2 gathers and adds up on the way, at the most; of DDP's there is nothing beside its buckets."""
    if config.engine != "fsdp2":
        return 0
    drafter = Drafter.without_content(shape)
    layers = [_count(layer.parameters()) for layer in drafter.layers]
    outside = _count(drafter.parameters()) - sum(layers)
    # The gradient, and what is sent of it to be added up in float32.
    added_up = dtype.itemsize + 4
    while_a_layer = max(layers) * (UNDER_WAY * dtype.itemsize + added_up)
    return outside * dtype.itemsize + max(while_a_layer, outside * added_up)


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(one.numel() for one in parameters)


def _moved(parameter: Tensor) -> None:
    parameter.grad = None
