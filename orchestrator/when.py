"""A time as people type it: `10m` ago, `14:00`, `2026-11-29T14:00`. Without a zone it is this machine's."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
AGO = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")
CLOCK = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
FORMS = "10m, 2h, 1h30m, 1d; 14:00, 2026-11-29, 2026-11-29T14:00, with Z or +01:00 for another time zone"


def parse(text: str, now: float) -> float:
    """The moment that `text` means, in Unix seconds. A bare clock time is the last time that it was so late.

    Raises ValueError, with what it would have understood, when it means none.
    """
    text = text.strip()
    try:
        if AGO.fullmatch(text):
            parts = re.findall(r"([\d.]+)([smhdw])", text)
            return now - timedelta(seconds=sum(float(number) * UNITS_S[unit] for number, unit in parts)).total_seconds()
        if CLOCK.fullmatch(text):
            today = datetime.fromtimestamp(now)
            at = datetime.combine(today, time.fromisoformat(text if text[2] == ":" else f"0{text}"))
            return (at if at <= today else at - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is no time; understood are {FORMS}") from None
