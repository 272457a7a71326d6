"""What of a target's own writing is no good to learn from, and which of it is kept back; pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from trainer.synthesis.config import DrawnConfig

RUN = 4
"""Tokens in a row that make a repetition."""
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
    runs = [tuple(tokens[at : at + RUN]) for at in range(len(tokens) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def key_of(question: str) -> bytes:
    """The same for questions that differ in case and space alone."""
    return hashlib.blake2b(" ".join(question.casefold().split()).encode(), digest_size=16).digest()


def held_out(key: bytes, fraction: float) -> bool:
    return int.from_bytes(key[:8], "big") < fraction * 2**64
