"""Rows of a run: which documents are trained on, how far, which of them share a row, and to what length it is padded.

`tokenising.py` makes documents of records, `token_cache.py` keeps them in files. A row is one document; of a plain
text, a stretch of it; or, with `packing`, as many of either as have room, each of which is trained on as if it were
alone. Rows are cut out of the files when a step wants them: what is in memory grows with the number of documents, not
with their text.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.config import ConfigError, expand_path
from trainer.data import source_files, token_cache, tokenising
from trainer.data.order import Cursor, Order, pad_to
from trainer.data.packing import pack
from trainer.data.source_files import Source, SourceError
from trainer.data.token_cache import Documents, Say
from trainer.sections import DataConfig

MIN_TRAINED_TOKENS = 2
"""An anchor needs two neighbouring tokens that are trained on."""
NAMED = 10

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    where: str
    """file:line"""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """What is not trained on, and what of it was there."""

    records: int
    """All that the sources hold."""
    bad: dict[str, int] = field(default_factory=dict)
    """How many for each reason."""
    first: list[BadRow] = field(default_factory=list)
    """Some of each reason, in their order."""
    duplicates: int = 0
    """Documents that are there before, to the token; dropped only with `data.duplicates: drop`."""
    cut: int = 0
    """Conversations that go on after `sequence_length`."""
    cut_tokens: int = 0
    context_only: int = 0
    """Turns of the assistant that a template strips of their thinking, and that are therefore not trained on."""

    @property
    def bad_count(self) -> int:
        return sum(self.bad.values())

    def examples(self, count: int) -> list[BadRow]:
        """So many of `first` at most, in their order: one of each reason before a second of any."""
        seen = dict.fromkeys(self.bad, 0)
        rank = []
        for index, bad in enumerate(self.first):
            reason = next(reason for reason in seen if bad.why.startswith(reason))
            rank.append((seen[reason], index))
            seen[reason] += 1
        return [self.first[index] for index in sorted(index for _, index in sorted(rank)[:count])]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """All rows. Padding, on the right, and what is not trained on has a False mask."""

    documents: Documents
    doc_G: Indices
    """Of each segment, which is what stands in a row as a whole: its document,"""
    start_G: Indices
    """where its tokens begin among all,"""
    length_G: Indices
    """and how many there are."""
    members: Indices
    """The segments of all rows, one behind the other,"""
    ends_R: Indices
    """and where those of each row end."""
    length: int
    """Of a row at most."""
    kind: str
    packing: bool
    filler: int
    order: Order
    lengths_R: Tensor
    dropped: Dropped

    def __len__(self) -> int:
        return len(self.ends_R)

    def digest(self) -> str:
        """Of all that is trained on: the documents' tokens and loss masks, and how rows are made of them."""
        digest = hashlib.sha256(self.documents.digest.encode())
        for part in (np.array([self.length, self.packing]), self.doc_G, self.length_G):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def where(self, row: int) -> str:
        """Where the text of a row came from, for a person: file and line; of a packed row those of all documents."""
        return ", ".join(self.place(segment) for segment in self.segments(row))

    def segments(self, row: int) -> Indices:
        return self.members[self.ends_R[row - 1] if row else 0 : self.ends_R[row]]

    def place(self, segment: int) -> str:
        """Where a segment came from."""
        document = self.doc_G[segment]
        offset = int(self.start_G[segment] - self.documents.begin(document))
        return self.documents.where(document) + (f" from token {offset}" if offset else "")

    def take(self, cursor: Cursor, count: int) -> tuple[Tensor, Cursor]:
        """The indices of the next `count` rows, which are of one bucket, and the cursor behind them."""
        return self.order.take(cursor, count)

    def padded_to(self, indices_B: Tensor) -> int:
        """The length of the bucket that these rows are of."""
        return int(self.order.padded_R[indices_B[0]])

    def cut(self, indices_B: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, loss mask, and where in its row the document begins that a token belongs to, [B, length] each, of these
        rows. In packed rows the padding counts as one more document; elsewhere the beginnings are zeros."""
        shape = (len(indices_B), length)
        ids_BS, mask_BS = np.full(shape, self.filler, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
        starts_BS = np.zeros(shape, dtype=np.int32)
        for place, row in enumerate(indices_B.tolist()):
            end = 0
            for segment in self.segments(row):
                begin, tokens = end, slice(self.start_G[segment], self.start_G[segment] + self.length_G[segment])
                end = min(end + int(self.length_G[segment]), length)
                ids_BS[place, begin:end] = self.documents.tokens[tokens][: end - begin]
                mask_BS[place, begin:end] = self.documents.trained[tokens][: end - begin]
                if self.packing:
                    starts_BS[place, begin:end] = begin
            if self.packing:
                starts_BS[place, end:] = end
        return torch.from_numpy(ids_BS), torch.from_numpy(mask_BS), torch.from_numpy(starts_BS)

    @functools.cached_property
    def trained_tokens(self) -> int:
        """How many tokens are trained on."""
        whole = self.length_G == np.diff(self.documents.table["end"], prepend=0)[self.doc_G]
        count = int(self.documents.table["trained"][self.doc_G[whole]].sum())
        for segment in np.flatnonzero(~whole):
            start = self.start_G[segment]
            count += int(self.documents.trained[start : start + self.length_G[segment]].sum())
        return count


def load_rows(config: DataConfig, tokenizer: Any, *, mask_token_id: int, seed: int, cache: Path | None = None,
              say: Say = lambda line: None) -> Rows:  # fmt: skip
    """The rows of `config`, tokenised anew or as they are in the folder `cache`; with none, nothing is kept. Raises
    `ConfigError` when nothing can be trained on, or the mask token occurs."""
    found = find_sources(config)
    documents = token_cache.build_or_open(
        cache, found, tokenising.settings(config, tokenizer),
        functools.partial(tokenising.write, config, tokenizer, found, say), say,
    )  # fmt: skip
    if mask_token_id < len(documents.first) and (document := documents.first[mask_token_id]) >= 0:
        raise ConfigError(
            f"drafter.mask_token_id: {mask_token_id} ({tokenizer.convert_ids_to_tokens(mask_token_id)!r}) occurs in the"
            f" data ({documents.where(document)}); choose a token that never does"
        )
    return rows_of(config, documents, filler=_filler(tokenizer), seed=seed)


def find_sources(config: DataConfig) -> list[Source]:
    """All files that the configuration names. Raises `ConfigError` for what is not there."""
    if config.kind == "python-docs":
        return [source_files.python_docs()]
    found = []
    for index, text in enumerate(config.paths):
        key = f"data.paths[{index}]"
        try:
            found += source_files.resolve(expand_path(text, key=key), config.kind)
        except SourceError as error:
            raise ConfigError(f"{key}: {error}") from None
    return found


def rows_of(config: DataConfig, documents: Documents, *, filler: int, seed: int) -> Rows:
    """Rows of documents that are there. Raises `ConfigError` when nothing can be trained on."""
    bad, first = dict(documents.refused.counts), [
        BadRow(where=documents.place(one), why=one.why) for one in documents.refused.first
    ]  # fmt: skip
    length, table = config.sequence_length, documents.table
    ends_D = np.asarray(table["end"], dtype=np.int64)
    lengths_D = np.diff(ends_D, prepend=0)
    starts_D = ends_D - lengths_D
    original_D = np.ones(len(table), dtype=np.bool_)
    if len(table):
        original_D[:] = False
        original_D[np.unique(np.ascontiguousarray(table["hash"]).view("V16")[:, 0], return_index=True)[1]] = True
    kept_D = original_D | (config.duplicates == "keep")
    cut = cut_tokens = 0
    if config.kind == "conversations":
        late_D = kept_D & (table["pair"] + MIN_TRAINED_TOKENS > length)
        if late := np.flatnonzero(late_D).tolist():
            why = f"no two assistant tokens in a row within {length} tokens (data.sequence_length)"
            bad[why] = len(late)
            first += [BadRow(where=documents.where(document), why=why) for document in late[:NAMED]]
        doc_G = np.flatnonzero(kept_D & ~late_D)
        start_G, length_G = starts_D[doc_G], np.minimum(lengths_D[doc_G], length)
        cut, cut_tokens = int((lengths_D[doc_G] > length).sum()), int((lengths_D[doc_G] - length_G).sum())
    else:
        kept = np.flatnonzero(kept_D)
        # A last stretch of one token is none.
        count_D = lengths_D[kept] // length + (lengths_D[kept] % length >= MIN_TRAINED_TOKENS)
        doc_G = np.repeat(kept, count_D)
        nth_G = np.arange(len(doc_G)) - np.repeat(np.cumsum(count_D) - count_D, count_D)
        start_G = starts_D[doc_G] + nth_G * length
        length_G = np.minimum(ends_D[doc_G] - start_G, length)
        cut_tokens = int(lengths_D[kept].sum() - length_G.sum())
    if not documents.records:
        raise ConfigError(f"data.paths: {', '.join(config.paths)}: no record is in there")
    if not len(doc_G):
        said = f"; the first: {first[0].where}: {first[0].why}" if first else ""
        raise ConfigError(f"data: no row of {config.kind} can be trained on ({sum(bad.values())} bad{said})")

    members, ends_R = np.arange(len(doc_G)), np.arange(1, len(doc_G) + 1)
    if config.packing:
        packed = pack(length_G.tolist(), length)
        members = np.fromiter(itertools.chain.from_iterable(packed), dtype=np.int64, count=len(doc_G))
        ends_R = np.cumsum(np.fromiter(map(len, packed), dtype=np.int64, count=len(packed)))
    lengths_R = torch.from_numpy(np.add.reduceat(length_G[members], np.concatenate([[0], ends_R[:-1]])))
    return Rows(
        documents=documents, doc_G=doc_G, start_G=start_G, length_G=length_G, members=members, ends_R=ends_R,
        length=length, kind=config.kind, packing=config.packing, filler=filler, lengths_R=lengths_R,
        order=Order(pad_to(lengths_R, config.lengths), seed=seed),
        dropped=Dropped(
            records=documents.records, bad=bad, first=first, duplicates=len(table) - int(original_D.sum()),
            cut=cut, cut_tokens=cut_tokens, context_only=documents.context_only,
        ),
    )  # fmt: skip


def check_bad(dropped: Dropped, limit: float) -> None:
    """Raises `ConfigError` where more of the data is bad than `limit`, its share of all."""
    if dropped.bad_count > limit * dropped.records:
        reasons = ", ".join(f"{count} x {why}" for why, count in sorted(dropped.bad.items(), key=lambda one: -one[1]))
        first = "; ".join(f"{bad.where}: {bad.why}" for bad in dropped.examples(NAMED))
        raise ConfigError(
            f"data: {dropped.bad_count} of {dropped.records} records are bad ({reasons}), more than"
            f" data.max_bad_fraction allows ({limit:g}); mend them, or raise it; for example {first}"
        )


def _filler(tokenizer: Any) -> int:
    # Behind the end of a row, where causal attention keeps it from every real token.
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0

