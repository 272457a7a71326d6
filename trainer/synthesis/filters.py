"""What of a target's own writing is no good to learn from, and which of it is kept back; pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from trainer.synthesis.config import DrawnConfig

RUN = 4
"""Tokens in a row that make a repetition."""
LOOP, LOOP_SHARE = 48, 0.9
HALF = "�"


def fault(text: str, tokens: Sequence[int], *, ended: bool, drawn: DrawnConfig) -> str | None:
    """Why a turn is not kept, in words that are counted; None if it is. `tokens` are those that were written, without
    the one that ended it."""
    if not ended:
        return "has not come to its end"
    if len(tokens) < drawn.min_tokens or not text:
        return "is too short"
    if HALF in text:
        return "holds what is no text"
    return None


def repetition(tokens: Sequence[int]) -> float:
    """The share of runs of `RUN` tokens that were there before."""
    again = _again(tokens)
    return sum(again) / len(again) if again else 0.0


def loop(tokens: Sequence[int]) -> int | None:
    """Where a text begins to say nothing but what it has said before, if its last `LOOP` tokens do; None if not."""
    again = _again(tokens)
    if sum(again[-LOOP:]) < LOOP_SHARE * LOOP:
        return None
    new, begins = 0, len(again)
    for at in range(len(again) - 1, -1, -1):
        new += not again[at]
        if again[at] and new <= (1 - LOOP_SHARE) * (len(again) - at):
            begins = at
    return begins


def _again(tokens: Sequence[int]) -> list[bool]:
    """Of each run of `RUN` tokens, whether it was there before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for run in zip(*(tokens[shift:] for shift in range(RUN)), strict=False):
        found.append(run in seen)
        seen.add(run)
    return found


def key_of(question: str) -> bytes:
    """The same for questions that differ in case and space alone."""
    return hashlib.blake2b(" ".join(question.casefold().split()).encode(), digest_size=16).digest()


def held_out(key: bytes, fraction: float) -> bool:
    return int.from_bytes(key[:8], "big") < fraction * 2**64
