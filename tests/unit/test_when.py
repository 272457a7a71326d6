"""Times as people type them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest

from orchestrator import when
from orchestrator.cli.base import UsageError, seconds
from orchestrator.verbs.logs import theirs

NOW = datetime(2026, 11, 29, 13, 30, tzinfo=timezone.utc).timestamp()


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Berlin: an hour ahead of UTC in winter, two in summer."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "ago_s"), [("10m", 600), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), ("0.5h", 1800), ("45s", 45)]
)
def test_so_long_ago(text: str, ago_s: float) -> None:
    assert when.parse(text, NOW) == NOW - ago_s


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-11-29T14:00", "2026-11-29T13:00"), ("2026-11-29 14:00:05", "2026-11-29T13:00:05"),
        ("2026-11-29", "2026-11-28T23:00"), ("2026-11-29T14:00Z", "2026-11-29T14:00"),
        ("2026-11-29T14:00-02:00", "2026-11-29T16:00"), ("2026-07-01T14:00", "2026-07-01T12:00"),
        ("14:00", "2026-11-29T13:00"), ("9:05", "2026-11-29T08:05"), ("14:30", "2026-11-29T13:30"),
        ("14:31", "2026-11-28T13:31"), ("23:50:10", "2026-11-28T22:50:10"),
    ],
)  # fmt: skip
def test_a_time_is_local_unless_it_says_its_zone_and_a_bare_clock_time_has_been(text: str, utc: str) -> None:
    assert datetime.fromtimestamp(when.parse(text, NOW), timezone.utc) == datetime.fromisoformat(f"{utc}+00:00")


@pytest.mark.parametrize("text", ["", "10", "yesterday", "25:00", "14:61", "2026-13-01", "10x", "-5m", "9" * 30 + "d"])
def test_what_is_no_time_is_refused_with_what_is_one(text: str) -> None:
    with pytest.raises(ValueError, match="understood are 10m"):
        when.parse(text, NOW)


@pytest.mark.parametrize(("ahead_s", "taken_s"), [(0.0, 0.0), (0.3, 0.0), (-0.9, 0.0), (60.0, 59.5), (-60.0, -59.0)])
def test_clocks_are_taken_to_agree_unless_the_probe_shows_that_they_do_not(ahead_s: float, taken_s: float) -> None:
    # Asked at 1000.0, heard at 1001.5 of this machine's clock; the container read its own clock at 1001.0 of ours.
    probe = SimpleNamespace(observed_at=1001.0 + ahead_s)
    assert theirs(500.0, probe, 1000.0, 1001.5) == pytest.approx(500.0 + taken_s)  # type: ignore[arg-type]


def test_a_time_to_wait_has_a_unit_or_is_seconds_and_is_within_bounds() -> None:
    parse = seconds(0.0, 3600.0)
    assert [parse(text) for text in ("90", "1.5", "90s", "5m", "1h", "60m")] == [90, 1.5, 90, 300, 3600, 3600]
    for text in ("2h", "-1s", "nan", "infs", "m", "", "5x"):
        with pytest.raises(UsageError, match="is no number of seconds between 0 and 3,600"):
            parse(text)
