"""How fast a run is, honestly: rates over the whole run without its warm-up, and whether it has become slower.

What there is to do in a share of a step (`Amount`) is counted by the loader, and added up when the step is done
(`tally.py`).
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

WARM_UP_STEPS = 2
WINDOW_S = 30.0
DECAYED, RECOVERED = 0.7, 0.8
"""Of the run's own median: below the first it has become slower, above the second it is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """Of work, or of work a second."""

    tokens: float = 0
    """Of the target's input, padding left out."""
    positions: float = 0
    """Slots that are supervised: those with a weight."""
    target_flop: float = 0.0
    drafter_flop: float = 0.0
    """As `model/flops.py` counts them, padding and all."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def __truediv__(self, by: float) -> Amount:
        return Amount(**{name: getattr(self, name) / by for name in self.__slots__})

    @property
    def flop(self) -> float:
        return self.target_flop + self.drafter_flop


def total(amounts: Iterable[Amount]) -> Amount:
    return sum(amounts, Amount())


class Throughput:
    """Work per second over the whole run, by worker; the first steps, which warm up, are left out.

    Until the warm-up is over the figure is that of the steps so far, so that it is never zero after a step.
    """

    def __init__(self, *, workers: int, now: float, warm_up_steps: int = WARM_UP_STEPS) -> None:
        self._counted = [Amount()] * workers, now, now
        """Work by worker, since when, until when: exchanged as a whole, since another thread may be reading."""
        self._warm_up_steps = warm_up_steps
        self._steps = 0

    def add(self, done: Sequence[Amount], *, now: float) -> None:
        """One more step: its work by worker."""
        counted, start, until = self._counted
        if self._steps == self._warm_up_steps:
            counted, start = [Amount()] * len(done), until
        self._steps += 1
        self._counted = [old + new for old, new in zip(counted, done, strict=True)], start, now

    def rates(self) -> list[Amount]:
        """By worker; their sum is the run's."""
        counted, start, until = self._counted
        return [amount / max(until - start, 1e-9) for amount in counted]

    @property
    def step_s(self) -> float | None:
        """Of the steps that are counted, on average."""
        _, start, until = self._counted
        steps = self._steps - self._warm_up_steps if self._steps > self._warm_up_steps else self._steps
        return (until - start) / steps if steps else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedChange:
    kind: Literal["decay", "decay_over"]
    tok_s: float
    median_tok_s: float
    """Of the run, as it was when the decay began."""

    def __str__(self) -> str:
        what = "fallen" if self.kind == "decay" else "recovered"
        share = f"{self.tok_s:,.0f} is {self.tok_s / self.median_tok_s:.0%}"
        return f"tok/s has {what}: {share} of the run's median {self.median_tok_s:,.0f}"


@dataclass(slots=True)
class Decay:
    """Told of every step; says when tok/s falls for long below the run's own median, and when that is over.

    The run is cut into windows of `window_s` or a little more, whole steps. The first one is warm-up and does not
    count. A decay begins with the second of two windows in a row below `DECAYED` times the median of those before them.
    What is slow counts for that median no more, so that a run does not get used to it; the decay ends with a window of
    `RECOVERED` times the median.
    """

    window_s: float = WINDOW_S
    recent_tok_s: float | None = None
    """Of the last window."""
    _rates: list[float] = field(default_factory=list)
    """Of the windows so far but the last two, sorted."""
    _last: list[float] = field(default_factory=list)
    """The two after those."""
    _reference: float | None = None
    """The median, while there is a decay."""
    _warm: bool = False
    _begun: float | None = None
    _tokens: float = 0
    _idle_s: float = 0.0

    def paused(self, seconds: float) -> None:
        """So long the run did something else than to train: it has saved a checkpoint."""
        self._idle_s += seconds

    def stepped(self, tokens: float, *, now: float) -> SpeedChange | None:
        """A step is done, `now` is `time.monotonic()`."""
        if self._begun is None:
            self._restart(now)  # nobody knows when the first step began
            return None
        self._tokens += tokens
        took_s = now - self._begun - self._idle_s
        if took_s < self.window_s:
            return None
        rate = self._tokens / took_s
        self._restart(now)
        if not self._warm:
            self._warm = True
            return None
        self.recent_tok_s = rate
        return self._judge(rate)

    def _restart(self, now: float) -> None:
        self._begun, self._tokens, self._idle_s = now, 0, 0.0

    def _judge(self, rate: float) -> SpeedChange | None:
        if self._reference is not None:
            if rate < RECOVERED * self._reference:
                return None
            change = SpeedChange(kind="decay_over", tok_s=rate, median_tok_s=self._reference)
            self._reference, self._last = None, [rate]
            return change
        self._last.append(rate)
        if len(self._last) > 2:
            bisect.insort(self._rates, self._last.pop(0))
        if not self._rates or max(self._last) >= DECAYED * (median := statistics.median(self._rates)):
            return None
        self._reference = median
        return SpeedChange(kind="decay", tok_s=rate, median_tok_s=median)
