"""Text in, rows out: token ids, which of them are trained on, and to what length each row is padded.

Conversations (JSONL) become one document each, trained on the assistant's turns only; plain text is cut into documents
as long as a row at most. A row is one document, or, with `packing`, as many as have room in it, each of which is
trained on as if it were alone. What cannot be used is counted and named by file and line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config import ConfigError, DataConfig, expand_path
from trainer.order import Cursor, Order, pad_to
from trainer.packing import pack

MIN_TRAINED_TOKENS = 2
"""An anchor needs two neighbouring tokens that are trained on."""
_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_DIALECTS = {
    "messages": ("role", "content", _ROLES),
    "conversations": ("from", "value", {**_ROLES, "human": "user", "gpt": "assistant"}),
}
"""Where a line holds its turns; and in a turn, where the role and the text are, and what roles are called."""

Ids = list[int]
Flags = list[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    where: str
    """file:line"""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """All rows, padded on the right to the longest bucket. Padding and what is not trained on has a False mask."""

    ids_RS: Tensor
    loss_mask_RS: Tensor
    starts_RS: Tensor
    """Where in its row the document begins that a token belongs to; zeros where a row is one document. In packed rows
    the padding counts as one more."""
    lengths_R: Tensor
    order: Order
    bad: list[BadRow] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    """Where each came from."""
    members: list[list[int]] = field(default_factory=list)
    """The documents of each row."""

    def __len__(self) -> int:
        return self.ids_RS.shape[0]

    def digest(self) -> str:
        """Of all that is trained on: the ids and the loss mask, and where documents begin if not with their row."""
        digest = hashlib.sha256(repr(self.ids_RS.shape).encode())
        for tensor in (self.ids_RS, self.loss_mask_RS, *([self.starts_RS] if self.starts_RS.any() else [])):
            digest.update(tensor.numpy())
        return digest.hexdigest()

    def where(self, row: int) -> str:
        """Where the text of a row came from, for a person: file and line, of a packed row those of all documents."""
        return ", ".join(self.documents[document] for document in self.members[row])

    def take(self, cursor: Cursor, count: int) -> tuple[Tensor, Cursor]:
        """The indices of the next `count` rows, which are of one bucket, and the cursor behind them."""
        return self.order.take(cursor, count)

    def padded_to(self, indices_B: Tensor) -> int:
        """The length of the bucket that these rows are of."""
        return int(self.order.padded_R[indices_B[0]])

    def cut(self, indices_B: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, loss mask and starts of documents [B, length] of these rows."""
        return tuple(of_RS[indices_B, :length] for of_RS in (self.ids_RS, self.loss_mask_RS, self.starts_RS))


def load_rows(config: DataConfig, tokenizer: Any, *, mask_token_id: int, seed: int) -> Rows:
    """Read and tokenise everything. Raises `ConfigError` when nothing can be trained on."""
    bad: list[BadRow] = []
    if config.kind == "conversations":
        documents = list(_conversations(config, tokenizer, bad))
    else:
        texts = _python_docs() if config.kind == "python-docs" else _text_files(config)
        documents = list(_texts(texts, config.sequence_length, tokenizer, bad))
    if not documents:
        first = f"; the first: {bad[0].where}: {bad[0].why}" if bad else ""
        raise ConfigError(f"data: no row of {config.kind} can be trained on ({len(bad)} bad{first})")

    length = config.sequence_length
    alone = [[document] for document in range(len(documents))]
    rows = pack([len(ids) for _, ids, _ in documents], length) if config.packing else alone
    ids_RS = torch.full((len(rows), length), _filler(tokenizer), dtype=torch.long)
    loss_mask_RS = torch.zeros((len(rows), length), dtype=torch.bool)
    # Takes no memory where a row is one document.
    starts_RS = torch.zeros(ids_RS.shape if config.packing else (), dtype=torch.int32).expand(ids_RS.shape)
    lengths_R = torch.zeros(len(rows), dtype=torch.long)
    for row, members in enumerate(rows):
        end = 0
        for _, ids, flags in (documents[document] for document in members):
            start, end = end, end + len(ids)
            ids_RS[row, start:end] = torch.tensor(ids)
            loss_mask_RS[row, start:end] = torch.tensor(flags)
            if config.packing:
                starts_RS[row, start:end] = start
        if config.packing:
            starts_RS[row, end:] = end
        lengths_R[row] = end
    if (ids_RS == mask_token_id).any():
        raise ConfigError(
            f"drafter.mask_token_id: {mask_token_id} ({tokenizer.convert_ids_to_tokens(mask_token_id)!r}) occurs in the"
            " data; choose a token that never does"
        )
    order = Order(pad_to(lengths_R, config.lengths), seed=seed)
    return Rows(
        ids_RS=ids_RS, loss_mask_RS=loss_mask_RS, starts_RS=starts_RS, lengths_R=lengths_R, order=order, bad=bad,
        documents=[where for where, _, _ in documents], members=rows,
    )  # fmt: skip


def _filler(tokenizer: Any) -> int:
    # Behind the end of a row, where causal attention keeps it from every real token.
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


# --- plain text -----------------------------------------------------------------------------------------------------


def _python_docs() -> Iterator[tuple[str, str]]:
    """The language reference that `help()` shows; part of every Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("data.kind: this Python lacks its own documentation; use text or conversations") from None
    for name, text in sorted(topics.items()):
        yield f"pydoc_data.topics:{name}", text


def _text_files(config: DataConfig) -> Iterator[tuple[str, str]]:
    for path in _paths(config):
        try:
            yield f"{path}:1", path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.paths: {path}: {getattr(error, 'strerror', None) or error}") from None


def _texts(documents: Iterator[tuple[str, str]], length: int, tokenizer: Any, bad: list[BadRow]
           ) -> Iterator[tuple[str, Ids, Flags]]:  # fmt: skip
    named = list(documents)
    if not named:
        return
    encoded = tokenizer([text for _, text in named], add_special_tokens=False)["input_ids"]
    for (where, _), ids in zip(named, encoded, strict=True):
        if len(ids) < MIN_TRAINED_TOKENS:
            bad.append(BadRow(where=where, why=f"only {len(ids)} tokens"))
        for start in range(0, len(ids), length):
            part = ids[start : start + length]
            if len(part) >= MIN_TRAINED_TOKENS:
                yield f"{where} from token {start}" if start else where, part, [True] * len(part)


# --- conversations --------------------------------------------------------------------------------------------------


def _conversations(config: DataConfig, tokenizer: Any, bad: list[BadRow]
                   ) -> Iterator[tuple[str, Ids, Flags]]:  # fmt: skip
    if not tokenizer.chat_template:
        raise ConfigError("data.kind: conversations need a target with a chat template; use text, or an instruct model")
    for path in _paths(config):
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    where = f"{path}:{number}"
                    try:
                        yield where, *_encode(parse_conversation(line), tokenizer, config.sequence_length)
                    except ValueError as error:
                        bad.append(BadRow(where=where, why=" ".join(str(error).split())))
        except OSError as error:
            raise ConfigError(f"data.paths: {path}: {error.strerror or error}") from None


def parse_conversation(line: bytes) -> list[dict[str, str]]:
    """The messages of a line, as {role, content}; `ValueError` says what is wrong with it."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError("is not an object")
    key = next((key for key in _DIALECTS if key in record), None)
    if key is None:
        raise ValueError(f"has none of {', '.join(map(repr, _DIALECTS))}")
    role_key, text_key, roles = _DIALECTS[key]
    turns = record[key]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key!r} is not a list of turns")
    messages = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get(text_key), str):
            raise ValueError(f"{key}[{index}] has no text under {text_key!r}")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise ValueError(f"{key}[{index}] has the unknown {role_key} {role!r}")
        messages.append({"role": roles[role], "content": turn[text_key]})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no assistant turn")
    return messages


def _encode(messages: list[dict[str, str]], tokenizer: Any, length: int) -> tuple[Ids, Flags]:
    """Ids of the conversation, cut at `length`, and which of them an assistant wrote."""
    render: Callable[..., str] = tokenizer.apply_chat_template
    try:
        text = render(messages, tokenize=False)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = render(messages[:index], tokenize=False, add_generation_prompt=True)
                through = render(messages[: index + 1], tokenize=False)
                if not (text.startswith(before) and text.startswith(through)):
                    raise ValueError("the chat template renders a turn differently when others follow it")
                spans.append((len(before), len(through)))
    except ValueError:
        raise
    except Exception as error:  # a template is a program of the model's: it may refuse in any way it likes
        raise ValueError(f"the chat template refuses it: {error}") from None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"][:length]
    flags = [any(start <= at < end for start, end in spans) for at, _ in encoded["offset_mapping"][:length]]
    if not any(one and two for one, two in itertools.pairwise(flags)):
        raise ValueError(f"no two assistant tokens in a row within {length} tokens")
    return ids, flags


def _paths(config: DataConfig) -> list[Path]:
    return [expand_path(text, key="data.paths") for text in config.paths]
