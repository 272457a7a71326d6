"""How much of what is drafted stays: the acceptance length, and the acceptance of each slot.

τ, the acceptance length, is the mean number of tokens that one verification by the target yields: those drafted tokens
that it agrees to, and the one that it adds itself (the "bonus"), which is counted. Without any agreement τ is 1; a
block of K slots gives K at most. The token that the target writes when it has read the prompt belongs to no
verification. A verification whose tokens end the text counts with those up to the end; one that goes past the tokens
that were asked for counts in full.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DEFINITION = "τ: tokens per verification by the target, drafted and kept ones plus the target's own next one (bonus)"


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """Counts, of one text or of many."""

    block_size: int
    verifications: int = 0
    tokens: int = 0
    """That they yielded."""
    reached_k: list[int] = field(default_factory=list)
    """By slot 1..K-1: verifications in which all slots before it stayed, and the text went on."""
    kept_k: list[int] = field(default_factory=list)
    """Those of them in which it stayed too."""

    def __post_init__(self) -> None:
        self.reached_k = self.reached_k or [0] * (self.block_size - 1)
        self.kept_k = self.kept_k or [0] * (self.block_size - 1)

    def add(self, *, count: int, kept: int) -> None:
        """A verification that yielded `count` tokens, of which `kept` were drafted."""
        self.verifications += 1
        self.tokens += count
        for slot in range(kept):
            self.reached_k[slot] += 1
            self.kept_k[slot] += 1
        # Where a drafted token ended the text nobody asked for the slot behind it.
        if kept < count and kept < len(self.reached_k):
            self.reached_k[kept] += 1

    def __add__(self, other: Acceptance) -> Acceptance:
        assert self.block_size == other.block_size
        return Acceptance(
            block_size=self.block_size, verifications=self.verifications + other.verifications,
            tokens=self.tokens + other.tokens,
            reached_k=[one + two for one, two in zip(self.reached_k, other.reached_k, strict=True)],
            kept_k=[one + two for one, two in zip(self.kept_k, other.kept_k, strict=True)],
        )  # fmt: skip

    @property
    def tau(self) -> float | None:
        """None where nothing has been verified."""
        return self.tokens / self.verifications if self.verifications else None

    @property
    def by_slot(self) -> list[float | None]:
        """By slot 1..K-1: the share of verifications in which it, and so all before it, stayed."""
        return [kept / self.verifications if self.verifications else None for kept in self.kept_k]

    @property
    def by_slot_if_reached(self) -> list[float | None]:
        """The same among those in which all before it stayed."""
        return [
            kept / reached if reached else None for kept, reached in zip(self.kept_k, self.reached_k, strict=True)
        ]  # fmt: skip
