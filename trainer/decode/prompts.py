"""Prompts out of held-out data, read as training data is read: what stands before an answer, or how a text begins.

Of a conversation the prompt is all that comes before its first answer, in the target's own chat template, generation
prompt included; the answer that is there is not looked at: what counts is what the target itself would write. A record
may say of which `category` it is; else that is the name of its file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.data import source_files, sources
from trainer.data.chat_template import Template
from trainer.data.conversations import Message, parse
from trainer.data.source_files import Source, SourceError
from trainer.data.sources import BadRecord

PYTHON_DOCS = "python-docs"
CATEGORY = "category"
LOOKED_AT = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    ids: list[int]
    category: str
    where: str
    """For a person: file and line."""


def read_prompts(paths: Sequence[Path], tokenizer: Any, *, kind: str | None, count: int, most_tokens: int,
                 text_tokens: int, text_field: str = "text", key: str = "--data") -> list[Prompt]:  # fmt: skip
    """Up to `count` prompts of `most_tokens` at most, as many of each category as there are, in their order; of texts
    the first `text_tokens`. `kind` as in the configuration's data; left out, a path's name says it. No more than
    `LOOKED_AT` records of a path are looked at. Raises `ConfigError`, with the `key` that names the paths, where there
    are none."""
    found: dict[str, list[Prompt]] = {}
    why_not = "there is nothing in it"
    for path in paths:
        for prompt in itertools.islice(_prompts(path, tokenizer, kind, text_tokens, text_field, key), LOOKED_AT):
            if isinstance(prompt, BadRecord):
                why_not = str(prompt)
            elif len(prompt.ids) > most_tokens:
                why_not = f"{prompt.where}: its {len(prompt.ids)} tokens are more than {most_tokens}"
            else:
                group = found.setdefault(prompt.category, [])
                if len(group) < count:
                    group.append(prompt)
    if not found:
        raise ConfigError(f"{key}: {', '.join(map(str, paths))}: no prompt to decode from: {why_not}")
    # Evenly over the categories, so that a few prompts tell of all of them.
    rounds = itertools.zip_longest(*found.values())
    chosen = list(itertools.islice((one for one in itertools.chain.from_iterable(rounds) if one is not None), count))
    return sorted(chosen, key=lambda one: list(found).index(one.category))


def _prompts(path: Path, tokenizer: Any, kind: str | None, text_tokens: int, text_field: str, key: str
             ) -> Iterator[Prompt | BadRecord]:  # fmt: skip
    for source in _sources(path, kind, key):
        meant = kind or _kind(source)
        template = Template(tokenizer) if meant == "conversations" else None
        name = source.path.name.partition(".")[0]
        for at, record in sources.read(source, text_field=None if template else text_field):
            where = sources.where(source, at)
            try:
                if isinstance(record, BadRecord):
                    raise record
                if template is None:
                    text = next(record, "")
                    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:text_tokens]
                    if len(ids) < 2:
                        raise BadRecord("has too few tokens")
                    yield Prompt(ids=ids, category=name, where=where)
                else:
                    ids = before_the_answer(template, record)
                    yield Prompt(ids=ids, category=str(record.get(CATEGORY) or name), where=where)
            except BadRecord as bad:
                yield BadRecord(f"{where}: {bad}")


def before_the_answer(template: Template, record: Any) -> list[int]:
    """Ids of a conversation up to where its first answer begins. Raises `BadRecord`."""
    conversation = parse(record)
    asked: list[Message] = list(itertools.takewhile(lambda one: one["role"] != "assistant", conversation.messages))
    return prompt_ids(template, asked, conversation.tools)


def prompt_ids(template: Template, messages: list[Message], tools: Any = None) -> list[int]:
    """What the target reads before it answers. Raises `BadRecord` where there is nothing to answer."""
    if not messages:
        raise BadRecord("begins with an answer")
    text = template.render(messages, tools, prompt=True)
    ids: list[int] = template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _sources(path: Path, kind: str | None, key: str) -> list[Source]:
    if str(path) == PYTHON_DOCS and not path.exists():
        return [source_files.python_docs()]
    try:
        return source_files.resolve(path, kind or "conversations")
    except (SourceError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from None


def _kind(source: Source) -> str:
    return "text" if source.format in ("text", "python-docs") else "conversations"
