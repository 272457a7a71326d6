"""The learning rate of a step: a pure function of the step, the configuration and the number of steps.

Nothing is carried from step to step, so a resume needs no state of it, and every replica finds the same value. Drafter
threads ask for it and write it onto their device (`optim.AdamW.lr`).
"""

from __future__ import annotations

import math

from trainer.sections import OptimizerConfig


def learning_rate(step: int, *, config: OptimizerConfig, steps: int) -> float:
    """Of step 1..`steps`: a linear rise to `lr` over the first `warmup_fraction` of them, which is above zero in step 1
    already; then what `schedule` says, down to `final_lr_fraction` of `lr` in the last one. Constant does not fall."""
    warmup = max(1, round(config.warmup_fraction * steps))
    if step <= warmup:
        return config.lr * step / warmup
    floor = config.final_lr_fraction
    return config.lr * (floor + (1 - floor) * _left(step, warmup, config=config, steps=steps))


def _left(step: int, warmup: int, *, config: OptimizerConfig, steps: int) -> float:
    """Of the way from `lr` to its end, 1..0, at a step after the warm-up."""
    if config.schedule == "constant":
        return 1.0
    length = steps - warmup
    if config.schedule == "wsd":
        length = min(length, max(1, round(config.decay_share * steps)))
    done = min(max(0.0, (step - (steps - length)) / max(1, length)), 1.0)
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - math.sqrt(done) if config.decay_shape == "1-sqrt" else 1 - done
