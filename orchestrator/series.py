"""A figure over the steps of a run, in rows of equally many steps: what is compared, and what is plotted. Pure.

A row keeps count, sum and sum of squares, so that rows can be put together and still tell mean and spread. Its width
is a power of two: rows of a wider series are several of a narrower one's, whatever the two runs' lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from orchestrator.record import record


@record
class Sums:
    """What mean and spread are made of."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float | None = None
    high: float | None = None

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def spread(self) -> float | None:
        """The standard deviation, of two or more."""
        if self.count < 2:
            return None
        squares = max(0.0, self.squares - self.total * self.total / self.count)
        return float((squares / (self.count - 1)) ** 0.5)

    def plus(self, other: Sums) -> Sums:
        return Sums(
            count=self.count + other.count, total=self.total + other.total, squares=self.squares + other.squares,
            low=min((one.low for one in (self, other) if one.low is not None), default=None),
            high=max((one.high for one in (self, other) if one.high is not None), default=None),
        )  # fmt: skip


@record
class Row:
    """The steps from `number * width` on that were written down."""

    number: int
    at: float
    """When the first of them was."""
    until: float
    """When the last of them was."""
    sums: Sums


@record
class Series:
    """One figure of the run (`worker` None) or of one of its workers."""

    metric: str
    worker: str | None
    width: int
    last: int
    """The last step that has this figure."""
    rows: list[Row]

    def step(self, row: Row) -> int:
        """The first step of a row. There is no step 0."""
        return max(row.number * self.width, 1)

    def between(self, low: int, high: int) -> Sums:
        """Of the rows that begin at steps low..high-1."""
        sums = Sums()
        for row in self.rows:
            if low <= row.number * self.width < high:
                sums = sums.plus(row.sums)
        return sums


@record
class Stretch:
    """A figure of two runs over the same steps, `first` to `last`."""

    first: int
    last: int
    a: Sums
    b: Sums


GAP = 6.0
"""Rows further apart than so many times their median distance are not joined: nothing is known of what lies between."""


def gaps(places: Sequence[float]) -> set[int]:
    """Of rows at these places, those that are not joined to the one before."""
    distances = [after - before for before, after in itertools.pairwise(places)]
    usual = sorted(distances)[len(distances) // 2] if distances else 0.0
    return {number for number, one in enumerate(distances, 1) if usual > 0 and one > GAP * usual}


def edges(series: list[Series], *, at_most: int = 5) -> list[tuple[int, int]]:
    """The steps that all of `series` have in common, cut into equal stretches (from, up to but without) that begin
    where rows of all of them begin."""
    if not series:
        return []
    width = max(one.width for one in series)
    # A row that one of them has only begun is no equal stretch.
    end = (min(one.last for one in series) + 1) // width * width
    start = max(one.rows[0].number * one.width for one in series) // width * width
    size = max(1, math.ceil((end - start) / width / at_most)) * width
    return [(low, min(low + size, end)) for low in range(start, end, size)]


def stretches(a: Series, b: Series, *, at_most: int = 5) -> list[Stretch]:
    """Both over the same steps; without those of which one of them has no figure."""
    found = []
    for low, high in edges([a, b], at_most=at_most):
        one, other = a.between(low, high), b.between(low, high)
        if one.count and other.count:
            found.append(Stretch(first=max(low, 1), last=high - 1, a=one, b=other))
    return found


def bins(points: list[tuple[float, float | None]], width: int) -> list[float | None]:
    """`width` means of (step, figure) points, in their order, over equally many steps each.

    A bin without a point has the figure before it. From a point without a figure on, nothing is known: None.
    """
    if not points or width < 1:
        return []
    begin, size = points[0][0], (points[-1][0] - points[0][0]) / width
    sums: dict[int, Sums] = {}
    after: dict[int, float | None] = {}
    for step, figure in points:
        number = min(int((step - begin) / size), width - 1) if size > 0 else width - 1
        if figure is not None:
            sums[number] = sums.get(number, Sums()).plus(Sums(count=1, total=figure))
        after[number] = figure
    found: list[float | None] = []
    last: float | None = None
    for number in range(width):
        found.append(sums[number].mean if number in sums else last)
        last = after.get(number, last)
    return found
