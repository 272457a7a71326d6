"""The serve-parity gate: does an export decode as the trainer's own drafter does, and if not, what is wrong with it?

Both draft a block behind every token of what the target itself writes after some prompts: the trainer's drafter with
the checkpoint's weights, by the trainer's forward; then, from the exported directory alone, the reference decoder. What
is compared is each slot's token, whether the target would have kept it, and the hidden states before the head, which
still tell of a fault when a drafter has learnt too little to be kept at all. If they differ, the reference reads the
directory in every way that is known to go wrong (`mistakes.py`): one that makes them agree is named.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ConfigError
from trainer.export import reference
from trainer.export.contract import Gate
from trainer.export.mistakes import Trained, mistakes
from trainer.export.package import Package
from trainer.export.reference import Drafted, ReferenceTarget, Unreadable
from trainer.export.source import DTYPES, DtypeName, Source
from trainer.kernels import plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import lay_out
from trainer.model.drafter import Drafter
from trainer.model.target import Target, load_target
from trainer.sections import TargetConfig

MORE_TOKENS = 24
"""Blocks behind a prompt: the target writes so many tokens more than a block and one beyond it."""

Text = tuple[Tensor, list[int]]
"""Ids [S] of a prompt and what the target writes after it, and the anchors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How far two ways to compute the same may differ."""

    hidden: float
    """Of the hidden states: the norm of the difference by the norm."""
    margin: float
    """In logits: a token that leads by less is as good as the next one."""
    share: float
    """Of the slots, that may differ by more."""


TOLERANCES: dict[DtypeName, Tolerance] = {
    "float32": Tolerance(hidden=1e-4, margin=1e-3, share=0.0),
    "bfloat16": Tolerance(hidden=5e-2, margin=0.5, share=0.02),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The trainer's side: what its drafter drafts behind texts of the target's own."""

    source: Source
    tensors: dict[str, Tensor]
    """The checkpoint's, in the type that is exported."""
    texts: list[Text]
    drafted: Drafted
    arithmetic: DtypeName
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the gate saw."""

    gate: Gate
    prompts: int
    differences: list[str]
    """Empty: they agree."""
    diagnosis: list[str]
    """Known mistakes, each of which alone explains all of the differences."""
    ties: int
    """Slots whose token or label differs because two were as good as each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    differences: list[str]
    ties: int


def replay(package: Package, prompts: Callable[[Target], list[Tensor]], *, device: torch.device,
           arithmetic: DtypeName) -> Replay:  # fmt: skip
    """What the trainer's own drafter drafts with the checkpoint of `package`; nothing of it comes from the export.
    `prompts` makes token ids [P] by a target's tokenizer. Raises `ConfigError` for a target that cannot be loaded."""
    found = package.source
    config = TargetConfig(path=str(found.target_path), dtype=arithmetic, layer_ids=found.layer_ids)
    target = load_target(config, device)
    texts = list(continued(target, prompts(target), block_size=found.block_size))
    # What is rounded when it is written is no fault.
    tensors = {name: tensor.to(DTYPES[package.dtype]) for name, tensor in found.weights.items()}
    drafted = _by_trainer(found, target, tensors, texts, dtype=DTYPES[arithmetic])
    return Replay(source=found, tensors=tensors, texts=texts, drafted=drafted, arithmetic=arithmetic, device=device)


def judge(directory: Path, replay: Replay, *, say: Callable[[str], None]) -> Outcome:
    """Whether what is exported to `directory` decodes as `replay` does."""
    found, by_trainer, tolerance = replay.source, replay.drafted, TOLERANCES[replay.arithmetic]
    by_reference: Drafted | None = None
    diagnosis: list[str] = []
    try:
        reading = reference.read(directory)
    except Unreadable as error:
        compared = _Compared(differences=[str(error)], ties=0)
    else:
        target = ReferenceTarget(found.target_path, device=replay.device, dtype=DTYPES[replay.arithmetic])
        by_reference = reference.draft(reading, target, replay.texts)
        compared = _compare(by_trainer, by_reference, tolerance)
        if compared.differences:
            say("gate: they differ; trying what is known to go wrong")
            trained = Trained(
                layer_ids=found.layer_ids, target_layers=found.target.layers, mask_token_id=found.mask_token_id,
                rope_theta=found.shape.rope_theta, rms_norm_eps=found.shape.rms_norm_eps, tensors=replay.tensors,
            )  # fmt: skip
            for mistake in mistakes(reading, trained):
                if mistake.general and diagnosis:
                    continue
                mended = reference.draft(mistake.reading, target, replay.texts)
                if not _compare(by_trainer, mended, tolerance).differences:
                    diagnosis.append(mistake.name)
    return Outcome(
        gate=Gate(
            arithmetic=replay.arithmetic, blocks=len(by_trainer.tokens_Nk), kept_by_trainer=kept(by_trainer),
            kept_by_reference=kept(by_reference) if by_reference else [],
        ),
        prompts=len(replay.texts), differences=compared.differences, diagnosis=diagnosis, ties=compared.ties,
    )  # fmt: skip


def kept(drafted: Drafted) -> list[int]:
    """How many blocks keep slot 1, 2, ...: their token and all before it are the target's own."""
    counts: list[int] = (drafted.tokens_Nk == drafted.greedy_Nk).cumprod(dim=1).sum(dim=0).tolist()
    return counts


# --- what is drafted ------------------------------------------------------------------------------------------------


@torch.no_grad()
def continued(target: Target, prompts: Sequence[Tensor], *, block_size: int) -> Iterator[Text]:
    """What the target writes greedily after each prompt, also beyond the token that ends its answer. Of a prompt that
    is too long for the target its end is taken."""
    from transformers import DynamicCache

    length = block_size + 1 + MORE_TOKENS
    positions = getattr(target.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if positions <= length:
        raise ConfigError(f"the target has {positions} positions, and the gate needs {length + 1} at least: --no-gate")
    # transformers has given it another name.
    named = "cache" if "cache" in inspect.signature(target.model.forward).parameters else "past_key_values"
    for whole_P in prompts:
        prompt_P = whole_P[-(positions - length) :]
        found, cache = prompt_P.to(target.device)[None], DynamicCache(config=target.model.config)
        while found.shape[1] < len(prompt_P) + length:
            new = found[:, cache.get_seq_length() :]
            logits_BSV = target.model(input_ids=new, use_cache=True, **{named: cache}).logits
            found = torch.cat([found, logits_BSV[:, -1:].argmax(dim=-1)], dim=1)
        yield found[0].cpu(), list(range(len(prompt_P), len(prompt_P) + MORE_TOKENS))


@torch.no_grad()
def _by_trainer(source: Source, target: Target, tensors: dict[str, Tensor], texts: Sequence[Text], *,
                dtype: torch.dtype) -> Drafted:  # fmt: skip
    """By what trains: its blocks, its mask, its drafter, its way to capture."""
    device = target.device
    drafter = Drafter(source.shape)
    drafter.load_state_dict(tensors)
    drafter.to(device).eval()
    ends, kernels = target.ends.to(device, dtype), plain(DenseAttention())
    parts: list[tuple[Tensor, ...]] = []
    for ids_S, anchors in texts:
        anchors_BN = torch.tensor([anchors])
        blocks = lay_out(
            ids_S[None], torch.ones(1, len(ids_S), dtype=torch.bool), anchors_BN, torch.ones_like(anchors_BN).bool(),
            block_size=source.block_size, mask_token_id=source.mask_token_id, gamma=1.0,
        ).to(device)  # fmt: skip
        features_BSF = target.features(ids_S[None]).to(dtype)
        slots_BTH = drafter(features_BSF, blocks, ends, kernels)
        hidden_NkH = slots_BTH[0].unflatten(0, (len(anchors), -1))[:, 1:]
        # Where the labels are, the target has read one token less.
        place_Nk = (anchors_BN[0, :, None] + torch.arange(source.block_size - 1)).to(device)
        greedy_S, lead_S = _top2(target.model(input_ids=ids_S[None].to(device), use_cache=False).logits[0].float())
        drafted_Nk, margin_Nk = _top2(F.linear(hidden_NkH, ends.head_VH).float())
        parts.append((drafted_Nk, greedy_S[place_Nk], hidden_NkH.float(), margin_Nk, lead_S[place_Nk]))
    tokens, greedy, hidden, margin, greedy_margin = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    return Drafted(
        tokens_Nk=tokens, greedy_Nk=greedy, hidden_NkH=hidden, margin_Nk=margin, greedy_margin_Nk=greedy_margin
    )


def _top2(logits_V: Tensor) -> tuple[Tensor, Tensor]:
    """The best token, and by how much it leads."""
    best = logits_V.topk(2, dim=-1)
    return best.indices[..., 0], best.values[..., 0] - best.values[..., 1]


# --- whether they are the same --------------------------------------------------------------------------------------


def _compare(trainer: Drafted, found: Drafted, tolerance: Tolerance) -> _Compared:
    differences = []
    apart = float((found.hidden_NkH - trainer.hidden_NkH).norm() / trainer.hidden_NkH.norm())
    if not apart <= tolerance.hidden:  # or nan
        differences.append(f"hidden states are {apart:.1%} of their size apart ({tolerance.hidden:.2%} is rounding)")
    allowed, slots = int(tolerance.share * trainer.tokens_Nk.numel()), trainer.tokens_Nk.numel()
    ties = 0
    for what, here, there, margin in (
        ("drafts", trainer.tokens_Nk, found.tokens_Nk, found.margin_Nk),
        ("labels", trainer.greedy_Nk, found.greedy_Nk, found.greedy_margin_Nk),
    ):
        other_Nk = here != there
        tied_Nk = other_Nk & (margin <= tolerance.margin)
        ties += int(tied_Nk.sum())
        if (count := int((other_Nk & ~tied_Nk).sum())) > allowed:
            differences.append(f"{count:,} of {slots:,} {what} are other tokens")
    off = [
        slot for slot, (here, there) in enumerate(zip(kept(trainer), kept(found), strict=True), start=1)
        if abs(here - there) > ties + allowed
    ]  # fmt: skip
    if off:
        differences.append(f"other acceptance at slot {', '.join(map(str, off[:4]))}{', ...' if len(off) > 4 else ''}")
    return _Compared(differences=differences, ties=ties)
