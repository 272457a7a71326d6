"""The leak test: does any draft logit depend on what will not be there when a block is drafted?

A drafter that sees its answer has a superb training loss and is worthless when served. So who may look at what is
written once more, from the data alone (`leak_cases.py`), and the run's own drafter is held against it in three
ways that have to agree: one thing is changed and nothing that may not see it moves by a single bit; the gradient of a
block's logits is exactly zero where it may not look, and nowhere else; and a block drafted as a server does it, alone,
behind nothing but the text before it and without any mask, comes out the same. `examine.py` runs it on the
configuration's own target, data and shapes. Shapes: B rows, S context, N blocks of K slots, T = N*K, F features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer import compile_plan
from trainer.config import Config
from trainer.doctor.leak_cases import Case, make_case
from trainer.kernels import Kernels, plain
from trainer.micro_batch import shape_of
from trainer.model.attention import SparseAttention
from trainer.model.blocks import Blocks, generator_for
from trainer.model.target import Target
from trainer.replica import Replica

OWN_ANCHOR = "the hidden state of its own anchor"
LATER = "hidden states after its anchor"
OTHER_DOCUMENT = "hidden states of another document"
PADDING = "context, although it is padding"
OTHER_BLOCK = "slots of another block"
OTHER_ROW = "another row"
LATER_TEXT = "text after its anchor, or of another document, by way of the target's hidden states"
BLIND = "not all of the context before its anchor"
APART = "not all slots of its own block"
SERVED = "something that is not there, or stands elsewhere, when a server drafts it"
SPLIT = "what perturbation and gradient do not agree on"

FLEX_SCORES_AT_MOST = 1 << 27
"""On the CPU FlexAttention, which is not what runs there, writes all its scores out; above this it is not tried."""
ALIKE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""How far two ways of computing the same may differ through a whole target, relative to its size;"""
ALIKE_DRAFTED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""and through a drafter."""

Draft = Callable[[Tensor, Blocks], Tensor]
"""Features [B, S, F] and blocks -> the hidden states of all slots [B, T, H], of which each logit is a product with a
constant: where no bit of them changes, no logit does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    what: str
    """What a block depends on and must not, or the other way round: one of the constants above."""
    where: str


# --- what drafts ----------------------------------------------------------------------------------------------------


def drafts_of(member: Replica, case: Case) -> dict[str, tuple[Draft, bool]]:
    """The ways in which attention is computed for this case, by name: the run's own, and on the CPU FlexAttention's
    too; and whether each has a backward."""
    own = member.kernels.of(shape_of(case.features_BSF, case.blocks))
    found = {"the run's own attention": (draft_with(member, own), True)}
    rows, slots = case.blocks.tokens_BT.shape
    scores = rows * member.drafter.shape.heads * slots * (slots + case.ids_BS.shape[1])
    if member.device.type == "cpu" and scores <= FLEX_SCORES_AT_MOST:
        found["FlexAttention"] = (draft_with(member, _flex()), False)
    return found


def draft_with(member: Replica, kernels: Kernels) -> Draft:
    def draft(features_BSF: Tensor, blocks: Blocks) -> Tensor:
        # With gradients on, whether they are wanted or not: so it was compiled.
        with member.stream():
            features = features_BSF.to(member.device, member.ends.head_VH.dtype)
            slots: Tensor = member.drafter(features, blocks.to(member.device), member.ends, kernels)
        if member.device.type == "cuda":
            # Whoever compares does so on another stream.
            torch.cuda.synchronize(member.device)
        return slots

    return draft


@functools.cache
def _flex() -> Kernels:
    """FlexAttention traced, as it has to be, but run as it is written: on the CPU it has no backward."""
    flex = plain(SparseAttention(lambda _name, function, **_: function))
    traced = torch.compile(flex.layer, backend="eager", dynamic=False, fullgraph=True)

    def layer(*inputs: Any) -> Tensor:
        with torch.no_grad(), compile_plan.watch.lifted():
            slots: Tensor = traced(*inputs)
            return slots

    return dataclasses.replace(flex, first_layer=layer, layer=layer)


# --- perturb and compare --------------------------------------------------------------------------------------------


def leaks(case: Case, draft: Draft, *, gradients: bool, blocks: int, positions: int, head_VH: Tensor
          ) -> list[Leak]:  # fmt: skip
    """What `draft` depends on and must not, and what it must depend on and does not. Every block is compared whenever
    something is changed; `blocks` of them are looked into, evenly spread, and `positions` are changed one by one."""
    found: list[Leak] = []
    base = draft(case.features_BSF, case.blocks).detach()
    exact = base.dtype == torch.float32
    may_see = case.may_see_BNS
    chosen = _spread(case, blocks)
    for row, block in chosen:
        found += _hidden_from(case, draft, base, row, block)
        found += _own_block(case, draft, base, row, block, exact=exact)
    seen_at: dict[int, Tensor] = {}
    for at in _places(case, chosen, positions):
        changed = _changed(draft(_noisy(case, _only(case, at)), case.blocks), base, case)
        seen_at[at] = changed
        for row, block in (changed & ~may_see[:, :, at]).nonzero().tolist():
            found.append(Leak(what=_kind(case, row, block, at), where=f"{case.named(row, block)}, position {at}"))
        if exact:
            for row, block in (~changed & may_see[:, :, at]).nonzero().tolist():
                found.append(Leak(what=BLIND, where=f"{case.named(row, block)}, position {at}"))
    if gradients:
        for row, block in chosen:
            found += _by_gradient(case, draft, row, block, head_VH, seen_at if exact else {})
    return found


def _spread(case: Case, count: int) -> list[tuple[int, int]]:
    """(row, block) pairs: the first and the last, padding if there is some, and others between."""
    rows, blocks = case.blocks.valid_BN.shape
    every = [(row, block) for row in range(rows) for block in range(blocks)]
    step = max(1, (len(every) - 1) // max(1, count - 1))
    chosen = every[::step][:count]
    padding = (~case.blocks.valid_BN).nonzero().tolist()
    extra = [every[-1], *(tuple(pair) for pair in padding[:1])]
    return list(dict.fromkeys([*chosen, *extra]))


def _places(case: Case, chosen: list[tuple[int, int]], count: int) -> list[int]:
    """Positions where a mistake by one would show: around anchors and at the ends of documents; then any others."""
    length = case.ids_BS.shape[1]
    near: list[int] = []
    for row, block in chosen:
        anchor = int(case.blocks.anchors_BN[row, block])
        start = int(case.starts_BS[row, anchor])
        near += [anchor, anchor - 1, start, start - 1, anchor + 1]
    rest = torch.randperm(length, generator=generator_for("positions")).tolist()
    return [at for at in dict.fromkeys([*near, length - 1, *rest]) if 0 <= at < length][:count]


def _only(case: Case, at: int) -> Tensor:
    mask_BS = torch.zeros_like(case.loss_mask_BS)
    mask_BS[:, at] = True
    return mask_BS


def _noisy(case: Case, where_BS: Tensor) -> Tensor:
    """The features with something else at these places."""
    features = case.features_BSF
    noise = torch.randn(features.shape, generator=generator_for("noise")) * features.float().std() * 2
    return torch.where(where_BS[..., None], (features.float() * -0.5 + noise).to(features.dtype), features)


def _other_tokens(case: Case, which_BT: Tensor) -> Blocks:
    """The blocks with other tokens in these slots: such as occur in the text."""
    tokens = case.blocks.tokens_BT
    drawn = torch.randint(case.ids_BS.shape[1], tokens.shape, generator=generator_for("tokens"))
    others = case.ids_BS.gather(1, drawn)
    others = torch.where(others == tokens, case.blocks.tokens_BT.min() + 1, others)
    return dataclasses.replace(case.blocks, tokens_BT=torch.where(which_BT, others, tokens))


def _changed(after: Tensor, base: Tensor, case: Case) -> Tensor:
    """Which blocks [B, N] are not to the bit what they were."""
    differs_BT = (after.detach() != base).any(dim=-1).cpu()
    return differs_BT.unflatten(1, (case.blocks.anchors_BN.shape[1], -1)).any(dim=-1)


def _kind(case: Case, row: int, block: int, at: int) -> str:
    """What a block sees that sees this position of its own row."""
    if not case.blocks.valid_BN[row, block]:
        return PADDING
    anchor = int(case.blocks.anchors_BN[row, block])
    if at == anchor:
        return OWN_ANCHOR
    # A document that begins behind the anchor is another one; that it lies behind it is what counts.
    return LATER if at > anchor else OTHER_DOCUMENT


def _hidden_from(case: Case, draft: Draft, base: Tensor, row: int, block: int) -> list[Leak]:
    """Change all at once that the block may not see; if it moves, find out by what."""
    rows, length = case.ids_BS.shape
    size = case.blocks.block_size
    others_BT = torch.ones_like(case.blocks.tokens_BT, dtype=torch.bool)
    others_BT[row, block * size : (block + 1) * size] = False
    unseen_BS = torch.ones_like(case.loss_mask_BS)
    unseen_BS[row] = ~case.may_see_BNS[row, block]
    own = slice(block * size, (block + 1) * size)

    def moves(features_BSF: Tensor, blocks: Blocks) -> bool:
        return not torch.equal(draft(features_BSF, blocks).detach()[row, own], base[row, own])

    if not moves(_noisy(case, unseen_BS), _other_tokens(case, others_BT)):
        return []
    kinds: dict[str, Tensor] = {}
    for at in unseen_BS[row].nonzero().squeeze(1).tolist():
        kinds.setdefault(_kind(case, row, block, at), torch.zeros_like(case.loss_mask_BS))[row, at] = True
    found = [what for what, where_BS in kinds.items() if moves(_noisy(case, where_BS), case.blocks)]
    in_row = others_BT.clone()
    in_row[torch.arange(rows) != row] = False
    if moves(case.features_BSF, _other_tokens(case, in_row)):
        found.append(OTHER_BLOCK)
    elsewhere = (torch.arange(rows) != row)[:, None]
    if moves(_noisy(case, elsewhere.expand(rows, length)), _other_tokens(case, others_BT & elsewhere)):
        found.append(OTHER_ROW)
    return [Leak(what=what, where=case.named(row, block)) for what in found or [OTHER_BLOCK]]


def _own_block(case: Case, draft: Draft, base: Tensor, row: int, block: int, *, exact: bool) -> list[Leak]:
    """Change one slot of the block: all of the block moves, and no other."""
    size = case.blocks.block_size
    slot = block * size + size - 1
    which = torch.zeros_like(case.blocks.tokens_BT, dtype=torch.bool)
    which[row, slot] = True
    after = draft(case.features_BSF, _other_tokens(case, which))
    changed = _changed(after, base, case)
    changed[row, block] = False
    found = [Leak(what=OTHER_BLOCK, where=case.named(*pair)) for pair in changed.nonzero().tolist()]
    moved = (after.detach() != base).any(dim=-1)[row, block * size : (block + 1) * size]
    if exact and not moved.all():
        found.append(Leak(what=APART, where=case.named(row, block)))
    return found


# --- by gradient ----------------------------------------------------------------------------------------------------


def _by_gradient(case: Case, draft: Draft, row: int, block: int, head_VH: Tensor, seen_at: dict[int, Tensor]
                 ) -> list[Leak]:  # fmt: skip
    """The derivative of a random sum of the block's logits by every hidden state."""
    size = case.blocks.block_size
    features = case.features_BSF.detach().float().requires_grad_()
    own = draft(features, case.blocks)[row, block * size : (block + 1) * size]
    some_VH = head_VH[torch.randint(len(head_VH), (64,), generator=generator_for("logits")).to(head_VH.device)]
    mix = torch.randn(size, len(some_VH), generator=generator_for("mix")).to(own.device, own.dtype)
    (gradient,) = torch.autograd.grad((F.linear(own, some_VH) * mix).sum(), features)
    depends_BS = (gradient != 0).any(dim=-1)
    may_S = case.may_see_BNS[row, block]
    found, where = [], case.named(row, block)
    others = depends_BS.clone()
    others[row] = False
    if others.any():
        found.append(Leak(what=OTHER_ROW, where=f"{where}, by gradient"))
    for at in (depends_BS[row] & ~may_S).nonzero().squeeze(1).tolist():
        found.append(Leak(what=_kind(case, row, block, at), where=f"{where}, position {at}, by gradient"))
    for at in (~depends_BS[row] & may_S).nonzero().squeeze(1).tolist():
        found.append(Leak(what=BLIND, where=f"{where}, position {at}, by gradient"))
    for at, changed_BN in seen_at.items():
        if bool(changed_BN[row, block]) != bool(depends_BS[row, at]):
            found.append(Leak(what=SPLIT, where=f"{where}, position {at}"))
    return found


# --- by way of the target, and as a server drafts -------------------------------------------------------------------


def token_leaks(case: Case, config: Config, target: Target, draft: Draft, *, positions: int) -> list[Leak]:
    """Change one token of the text, and let target and drafter run again: only blocks behind it in its document, and
    the one that begins with it, may become others."""
    found: list[Leak] = []
    base = draft(case.features_BSF, case.blocks).detach().float()
    place_S = torch.arange(case.ids_BS.shape[1])
    may_see = case.may_see_BNS | (
        (place_S == case.blocks.anchors_BN[..., None]) & case.blocks.valid_BN[..., None]
    )  # fmt: skip
    for at in _places(case, _spread(case, positions), positions):
        ids_BS = case.ids_BS.clone()
        # Another token of the same text; one that is the same is no change.
        ids_BS[:, at] = torch.where(ids_BS[:, at] == ids_BS[:, at - 1], ids_BS[:, at - 2], ids_BS[:, at - 1])
        other = make_case(config, target, ids_BS, case.loss_mask_BS, case.starts_BS, name=case.name)
        blocks = dataclasses.replace(case.blocks, tokens_BT=other.blocks.tokens_BT)
        after = draft(other.features_BSF, blocks).detach().float()
        shape = (case.blocks.anchors_BN.shape[1], -1)
        moved_BN = (after - base).unflatten(1, shape).flatten(2).norm(dim=-1).cpu()
        scale_BN = base.unflatten(1, shape).flatten(2).norm(dim=-1).cpu()
        # Attention may add up its numbers in another order: a dependency would be far larger than that.
        changed_BN = moved_BN > ALIKE[case.features_BSF.dtype] / 10 * scale_BN
        for row, block in (changed_BN & ~may_see[:, :, at]).nonzero().tolist():
            found.append(Leak(what=LATER_TEXT, where=f"{case.named(row, block)}, token {at}"))
    return found


class _SeesAll:
    """Attention without any mask."""

    def mask(self, blocks: Blocks, context_length: int) -> None:
        return None

    def __call__(self, query_BHTD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: Any) -> Tensor:
        groups = query_BHTD.shape[1] // key_BGKD.shape[1]
        key, value = key_BGKD.repeat_interleave(groups, dim=1), value_BGKD.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(query_BHTD, key, value)


def served_otherwise(case: Case, config: Config, member: Replica, draft: Draft, *, blocks: int) -> list[Leak]:
    """Draft blocks as a server does: one at a time, behind the hidden states of the text before it and no others."""
    found: list[Leak] = []
    size, base = config.drafter.block_size, draft(case.features_BSF, case.blocks).detach().float()
    alone = draft_with(member, plain(_SeesAll()))
    for row, block in _spread(case, blocks):
        if not case.blocks.valid_BN[row, block]:
            continue
        anchor = int(case.blocks.anchors_BN[row, block])
        start = int(case.starts_BS[row, anchor])
        tokens = torch.full((1, size), config.drafter.mask_token_id)
        tokens[0, 0] = case.ids_BS[row, anchor]
        none = torch.zeros(1, 1, dtype=torch.long)
        supervised = torch.zeros(1, 1, size - 1)
        only = Blocks(
            anchors_BN=none + anchor - start, valid_BN=none == 0, starts_BN=none,
            positions_BS=torch.arange(anchor - start)[None],
            tokens_BT=tokens, positions_BT=anchor - start + torch.arange(size)[None],
            labels_BNk=supervised.long(), weights_BNk=supervised,
        )  # fmt: skip
        expected = alone(case.features_BSF[row : row + 1, start:anchor], only).detach().float()[0]
        found_here = base[row, block * size : (block + 1) * size]
        differs = float((found_here - expected).norm() / expected.norm())
        # Products of other sizes are rounded otherwise.
        if not differs < ALIKE_DRAFTED[member.ends.head_VH.dtype]:
            found.append(Leak(what=SERVED, where=f"{case.named(row, block)}, by {differs:.1%}"))
    return found


def text_alone_differs(case: Case, target: Target) -> float:
    """How far hidden states of a row's documents differ from those of their text alone, cut off at an anchor: the most,
    relative to their size. Of a target that looks ahead, or across documents, it is a large part."""
    worst = 0.0
    for row, block in _spread(case, 2):
        anchor = int(case.blocks.anchors_BN[row, block])
        start = int(case.starts_BS[row, anchor])
        if anchor - start < 1 or not case.blocks.valid_BN[row, block]:
            continue
        with target.stream():
            alone = target.features(case.ids_BS[row : row + 1, start:anchor]).float().cpu()[0]
        inside = case.features_BSF[row, start:anchor].float()
        worst = max(worst, float((inside - alone).norm() / alone.norm()))
    return worst
