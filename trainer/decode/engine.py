"""Rows decoded side by side: a round is a block drafted, verified by the target, and cut after what the target agrees
to; without a drafter, one token of the target's own. `generate.py` says which prompt goes into which row.

All of a round's state stays on the device in tensors that never move, and every round over the same length of context
has the same shapes: on CUDA it is recorded as one graph, drafter, target, head and acceptance, and launched as a whole,
with or without a drafter. No round depends on what the host makes of the one before, so that the next one may be
launched while the host still reads what came of this one. On the CPU the same code runs as it is written.

A row holds its tokens; the last of them, at `anchors`, the target has not read: it is the next block's slot 0, and is
read, by target and drafter, with what is drafted behind it. Letters: B rows, K slots of a block (1 without a drafter),
C capacity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ConfigError
from trainer.decode.compiling import AsWritten
from trainer.decode.drafting import Drafting
from trainer.decode.memory import GoingOn, Memory, Reading, through
from trainer.decode.rounds import Rounds
from trainer.decode.sampling import Sampling, draw, end_of_greedy_round, end_of_round, keep_sampled
from trainer.model.blocks import bring, generator_for
from trainer.model.drafter import Drafter, FrozenEnds
from trainer.model.target import Target, decoder_layers

SHORTEST = 128
"""Tokens of context that a round looks at, at least; more are looked at in steps of twice as many."""
ALIGN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDrafter:
    """A drafter, and what has to be known to ask it."""

    drafter: Drafter
    ends: FrozenEnds
    block_size: int
    mask_token_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A round that the device has been told of, on its way to the host."""

    made_Bn: Tensor
    done: Any
    """CUDA event; None where it is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What a round came to, on the host, for every row; of rows that were done before, nothing in it means anything."""

    tokens_BK: list[list[int]]
    """In order; of row b the first `counts[b]`."""
    counts: list[int]
    kept: list[int]
    """How many of them were drafted: all but the last, or all where one of them ended the text."""
    ended: list[bool]
    """By a token that ends the text, which is the last one then."""


class Engine:
    """`rows` rows of `capacity` tokens at most, block included. Raises `ConfigError` for a target that cannot be
    decoded this way.

    `graphs`: on CUDA, whether rounds are recorded (`prepare`); `compiled`: and compiled for that, which takes
    seconds and pays from some thousand rounds on."""

    def __init__(self, target: Target, block_drafter: BlockDrafter | None, *, rows: int, capacity: int,
                 sampling: Sampling | None = None, stop_ids: Iterable[int] = (), graphs: bool = True,
                 compiled: bool = False) -> None:  # fmt: skip
        if not target.masks_itself:
            raise ConfigError(
                f"target.path: {type(target.model).__name__} attends in a way of its own (a sliding window, or chunks),"
                " which decoding here does not do"
            )
        self.target, self.rows = target, rows
        config = target.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or capacity + ALIGN
        if capacity > limit:
            raise ConfigError(
                f"prompt, tokens to write and a block are {capacity} tokens together, and the target knows {limit}"
                " positions; ask for fewer tokens, or shorter prompts"
            )
        self.capacity = capacity = min(-(-capacity // ALIGN) * ALIGN, limit)
        self.sampling = sampling or Sampling()
        self.block_size = block_drafter.block_size if block_drafter else 1
        device, heads = target.device, config.num_attention_heads
        try:
            self._memory = Memory(
                layers=len(decoder_layers(target.model)), rows=rows, capacity=capacity, device=device,
                kv_heads=getattr(config, "num_key_value_heads", None) or heads, dtype=target.model.dtype,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            )  # fmt: skip
            self._drafting = block_drafter and Drafting(
                block_drafter.drafter, block_drafter.ends, block_size=self.block_size,
                mask_token_id=block_drafter.mask_token_id, rows=rows, capacity=capacity,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"{device} has no room for {rows} rows of {capacity} tokens each; decode fewer at once, or fewer tokens"
            ) from None
        # Room behind the last block, where rows that are done go on writing.
        self._ids_BC = torch.zeros(rows, capacity + self.block_size, dtype=torch.long, device=device)
        self._anchors_B, self._last_B, self._rounds_B = torch.zeros(3, rows, dtype=torch.long, device=device).unbind()
        self._done_B = torch.ones(rows, dtype=torch.bool, device=device)
        self.stop_ids = frozenset(stop_ids)
        self._stops = torch.tensor(sorted(self.stop_ids), dtype=torch.long, device=device)
        self._slot_K = torch.arange(self.block_size, device=device)
        self._every_B = torch.arange(rows, device=device)
        # One number for the token behind the prompt; in each round one for each slot to draw it, one to accept it.
        self._uniform_BRn = torch.zeros(rows, capacity if not self.sampling.greedy else 0, 2 * self.block_size,
                                        device=device)  # fmt: skip
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # which has filled what is there
        self.rounds = Rounds(self.lengths, self._stream, graphs=graphs, compiled=compiled)
        self._anchors = [0] * rows
        """As the host knows them."""
        self._under_way = 0
        """Rounds that are launched and not collected."""

    # --- before the first round ---

    @property
    def lengths(self) -> list[int]:
        """Of context that a round may look at, rising."""
        lengths = [SHORTEST]
        while lengths[-1] < self.capacity:
            lengths.append(2 * lengths[-1])
        return [*lengths[:-1], self.capacity]

    def prepare(self) -> list[str]:
        """Compile and record the rounds, while no row is in use and, since that compiles, no other thread runs; on the
        CPU there is nothing to do. Returns what torch cannot, and why, if so: rounds are then slower."""
        with self.stream():  # rows that are done stay as they are
            return self.rounds.prepare(self._work)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """What is done with what the rounds read belongs inside: their own stream, where there are streams."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    # --- prompts ---

    @torch.no_grad()
    def admit(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], *, max_tokens: Sequence[int],
              seeds: Sequence[Sequence[int | str]] | None = None) -> list[int]:  # fmt: skip
        """Put a prompt into each of `rows`, whatever they held, and have the target read them; returns the first token
        that it writes behind each. `seeds` is what a row's draws follow from, and needed where tokens are drawn."""
        device, longest = self.target.device, max(map(len, prompts))
        for prompt, most in zip(prompts, max_tokens, strict=True):
            assert len(prompt) > 0 and len(prompt) + most - 1 + self.block_size <= self.capacity, "no room"
        padded = -(-longest // ALIGN) * ALIGN
        ids = torch.zeros(len(rows), min(padded, self.capacity), dtype=torch.long)
        for place, prompt in enumerate(prompts):
            ids[place, : len(prompt)] = torch.tensor(prompt)
        with self.stream():
            ids_BT, rows_B = bring(ids, device), bring(torch.tensor(rows), device)
            lengths = [len(prompt) for prompt in prompts]
            lengths_B = bring(torch.tensor(lengths), device)
            uniform_B = self._seed(rows, rows_B, max_tokens, seeds)
            with through(Reading(self._memory, rows_B)):
                positions_BT = torch.arange(ids_BT.shape[1], device=device).expand_as(ids_BT)
                hidden_BTH, features_BTF = self.target.run({"input_ids": ids_BT, "position_ids": positions_BT})
            if self._drafting:
                self._drafting.read_prompts(features_BTF, positions_BT, rows_B)
            last_BH = hidden_BTH[torch.arange(len(rows), device=device), lengths_B - 1]
            logits_BV = F.linear(last_BH, self.target.ends.head_VH)
            if self.sampling.greedy:
                first_B = logits_BV.argmax(dim=-1)
            else:
                first_B = draw(self.sampling.probabilities(logits_BV), uniform_B)
            width = ids_BT.shape[1]
            self._ids_BC[:, :width].index_copy_(0, rows_B, ids_BT)
            self._ids_BC.index_put_((rows_B, lengths_B), first_B)
            self._anchors_B.index_copy_(0, rows_B, lengths_B)
            ends = [length + most - 1 for length, most in zip(lengths, max_tokens, strict=True)]
            self._last_B.index_copy_(0, rows_B, bring(torch.tensor(ends), device))
            stopped_B = (first_B[:, None] == self._stops).any(dim=1)
            self._done_B.index_copy_(0, rows_B, stopped_B | (lengths_B >= self._last_B[rows_B]))
            self._rounds_B.index_fill_(0, rows_B, 1)
            first: list[int] = first_B.tolist()
        for row, length in zip(rows, lengths, strict=True):
            self._anchors[row] = length
        return first

    def _seed(self, rows: Sequence[int], rows_B: Tensor, max_tokens: Sequence[int],
              seeds: Sequence[Sequence[int | str]] | None) -> Tensor | None:  # fmt: skip
        if self.sampling.greedy:
            return None
        assert seeds is not None
        width = self._uniform_BRn.shape[2]
        # As many rounds as tokens at most, and the token behind the prompt.
        drawn = torch.zeros(len(rows), max(max_tokens) + 1, width)
        for place, (seed, most) in enumerate(zip(seeds, max_tokens, strict=True)):
            drawn[place, : most + 1] = torch.rand(most + 1, width, generator=generator_for("decode", *seed))
        drawn = bring(drawn, self.target.device)
        self._uniform_BRn[:, : drawn.shape[1]].index_copy_(0, rows_B, drawn)
        return drawn[:, 0, 0]

    # --- rounds ---

    @property
    def ahead(self) -> int:
        """Rounds worth launching before the one before them is collected: on the CPU none, where the host itself does
        what is launched."""
        return 0 if self._stream is None else 1

    @torch.no_grad()
    def launch(self, active: Iterable[int]) -> Launched:
        """One round of all rows, of which `active` are not done, as far as is known."""
        self._under_way += 1
        needed = max(self._anchors[row] for row in active) + self._under_way * self.block_size
        length = next(length for length in self.lengths if length >= min(needed, self.capacity))
        with self.stream():
            made_Bn = self.rounds.launch(length, self._work)
            if self._stream is None:
                return Launched(made_Bn=made_Bn, done=None)
            # The next round writes where this one has written.
            return Launched(made_Bn=made_Bn.to("cpu", non_blocking=True), done=self._stream.record_event())

    def collect(self, launched: Launched) -> Round:
        """What came of it; the host waits for it here. In the order in which they were launched."""
        if launched.done is not None:
            launched.done.synchronize()
        made = launched.made_Bn.tolist()
        self._under_way -= 1
        for row, (*_, count, _kept, _ended) in enumerate(made):
            self._anchors[row] += count
        return Round(
            tokens_BK=[line[: self.block_size] for line in made], counts=[line[-3] for line in made],
            kept=[line[-2] for line in made], ended=[bool(line[-1]) for line in made],
        )  # fmt: skip

    def give_up(self, rows: Sequence[int]) -> None:
        """What is in `rows` is not gone on with, from the next round that is launched on."""
        with self.stream():
            self._done_B.index_fill_(0, bring(torch.tensor(rows), self.target.device), True)

    @torch.no_grad()
    def _work(self, length: int, way: AsWritten) -> Tensor:
        """[B, K+3]: tokens, and of each row how many count, how many of them were drafted, and whether one ended it."""
        anchors_B = self._anchors_B
        positions_BK = anchors_B[:, None] + self._slot_K
        token_B = self._ids_BC.gather(1, anchors_B[:, None]).squeeze(1)
        uniform_Bn = None
        if not self.sampling.greedy:
            uniform_Bn = self._uniform_BRn[self._every_B, self._rounds_B.clamp(max=self._uniform_BRn.shape[1] - 1)]

        rope = self._drafting and self._drafting.rope(positions_BK, way=way)
        draft_Bk, drafted_BkV = self._draft(token_B, rope, positions_BK, length, uniform_Bn, way)
        block_BK = torch.cat((token_B[:, None], draft_Bk), dim=1)
        with through(GoingOn(self._memory, positions_BK, length)), way.layers_of(self.target.model):
            hidden_BKH, features_BKF = self.target.run({"input_ids": block_BK, "position_ids": positions_BK})
        logits_BKV = F.linear(hidden_BKH, self.target.ends.head_VH)
        if uniform_Bn is None:
            end, found = end_of_greedy_round, (logits_BKV.argmax(dim=-1),)
        else:
            accept_Bk, last_B = uniform_Bn[:, self.block_size :].split((self.block_size - 1, 1), dim=1)
            target_BKV = self.sampling.probabilities(logits_BKV)
            end = end_of_round
            found = keep_sampled(draft_Bk, drafted_BkV, target_BKV, accept_Bk, last_B.squeeze(1))
        if self._drafting:
            # All of the block; what was not kept is behind the next anchor, and overwritten before it is seen.
            self._drafting.read(features_BKF, rope, positions_BK, way=way)

        made_Bn, *after = way.run(
            end, block_BK, *found, self._stops, anchors_B, self._last_B, self._rounds_B, self._done_B
        )
        self._ids_BC.scatter_(1, positions_BK + 1, made_Bn[:, : self.block_size])
        for kept, now in zip((anchors_B, self._rounds_B, self._done_B), after, strict=True):
            kept.copy_(now)
        return made_Bn

    def _draft(self, token_B: Tensor, rope: Any, positions_BK: Tensor, length: int, uniform_Bn: Tensor | None,
               way: AsWritten) -> tuple[Tensor, Any]:  # fmt: skip
        """The tokens behind a block's first [B, K-1], and the distributions they were drawn from, if they were."""
        if self._drafting is None:
            drafted = self.target.ends.head_VH.new_zeros(self.rows, 0, self.target.ends.head_VH.shape[0])
            return token_B.new_zeros(self.rows, 0), drafted.float()
        logits_BkV = self._drafting.propose(token_B, rope, positions_BK, length, way=way)
        if uniform_Bn is None:
            return logits_BkV.argmax(dim=-1), None
        drafted_BkV = self.sampling.probabilities(logits_BkV)
        return draw(drafted_BkV, uniform_Bn[:, : self.block_size - 1]), drafted_BkV
