"""Continuations of prompts, by a drafter and its target, or by the target alone: the library's call.

`generate` hands prompts to the rows of an `Engine`, and a row that is done to the next prompt. What comes out does not
depend on how many rows there are: greedy, it is what the target alone would write, token for token (in bfloat16 up to
ties, see docs/decoding.md); drawn, each token is distributed as the target would draw it, and follows from the seed and
the prompt's number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from trainer.decode.acceptance import Acceptance
from trainer.decode.engine import BlockDrafter, Engine, Launched
from trainer.decode.sampling import Sampling
from trainer.model.target import Target

OnTokens = Callable[[int, list[int]], None]
"""(number of the prompt, tokens that have come)."""
Say = Callable[[str], None]
Hopeless = Callable[[list[int]], bool]
"""Whether a text, as it has come so far, is not worth going on with."""
LOOKED_AT_EVERY = 32
"""Tokens of a text."""


@dataclass(kw_only=True, slots=True)
class Continuation:
    """Of one prompt."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """With the one that ended it, if one did."""
    ended: bool = False
    """By a token that ends a text; else there were as many as were asked for, or it was given up."""
    acceptance: Acceptance


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    continuations: list[Continuation]
    """By prompt."""
    reading_s: float
    """The target read prompts, for so long."""
    decoding_s: float
    """Rounds, for so long; what was recorded beforehand is in neither."""

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens) for one in self.continuations)

    @property
    def tok_s(self) -> float:
        """Tokens written per second, those behind the prompts left out: they come with the reading."""
        return (self.tokens - len(self.continuations)) / max(self.decoding_s, 1e-9)

    @property
    def acceptance(self) -> Acceptance:
        first, *others = (one.acceptance for one in self.continuations)
        return sum(others, start=first)


def generate(target: Target, block_drafter: BlockDrafter | None, prompts: Sequence[Sequence[int]], *, max_tokens: int,
             batch_size: int = 1, sampling: Sampling | None = None, seed: int = 0,
             stop_ids: Iterable[int] | None = None, on_tokens: OnTokens | None = None, graphs: bool = True,
             compiled: bool = False, say: Say = lambda line: None) -> Generated:  # fmt: skip
    """Up to `max_tokens` tokens behind each of `prompts`, which are token ids; by the target alone without
    `block_drafter`. `stop_ids` end a text; left out, the target's own end tokens. `graphs` and `compiled` as of an
    `Engine`. Raises `ConfigError` for a target
    that cannot be decoded this way, `ValueError` for a prompt without a token."""
    if not prompts:
        return Generated(continuations=[], reading_s=0.0, decoding_s=0.0)
    engine = engine_for(
        target, block_drafter, prompts, max_tokens=max_tokens, batch_size=batch_size, sampling=sampling,
        stop_ids=end_ids(target) if stop_ids is None else stop_ids, graphs=graphs, compiled=compiled, say=say,
    )  # fmt: skip
    return run(engine, prompts, max_tokens=max_tokens, seed=seed, on_tokens=on_tokens)


def engine_for(target: Target, block_drafter: BlockDrafter | None, prompts: Sequence[Sequence[int]], *, max_tokens: int,
               batch_size: int, sampling: Sampling | None, stop_ids: Iterable[int], graphs: bool = True,
               compiled: bool = False, say: Say = lambda line: None) -> Engine:  # fmt: skip
    """One that has room for these prompts, ready to go."""
    if any(not prompt for prompt in prompts):
        raise ValueError("a prompt has no token: there is nothing to go on from")
    block = block_drafter.block_size if block_drafter else 1
    longest = max(map(len, prompts)) + max_tokens - 1 + block
    engine = Engine(
        target, block_drafter, rows=min(batch_size, len(prompts)), capacity=longest, sampling=sampling,
        stop_ids=stop_ids, graphs=graphs, compiled=compiled,
    )  # fmt: skip
    return prepared(engine, say)


def prepared(engine: Engine, say: Say) -> Engine:
    """With what a GPU does in a round compiled and recorded, or a word on why it could not be."""
    for line in engine.prepare():
        say(line)
    return engine


def run(engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int = 0,
        on_tokens: OnTokens | None = None, seeds: Sequence[Sequence[int | str]] | None = None,
        hopeless: Hopeless | None = None) -> Generated:  # fmt: skip
    """The same in an engine that is there, and has room. `seeds`: what each prompt's draws follow from; left out,
    `seed` and its number. `hopeless` is asked of a text every `LOOKED_AT_EVERY` tokens, and ends it."""
    found = [Continuation(prompt=list(prompt), acceptance=Acceptance(block_size=engine.block_size))
             for prompt in prompts]  # fmt: skip
    seeds = seeds or [(seed, number) for number in range(len(prompts))]
    waiting, free = list(range(len(prompts))), list(range(engine.rows))
    in_row: dict[int, int] = {}
    given_up: list[int] = []
    reading_s = decoding_s = 0.0

    def take(row: int, tokens: list[int], *, ended: bool) -> None:
        number = in_row[row]
        one = found[number]
        new, before = tokens[: max_tokens - len(one.tokens)], len(one.tokens)
        one.tokens += new
        one.ended = ended and len(new) == len(tokens)
        if on_tokens and new:
            on_tokens(number, new)
        done = ended or len(one.tokens) >= max_tokens
        if not done and hopeless and before // LOOKED_AT_EVERY < len(one.tokens) // LOOKED_AT_EVERY:
            done = hopeless(one.tokens)
            if done:
                given_up.append(row)
        if done:
            del in_row[row]
            free.append(row)

    under_way: deque[tuple[Launched, dict[int, int]]] = deque()
    """Rounds, and whose prompts were in which rows."""

    def collect() -> None:
        launched, numbers = under_way.popleft()
        made = engine.collect(launched)
        for row, number in numbers.items():
            if in_row.get(row) == number:  # or it was done in the round before, and had no part in this one
                count = made.counts[row]
                found[number].acceptance.add(count=count, kept=made.kept[row])
                take(row, made.tokens_BK[row][:count], ended=made.ended[row])
        if given_up:
            engine.give_up(given_up)
            given_up.clear()

    def settle() -> None:
        """Until nothing is under way."""
        nonlocal decoding_s
        started = time.perf_counter()
        while under_way:
            collect()
        decoding_s += time.perf_counter() - started

    while waiting or in_row:
        # Few at a time would be read as slowly as many.
        if waiting and len(free) * 4 >= engine.rows:
            settle()
            started = time.perf_counter()
            rows, free[:] = sorted(free)[: len(waiting)], sorted(free)[len(waiting) :]
            numbers = [waiting.pop(0) for _ in rows]
            in_row.update(zip(rows, numbers, strict=True))
            first = engine.admit(
                rows, [prompts[number] for number in numbers], max_tokens=[max_tokens] * len(rows),
                seeds=[seeds[number] for number in numbers],
            )  # fmt: skip
            for row, token in zip(rows, first, strict=True):
                take(row, [token], ended=token in engine.stop_ids)
            reading_s += time.perf_counter() - started
            continue
        started = time.perf_counter()
        # A round more for as long as somebody may want its token, whatever the ones under way come to.
        while len(under_way) <= engine.ahead and any(
            len(found[number].tokens) + len(under_way) < max_tokens for number in in_row.values()
        ):
            under_way.append((engine.launch(in_row), dict(in_row)))
        collect()
        decoding_s += time.perf_counter() - started
    settle()
    return Generated(continuations=found, reading_s=reading_s, decoding_s=decoding_s)


def end_ids(target: Target) -> set[int]:
    """The tokens that end a text, by the model's own generation settings and its tokenizer's."""
    configured = getattr(getattr(target.model, "generation_config", None), "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in (*found, target.tokenizer.eos_token_id) if token is not None}
