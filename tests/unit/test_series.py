"""Figures over steps: their means and spreads, and which steps two runs have in common."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from orchestrator.agent import curves
from orchestrator.series import Row, Series, Sums, bins, stretches


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


def test_a_line_of_a_worker_that_was_not_kept_is_no_fall_of_the_runs_rate(tmp_path: Path) -> None:
    lines = {
        "drafter-0": [1, 2, 3, 4, 5, 6, 7, 8], "drafter-1": [1, 2, 4, 5, 6, 7], "drafter-2": [1, 2, 3],
    }  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"time": 1.0, "nonce": "n", "step": step, "worker": worker, "tok_s": 100.0 + step, "loss": 1.0}
        for worker, steps in lines.items()
        for step in steps
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = curves.read(str(path), "n", ["tok_s", "loss"], workers=False)
    rate, loss = ({row["number"]: row["sums"]["total"] for row in one["rows"]} for one in told["series"])
    assert rate[3] == 103 + 102 + 103, "drafter-1's line of step 3 was not kept"
    assert rate[4] == 208 and rate[7] == 214, "drafter-2 had died"
    assert rate[8] == 108 + 107, "drafter-1 has not come to step 8 yet"
    assert set(loss.values()) == {1.0}


def test_bins_are_means_over_equally_many_steps_and_empty_from_where_nothing_was_written() -> None:
    assert bins([], 3) == [] and bins([(7.0, 2.0)], 3) == [None, None, 2.0]
    assert bins([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (4.0, 7.0)], 2) == [2.0, 6.0]
    assert bins([(0.0, 1.0), (8.0, 9.0)], 4) == [1.0, 1.0, 1.0, 9.0], "what lies between two points is joined"
    assert bins([(0.0, 1.0), (0.0, None), (8.0, 9.0)], 4) == [1.0, None, None, 9.0], "and not across a gap"
