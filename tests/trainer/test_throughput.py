"""How fast a run says it is, and when it says that it has become slower (case E10 of the public bug reports)."""

from __future__ import annotations

import pytest

from trainer.report.throughput import Amount, Decay, Throughput, total


def amounts(*tokens: float) -> list[Amount]:
    return [Amount(tokens=one, positions=2 * one) for one in tokens]


def tok_s(meter: Throughput) -> list[float]:
    return [rate.tokens for rate in meter.rates()]


def test_throughput_leaves_the_warm_up_out_and_is_never_zero_after_a_step() -> None:
    meter = Throughput(workers=2, now=100.0, warm_up_steps=2)
    assert meter.step_s is None
    meter.add(amounts(100, 100), now=150.0)
    assert tok_s(meter) == [2.0, 2.0] and meter.step_s == 50.0
    meter.add(amounts(100, 100), now=160.0)
    assert tok_s(meter) == [200 / 60, 200 / 60]
    meter.add(amounts(100, 50), now=161.0)
    assert tok_s(meter) == [100.0, 50.0] and meter.step_s == 1.0
    meter.add(amounts(100, 50), now=164.0)
    assert tok_s(meter) == [50.0, 25.0] and meter.step_s == 2.0
    assert total(meter.rates()) == Amount(tokens=75.0, positions=150.0)


class Run:
    """Steps of 31 s each, so that every one is a window; `rate` is what its tok/s is."""

    def __init__(self) -> None:
        self.decay, self.now = Decay(), 1000.0
        assert self.decay.stepped(0, now=self.now) is None

    def at(self, *rates: float) -> list[str | None]:
        said = []
        for rate in rates:
            self.now += 31.0
            change = self.decay.stepped(31.0 * rate, now=self.now)
            said.append(change and change.kind)
        return said


def test_e10_a_run_that_falls_to_half_of_its_median_has_decayed_and_the_compile_step_counts_for_nothing() -> None:
    run = Run()
    assert run.at(100, 5000, 5010, 2500, 2400) == [None, None, None, None, "decay"]


def test_a_decay_is_said_once_and_its_end_once_and_the_next_one_again() -> None:
    run = Run()
    assert run.at(9, 100, 100, 100, 60, 60) == [*[None] * 5, "decay"]
    assert run.at(60, 50, 79, 81, 100) == [None, None, None, "decay_over", None]
    assert run.at(60, 60) == [None, "decay"]


def test_a_run_does_not_get_used_to_being_slow() -> None:
    run = Run()
    run.at(9, *[100] * 5, 50, 50)
    assert run.at(*[50] * 50, 100) == [*[None] * 50, "decay_over"]
    assert run.decay.recent_tok_s == pytest.approx(100)


@pytest.mark.parametrize("rates", [[100, 100, 30, 100, 30, 100], [100, 71, 71, 71], [50, 60, 100, 120, 90], [5, 5, 5]])
def test_one_slow_window_is_no_decay_and_neither_is_a_little_nor_a_run_that_gets_faster(rates: list[float]) -> None:
    assert set(Run().at(1, *rates)) == {None}


def test_saving_a_checkpoint_is_no_decay() -> None:
    run = Run()
    run.at(9, 100, 100, 100)
    for _ in range(4):
        run.now += 100.0
        run.decay.paused(100.0)
        assert run.at(100) == [None]


def test_a_change_says_what_it_is_compared_with() -> None:
    run = Run()
    run.at(9, 5000, 5010, 2500)
    run.now += 31
    said = str(run.decay.stepped(31 * 2400, now=run.now))
    assert said == "tok/s has fallen: 2,400 is 48% of the run's median 5,005"
