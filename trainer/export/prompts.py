"""What the target goes on from in the gate: questions of its own, or those of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trainer.config import ConfigError
from trainer.model.target import Target, as_ids

BUILT_IN = (
    "What is the capital of France?",
    "Write a Python function that returns the largest number of a list.",
    "Explain in two sentences why the sky is blue.",
    "List three things to do before a long journey.",
    "How many minutes are there in a day? Show how you count.",
    "Translate into German: the house is near the river.",
    "Write a short story about a lighthouse keeper.",
    "What does an operating system do?",
    "Give me a recipe for pancakes.",
    "Summarise the rules of chess for a beginner.",
    "Name a planet that has rings, and say what they are made of.",
    "Write a polite letter that asks for a refund.",
)
MOST_TOKENS = 512
"""Of a prompt, the last ones."""


def reader(path: str | None) -> Callable[[Target], list[Tensor]]:
    """Makes token ids [P] of the built-in prompts, or of the file's lines. Raises `ConfigError` for a file that cannot
    be read or has no line."""
    texts = BUILT_IN if path is None else _lines(Path(path).expanduser())
    return lambda target: [tokens_of(target, text) for text in texts]


def _lines(path: Path) -> list[str]:
    try:
        found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error}") from None
    if not any(found):
        raise ConfigError(f"--prompts {path}: no prompt is in there; one stands on each line")
    if found[0].startswith("{"):
        raise ConfigError(f"--prompts {path}: holds JSON, and plain text is needed, a prompt on each line")
    return [line for line in found if line]


def tokens_of(target: Target, text: str) -> Tensor:
    """As a user's turn, where the target has a chat template."""
    ids = as_ids(target.tokenizer, text, chat=bool(target.tokenizer.chat_template))
    return torch.tensor(ids[-MOST_TOKENS:], dtype=torch.long)
