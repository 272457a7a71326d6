"""The learning rate, as a table of schedules that all have to rise, hold and fall as they say."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.schedule import learning_rate
from trainer.sections import OptimizerConfig

LR, FLOOR = 2e-3, 0.1
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"schedule": "cosine"},
    "cosine without warm-up": {"schedule": "cosine", "warmup_fraction": 0.0},
    "cosine to nothing": {"schedule": "cosine", "final_lr_fraction": 0.0},
    "constant": {"schedule": "constant"},
    "wsd": {"schedule": "wsd"},
    "wsd, 1-sqrt": {"schedule": "wsd", "decay_shape": "1-sqrt", "decay_fraction": 0.5},
    "wsd, linear": {"schedule": "wsd", "decay_shape": "linear", "decay_fraction": 0.5},
    "wsd that never holds": {"schedule": "wsd", "warmup_fraction": 0.5, "decay_fraction": 0.5},
    "warm-up alone": {"schedule": "cosine", "warmup_fraction": 1.0},
}


def rates(steps: int, **changes: Any) -> list[float]:
    """Of steps 1..`steps`."""
    config = OptimizerConfig(**{"lr": LR, "warmup_fraction": 0.1, "final_lr_fraction": FLOOR, **changes})
    return [learning_rate(step, config=config, steps=steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("changes", SCHEDULES.values(), ids=list(SCHEDULES))
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
def test_a_schedule_rises_to_its_peak_and_never_again_after_it(changes: dict[str, Any], steps: int) -> None:
    found = rates(steps, **changes)
    warmup = max(1, round(changes.get("warmup_fraction", 0.1) * steps))
    assert 0 < found[0] == pytest.approx(LR / warmup)
    assert found[:warmup] == sorted(found[:warmup]) and len(set(found[:warmup])) == warmup
    assert found[warmup - 1] == max(found) == LR
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    if steps > warmup:
        floor = 1.0 if changes["schedule"] == "constant" else changes.get("final_lr_fraction", FLOOR)
        assert found[-1] == pytest.approx(floor * LR)


@pytest.mark.parametrize("changes", SCHEDULES.values(), ids=list(SCHEDULES))
def test_it_has_no_jumps(changes: dict[str, Any]) -> None:
    # The steepest is the beginning of 1 - sqrt, and of a warm-up.
    steps = 100_000
    most = max(abs(one - other) for one, other in itertools.pairwise(rates(steps, **changes)))
    steepest = math.sqrt(1 / (0.5 * steps)) if changes.get("decay_shape") == "1-sqrt" else 1 / (0.1 * steps)
    if changes.get("warmup_fraction") != 0.0:
        assert most <= LR * steepest * 1.001


def test_each_shape_of_decay_is_where_its_formula_says() -> None:
    half = {"schedule": "wsd", "decay_fraction": 0.5, "final_lr_fraction": 0.2}
    assert rates(100, **half)[49] == LR
    assert rates(100, **half)[74] == pytest.approx(LR * (0.2 + 0.8 * 0.5)), "halfway down a straight line"
    curved = rates(100, **half, decay_shape="1-sqrt")
    assert curved[49] == LR and curved[74] == pytest.approx(LR * (0.2 + 0.8 * (1 - math.sqrt(0.5))))
    assert rates(100, schedule="cosine", warmup_fraction=0.5)[74] == pytest.approx(LR * (FLOOR + 0.9 * 0.5))
    assert rates(100, schedule="wsd")[79] == LR > rates(100, schedule="wsd")[80], "the last fifth"


def test_wsd_holds_the_same_rate_however_many_steps_are_added() -> None:
    """So that what is trained before a longer run is decided on is not lost."""
    shorter, longer = (rates(steps, schedule="wsd", warmup_fraction=0.0) for steps in (100, 200))
    assert shorter[:80] == longer[:80] == [LR] * 80
    assert len(set(rates(100, schedule="cosine"))) > 80


@settings(deadline=None)
@given(
    steps=st.integers(1, 5000), warmup=st.integers(0, 99), decay=st.integers(1, 100), floor=st.integers(0, 100),
    shape=st.sampled_from(["linear", "1-sqrt"]), schedule=st.sampled_from(["cosine", "constant", "wsd"]),
)  # fmt: skip
def test_it_stays_within_its_bounds_for_any_fractions(steps: int, warmup: int, decay: int, floor: int, shape: str,
                                                      schedule: str) -> None:  # fmt: skip
    """In percent."""
    changes: dict[str, Any] = {"schedule": schedule, "warmup_fraction": warmup / 100, "final_lr_fraction": floor / 100}
    if schedule == "wsd":
        changes |= {"decay_fraction": min(decay, 100 - warmup) / 100, "decay_shape": shape}
    for step, rate in enumerate(rates(steps, **changes), start=1):
        assert floor / 100 * LR * (1 - 1e-12) <= rate <= LR * (1 + 1e-12) or step <= max(1, round(warmup / 100 * steps))
        assert 0 <= rate <= LR and (rate > 0 or (step == steps and floor == 0))
