"""Sources to documents: records are read, made into tokens some at a time, and written, in the order of the sources.

`rows.py` asks for this where `token_cache.py` has no documents of these sources yet. One thread is enough: the
tokenizer itself uses all cores for what it is given at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.data import conversations, sources
from trainer.data.chat_template import Template
from trainer.data.source_files import Source
from trainer.data.sources import BadRecord
from trainer.data.token_cache import Say, Writer
from trainer.sections import DataConfig

RECORDS_AT_ONCE = 128
CHARACTERS_AT_ONCE = 1 << 18
SAID_EVERY_S = 10.0


def settings(config: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """All that documents follow from besides the sources, as plain data."""
    import tokenizers
    import transformers

    read_as: dict[str, Any] = {"text_field": config.text_field} if config.kind == "text" else {}
    if config.kind == "conversations":
        special = {key: str(token) for key, token in tokenizer.special_tokens_map.items()}
        read_as = {"template": tokenizer.chat_template, "special": special}
    alone = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    versions = {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__}
    return {"kind": config.kind, **read_as, "tokenizer": alone, **versions}


def write(config: DataConfig, tokenizer: Any, found: list[Source], say: Say, writer: Writer) -> None:
    """All documents of the sources `found`. Raises `ConfigError` for a file that is not what its name says."""
    template = Template(tokenizer) if config.kind == "conversations" else None
    said = time.monotonic()
    for number, source in enumerate(found):
        if template:
            written = _conversations(template, number, source, writer)
        else:
            written = _texts(config.text_field, tokenizer, number, source, writer)
        for _ in written:
            if time.monotonic() - said > SAID_EVERY_S:
                said = time.monotonic()
                say(f"tokenising {source.path}: {writer.records} records, {writer.end} tokens so far")


def _conversations(template: Template, number: int, source: Source, writer: Writer) -> Iterator[None]:
    for batch in _batches(_parsed(source)):
        encoded = iter(template.encode([one for _, one in batch if not isinstance(one, BadRecord)]))
        for at, one in batch:
            made = one if isinstance(one, BadRecord) else next(encoded)
            if isinstance(made, BadRecord):
                writer.refuse(number, at, made)
            else:
                writer.write(made.ids, made.trained)
                writer.finish(number, at)
                writer.context_only += made.context_only
        yield


def _parsed(source: Source) -> Iterator[tuple[int, tuple[int, conversations.Conversation | BadRecord]]]:
    """(characters, (where, conversation))"""
    for at, record in sources.read(source, text_field=None):
        try:
            if isinstance(record, BadRecord):
                raise record
            one = conversations.parse(record)
        except BadRecord as bad:
            yield 0, (at, bad)
        else:
            yield one.characters, (at, one)


def _texts(field: str, tokenizer: Any, number: int, source: Source, writer: Writer) -> Iterator[None]:
    for batch in _batches(_pieces(source, field)):
        pieces = [piece for _, piece, _ in batch if isinstance(piece, str)]
        encoded = iter(
            tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            if pieces else []
        )  # fmt: skip
        for at, piece, last in batch:
            if isinstance(piece, BadRecord):
                writer.refuse(number, at, piece)
                continue
            ids = np.asarray(next(encoded), dtype=np.int32)
            writer.write(ids, np.ones(len(ids), dtype=np.bool_))
            if last:
                writer.finish(number, at)
        yield


def _pieces(source: Source, field: str) -> Iterator[tuple[int, tuple[int, str | BadRecord, bool]]]:
    """(characters, (where, piece of a text, whether it is the last of its text))"""
    for at, record in sources.read(source, text_field=field):
        if isinstance(record, BadRecord):
            yield 0, (at, record, True)
            continue
        piece = next(record, "")
        for following in record:
            yield len(piece), (at, piece, False)
            piece = following
        yield len(piece), (at, piece, True)


def _batches(items: Iterator[tuple[int, Any]]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    characters = 0
    for own, item in items:
        batch.append(item)
        characters += own
        if len(batch) == RECORDS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
