"""`python -m trainer data CONFIG`: what a run would train on, looked at before it is paid for.

Reads the data as the run would, through the same cache, with the target's tokenizer alone. A sample is a document as
the model is given it: what is trained on in colour, or between [[ and ]] where there is no terminal; the rest is
context.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainer import kept
from trainer.config import Config, ConfigError, expand_path
from trainer.data import conversations, sources
from trainer.data.chat_template import Template
from trainer.data.packing import pack
from trainer.data.rows import Rows, check_bad, find_sources, load_rows
from trainer.data.source_files import Source
from trainer.data.sources import BadRecord
from trainer.model.blocks import generator_for
from trainer.model.target import load_tokenizer

ROWS_LOOKED_AT = 2000
"""For what has to be counted token by token."""
MOST_PACKED = 200_000
SHOWN_CHARACTERS = 600
"""Of a stretch of context; the middle of a longer one is left out."""
BAR, BINS = 24, 8
TRAINED, CONTEXT = "bold green", "dim"
PERCENTILES = (50, 90, 99, 100)
PLACE = re.compile(r"(.*?)(?::([0-9]+)| row ([0-9]+)|\[([0-9]+)\])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Part of a document: all of it trained on, or none."""

    text: str
    tokens: int
    trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    where: str
    stretches: list[Stretch]
    cut_tokens: int
    """How many more the document has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    config: Config
    rows: Rows
    figures: dict[str, Any]
    samples: list[Sample]

    @property
    def refusal(self) -> str | None:
        """Why a run would not start: too much of the data is bad."""
        try:
            check_bad(self.rows.dropped, self.config.data.max_bad_fraction)
        except ConfigError as error:
            return str(error)
        return None


def report(config: Config, *, samples: int, row: str | None, say: Any) -> Report:
    """Raises `ConfigError` for what a run would refuse, but for bad records over the limit; and for a `row`, named as
    the report names it, that is not trained on: with the reason."""
    tokenizer = load_tokenizer(expand_path(config.target.path, key="target.path"))
    rows = load_rows(
        config.data, tokenizer, mask_token_id=config.drafter.mask_token_id, seed=config.seed,
        cache=kept.token_cache(config.data, kept.run_directory(config, os.environ), os.environ), say=say,
    )  # fmt: skip
    if row is None:
        order = torch.randperm(len(rows.doc_G), generator=generator_for(config.seed, "samples"))
        segments = sorted(order[:samples].tolist())
    else:
        segments = _segments_at(config, rows, tokenizer, row)
    return Report(
        config=config, rows=rows, figures=figures(config, rows),
        samples=[sample(rows, tokenizer, segment) for segment in segments],
    )  # fmt: skip


def sample(rows: Rows, tokenizer: Any, segment: int) -> Sample:
    """What stands in a row as a whole, in stretches."""
    documents = rows.documents
    start, length = int(rows.start_G[segment]), int(rows.length_G[segment])
    trained = np.asarray(documents.trained[start : start + length])
    edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), length]
    stretches = [
        Stretch(text=tokenizer.decode(documents.tokens[start + begin : start + end].tolist()), tokens=end - begin,
                trained=bool(trained[begin]))
        for begin, end in itertools.pairwise(edges)
    ]  # fmt: skip
    more = int(documents.table["end"][rows.doc_G[segment]]) - start - length
    return Sample(
        where=rows.place(segment), stretches=stretches, cut_tokens=more if rows.kind == "conversations" else 0
    )


def figures(config: Config, rows: Rows) -> dict[str, Any]:
    """All that is counted, as plain data."""
    dropped, padded_R = rows.dropped, rows.order.padded_R
    tokens, padded = int(rows.lengths_R.sum()), int(padded_R.sum())
    documents_R = np.diff(rows.ends_R, prepend=0)
    whole_D = np.diff(rows.documents.table["end"], prepend=0)[np.unique(rows.doc_G)]
    buckets = []
    for length in config.data.lengths:
        here = padded_R == length
        count, filled = int(here.sum()), int(rows.lengths_R[here].sum())
        buckets.append({
            "length": length, "rows": count, "tokens": filled, "documents": int(documents_R[here.numpy()].sum()),
            "padding": round(1 - filled / (count * length), 4) if count else 0.0,
        })  # fmt: skip
    found: dict[str, Any] = {
        "kind": config.data.kind, "records": dropped.records, "documents": len(np.unique(rows.doc_G)),
        "rows": len(rows), "tokens": tokens, "trained_on": rows.trained_tokens,
        "trained_share": round(rows.trained_tokens / tokens, 4), "padding": round(1 - tokens / padded, 4),
        "bad": dropped.bad_count, "bad_by_reason": dropped.bad,
        "bad_rows": [{"where": bad.where, "why": bad.why} for bad in dropped.first],
        "max_bad_fraction": config.data.max_bad_fraction, "duplicates": dropped.duplicates,
        "duplicates_are": config.data.duplicates, "cut": dropped.cut, "cut_tokens": dropped.cut_tokens,
        "context_only_turns": dropped.context_only,
        "document_tokens": {str(at): int(np.percentile(whole_D, at)) for at in PERCENTILES},
        "lengths": _histogram(rows), "buckets": buckets, "anchors": _anchors(config, rows),
    }  # fmt: skip
    if not config.data.packing and len(rows.length_G) <= MOST_PACKED:
        packed = len(pack(rows.length_G.tolist(), rows.length))
        found["if_packed"] = {"rows": packed, "padding": round(1 - tokens / (packed * rows.length), 4)}
    return found


def _histogram(rows: Rows) -> list[dict[str, int]]:
    """Of what stands in rows as a whole, by its tokens."""
    ends = [-(-rows.length * place // BINS) for place in range(1, BINS + 1)]
    counts, _ = np.histogram(rows.length_G, bins=[0, *(end + 1 for end in ends)])
    return [{"up_to": end, "count": int(count)} for end, count in zip(ends, counts, strict=True)]


def _anchors(config: Config, rows: Rows) -> dict[str, Any]:
    """What the rows offer of what every step asks of them; of some rows, evenly spread, if there are many."""
    step = -(-len(rows) // ROWS_LOOKED_AT)
    places, wanted = [], []
    for row in range(0, len(rows), step):
        length = int(rows.order.padded_R[row])
        _, mask_BS, starts_BS = rows.cut(torch.tensor([row]), length)
        places.append(int((mask_BS[:, 1:] & mask_BS[:, :-1] & (starts_BS[:, 1:] == starts_BS[:, :-1])).sum()))
        wanted.append(config.anchors_at(length))
    there, asked = np.array(places), np.array(wanted)
    return {
        "rows_looked_at": len(there), "asked_of_a_row": config.drafter.anchors, "median_places": int(np.median(there)),
        "least_places": int(there.min()), "rows_with_too_few": round(float((there < asked).mean()), 4),
        "idle_blocks": round(1 - float(np.minimum(there, asked).sum() / asked.sum()), 4),
    }  # fmt: skip


def _segments_at(config: Config, rows: Rows, tokenizer: Any, row: str) -> list[int]:
    """Those of the record at `row`, whose path may be given by its end alone."""
    place, part, _ = row.partition(" from token ")
    table = rows.documents.table
    for number, source in enumerate(rows.documents.names):
        at = _at(source, place)
        if at is None:
            continue
        (documents,) = np.nonzero((table["source"] == number) & (table["at"] == at))
        segments = np.flatnonzero(np.isin(rows.doc_G, documents)).tolist()
        if not segments:
            raise ConfigError(
                f"{sources.where(source, at)} {_why_not(config, rows, tokenizer, source, at, documents.tolist())}"
            )
        return [segment for segment in segments if not part or rows.place(segment).endswith(row)]
    known = ", ".join(str(source.path) for source in find_sources(config.data)[:3])
    raise ConfigError(f"--row: {row} is in none of the sources ({known}); name it as the report does")


def _at(source: Source, place: str) -> int | None:
    """Where in `source` that is, if it is there."""
    if source.format == "python-docs":
        topic = place.removeprefix(f"{source.path}:")
        return list(sources.python_docs()).index(topic) if topic in sources.python_docs() else None
    match = PLACE.fullmatch(place)
    assert match is not None, "it matches anything"
    path, line, row, item = match.groups()
    if not f"/{source.path}".endswith(f"/{path.lstrip('/')}") and Path(path).resolve() != source.path.resolve():
        return None
    return -1 - int(item) if item else int(line or row or 0)


def _why_not(config: Config, rows: Rows, tokenizer: Any, source: Source, at: int, documents: Sequence[int]) -> str:
    """Of a record that no row has anything of."""
    if len(documents):
        cut = rows.documents.table["pair"][documents[0]] + 2 > rows.length and config.data.kind == "conversations"
        return f"has no two assistant tokens in a row within {rows.length} tokens" if cut else "is a duplicate: dropped"
    field = config.data.text_field if config.data.kind != "conversations" else None
    record = next((record for place, record in sources.read(source, text_field=field) if place == at), None)
    if record is None:
        return "is not there: no record begins there"
    if isinstance(record, BadRecord):
        return str(record)
    if field is not None:
        return "has no two tokens in a row to train on"
    try:
        (encoded,) = Template(tokenizer).encode([conversations.parse(record)])
    except BadRecord as bad:
        return str(bad)
    return str(encoded) if isinstance(encoded, BadRecord) else "has no two tokens in a row to train on"


# --- for a person ---------------------------------------------------------------------------------------------------


def show(found: Report, console: Console) -> None:
    """The samples, then what is counted: the end is what a terminal shows."""
    for one in found.samples:
        console.print(_shown(one, colour=console.is_terminal, whole=len(found.samples) == 1), soft_wrap=True)
    console.print(Group(*_tables(found.figures)))
    if found.refusal:
        console.print(Text(f"a run would not start: {found.refusal}", style="bold red"), soft_wrap=True)


def as_json(found: Report) -> str:
    samples = [
        {"where": one.where, "cut_tokens": one.cut_tokens, "stretches": [
            {"trained_on": stretch.trained, "tokens": stretch.tokens, "text": stretch.text} for stretch in one.stretches
        ]} for one in found.samples
    ]  # fmt: skip
    return json.dumps({**found.figures, "refusal": found.refusal, "samples": samples}, indent=2, ensure_ascii=False)


def _shown(one: Sample, *, colour: bool, whole: bool) -> RenderableType:
    text = Text()
    for stretch in one.stretches:
        said = stretch.text
        if not (stretch.trained or whole) and len(said) > SHOWN_CHARACTERS:
            half = SHOWN_CHARACTERS // 2
            said = f"{said[:half]} ... {len(said) - 2 * half:,} characters ... {said[-half:]}"
        # A terminal may hold what would move its cursor.
        said = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in said)
        if stretch.trained and not colour:
            said = f"[[{said}]]"
        text.append(said, style=TRAINED if stretch.trained else CONTEXT)
    if one.cut_tokens:
        text.append(f"\n... {one.cut_tokens:,} more tokens are cut", style="yellow")
    tokens = sum(stretch.tokens for stretch in one.stretches)
    trained = sum(stretch.tokens for stretch in one.stretches if stretch.trained)
    title = f"{one.where}: {tokens:,} tokens, {trained:,} trained on"
    return Group(Rule(Text(title, style="bold"), align="left"), text, "")


def _tables(said: dict[str, Any]) -> Iterator[RenderableType]:
    overview = _table("", "")
    overview.show_header = False
    anchors, lengths = said["anchors"], said["document_tokens"]
    packed = said.get("if_packed")
    for name, value in (
        ("records", f"{said['records']:,}, of which {said['bad']:,} are bad"),
        ("documents", f"{said['documents']:,}; tokens: median {lengths['50']:,}, 90 % up to {lengths['90']:,}, 99 % up"
                      f" to {lengths['99']:,}, longest {lengths['100']:,}"),
        ("rows", f"{said['rows']:,} with {said['tokens']:,} tokens, and {said['padding']:.1%} padding"
                 + (f"; with data.packing {packed['rows']:,} rows, and {packed['padding']:.1%}" if packed else "")),
        ("trained on", f"{said['trained_on']:,} tokens, {said['trained_share']:.1%}"),
        ("anchors", f"{anchors['asked_of_a_row']} asked of a row, which has {anchors['median_places']} places for them"
                    f" (median; least {anchors['least_places']}); {anchors['rows_with_too_few']:.1%} of rows have too"
                    f" few, and {anchors['idle_blocks']:.1%} of blocks train nothing"
                    + (f" ({anchors['rows_looked_at']:,} rows looked at)"
                       if anchors["rows_looked_at"] < said["rows"] else "")),
        ("duplicates", f"{said['duplicates']:,}, {'dropped' if said['duplicates_are'] == 'drop' else 'kept'}"
                       " (data.duplicates)" if said["duplicates"] else "none"),
        ("cut", f"{said['cut']:,} conversations lose {said['cut_tokens']:,} tokens" if said["cut"] else ""),
        ("context only", f"{said['context_only_turns']:,} assistant turns, whose thinking the chat template leaves out"
                         if said["context_only_turns"] else ""),
    ):  # fmt: skip
        if value:
            overview.add_row(Text(name, style="bold"), value)
    yield overview
    buckets = _table("padded to", "rows", "documents", "tokens", "padding")
    for bucket in said["buckets"]:
        numbers = (f"{bucket[key]:,}" for key in ("length", "rows", "documents", "tokens"))
        buckets.add_row(*numbers, f"{bucket['padding']:.1%}")
    yield buckets
    histogram, most = _table("tokens", "documents", ""), max(one["count"] for one in said["lengths"])
    for one in said["lengths"]:
        bar = "#" * -(-BAR * one["count"] // most)
        histogram.add_row(f"up to {one['up_to']:,}", f"{one['count']:,}", Text(bar, style="cyan"))
    yield histogram
    if said["bad"]:
        bad = _table("bad", "of all", "why", "for example")
        for why, count in sorted(said["bad_by_reason"].items(), key=lambda one: -one[1]):
            examples = [one["where"] for one in said["bad_rows"] if one["why"].startswith(why)][:3]
            bad.add_row(f"{count:,}", f"{count / said['records']:.1%}", Text(why), Text("\n".join(examples)))
        yield bad


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        numbers = column in ("padded to", "rows", "documents", "tokens", "padding", "bad", "of all")
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    return table
