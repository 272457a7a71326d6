"""Figures over steps: their means and spreads, and which steps two runs have in common."""

from __future__ import annotations

import itertools
import math

import pytest

from orchestrator.series import Row, Series, Sums, stretches


def sums(*values: float) -> Sums:
    return Sums(count=len(values), total=sum(values), squares=sum(value * value for value in values))


def series(width: int, last: int, value: float, *, first: int = 1) -> Series:
    """Of the same figure in steps `first` to `last`."""
    counts = [sum(first <= step <= last for step in range(low, low + width)) for low in range(0, last + 1, width)]
    rows = [
        Row(number=number, at=0.0, until=0.0, sums=sums(*[value] * count))
        for number, count in enumerate(counts)
        if count
    ]
    return Series(metric="loss", worker=None, width=width, last=last, rows=rows)


def test_mean_and_spread_are_those_of_the_figures() -> None:
    figures = sums(1.0, 2.0).plus(sums(4.0))
    assert figures.mean == pytest.approx(7 / 3) and figures.spread == pytest.approx(math.sqrt(7 / 3))
    assert sums(5.0).spread is None and sums().mean is None


@pytest.mark.parametrize(("one", "other"), [((1, 100), (1, 60)), ((1, 60), (8, 1000)), ((8, 1000), (2, 333))])
def test_stretches_are_of_steps_that_both_have_taken(one: tuple[int, int], other: tuple[int, int]) -> None:
    found = stretches(series(*one, value=3.0), series(*other, value=2.0))
    assert 1 <= len(found) <= 5 and found[-1].last <= min(one[1], other[1])
    for before, after in itertools.pairwise(found):
        assert after.first == before.last + 1
    for stretch in found:
        assert stretch.a.count == stretch.b.count and (stretch.a.mean, stretch.b.mean) == (3.0, 2.0)


def test_runs_that_have_no_step_in_common_are_compared_over_none() -> None:
    assert stretches(series(1, 10, 1.0), series(1, 30, 1.0, first=15)) == []
