"""How `top` draws: which columns fit, what a curve looks like, and how its points come together."""

from __future__ import annotations

import pytest

from orchestrator.inventory import Target
from orchestrator.render import top
from orchestrator.verbs.top import Sighting
from orchestrator.verbs.trend import POINTS, Points, Trend


def row(name: str = "local") -> top.Row:
    target = Target(name=name, workdir="/w")
    return top.Row(run=None, sighting=Sighting(
        target=target, view=None, runs=[], age_s=None, fresh=False, why="being asked", error=None,
    ))  # fmt: skip


@pytest.mark.parametrize("width", range(36, 300, 7))
def test_columns_fit_and_the_weightiest_stay(width: int) -> None:
    chosen = top.columns(width, [row()])
    assert sum(one.width + top.GAP for one in chosen) <= width + top.GAP
    assert [one.name for one in chosen if one.rank <= 1] == ["state", "run", ">seen"]
    assert width < 150 or "why / note" in [one.name for one in chosen]


def test_a_curve_rises_with_its_figures_and_is_blank_where_none_was_written() -> None:
    rising: Points = [(float(step), float(step)) for step in range(8)]
    assert top.spark(rising, 8) == top.BARS
    assert top.spark(rising, 8, top.ASCII_BARS) == top.ASCII_BARS
    gap: Points = [(0.0, 1.0), (0.0, None), (7.0, 2.0)]
    assert top.spark(gap, 8) == "▁      █"
    assert top.spark([], 8) == ""


def test_noise_is_drawn_flat() -> None:
    noise: Points = [(float(step), 1000.0 + step % 3) for step in range(30)]
    assert len(set(top.spark(noise, 10))) == 1


def test_a_curve_that_is_read_later_comes_before_what_was_seen_meanwhile() -> None:
    trend = Trend()
    for step in (50, 60):
        trend.add("loss", step, 1.0)
    trend.begin("loss", [(10.0, 3.0), (40.0, 2.0), (55.0, 9.0)])
    assert trend.points["loss"] == [(10.0, 3.0), (40.0, 2.0), (50, 1.0), (60, 1.0)]
    trend.add("loss", 45, 1.5)
    assert trend.points["loss"][-2:] == [(40.0, 2.0), (45, 1.5)], "it went on from an earlier step"


def test_a_run_that_is_looked_at_for_long_keeps_its_first_and_its_newest_points() -> None:
    trend = Trend()
    for step in range(5 * POINTS):
        trend.add("loss", step, 1.0)
    points = trend.points["loss"]
    assert len(points) <= POINTS and points[0][0] == 0 and points[-1][0] == 5 * POINTS - 1
