"""The layout contract: what has to be known to use an exported drafter, and what servers cannot read in config.json.

It lies beside the weights as `contract.json`, with the hash of every other file. The exporter writes it, `loading.py`
holds it against what this trainer's drafter does, and the reference decoder follows it. A field that is missing,
unknown or of another type is an error: a convention that is guessed is the fault that this file is there to prevent.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.config import ConfigError

NAME = "contract.json"
MADE_BY = "python -m trainer export"
Format = Literal["zlab", "speculators"]
FORMATS: tuple[Format, ...] = ("zlab", "speculators")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Rope(_Part):
    theta: float
    dims: int
    """Of each head that are rotated, from the first on."""
    style: Literal["halves", "interleaved"]
    """Which two are a pair: i and i + dims/2 ("neox"), or 2i and 2i + 1."""


class Window(_Part):
    """Layers that do not look back all the way. This trainer makes none."""

    tokens: int
    layers: list[int]
    convention: Literal["from the slot", "from the anchor"]
    """A slot at position q sees context at p where q - p < tokens; or where p >= anchor - tokens."""


class Layout(_Part):
    """How a block is laid out and read. Positions count from the start of the document."""

    block_size: int
    anchor_slot: int = 0
    """The slot that holds the real token at the anchor; it predicts nothing. All others hold the mask token."""
    slot_predicts: int = 0
    """Slot k predicts the token at anchor + k + this."""
    slot_position: int = 0
    """Slot k stands at position anchor + k + this."""
    context_end: int = 0
    """A block sees the target's features of positions < anchor + this."""
    causal: bool = False
    """Whether a slot sees only the slots before it in its block, and itself."""
    window: Window | None = None
    mask_token_id: int
    layer_ids: list[int]
    """Target layers, the first one being 0, whose *outputs* are concatenated in this order: `hidden_states[id + 1]` of
    Hugging Face, whose `[0]` is the embedding."""
    layer_id_base: Literal[0, 1]
    """What config.json calls the first layer: its ids are `layer_ids` plus this."""
    rope: Rope


class Origin(_Part):
    """The checkpoint."""

    run: str | None
    step: int
    weights: Literal["last", "ema"]

    def __str__(self) -> str:
        return f"step {self.step}, {'moving average' if self.weights == 'ema' else 'last weights'}"


class TargetFacts(_Part):
    """What it was trained for; a server has to run the same."""

    architecture: str
    layers: int
    hidden: int
    vocabulary: int
    files: dict[str, str]
    """A hash of each file of the target, as `model.target.file_digests` makes them."""


class FileFacts(_Part):
    bytes: int
    sha256: str


class Gate(_Part):
    """What the serve-parity gate saw: the same numbers from the trainer and from the reference decoder."""

    arithmetic: Literal["float32", "bfloat16"]
    blocks: int
    kept_by_trainer: list[int]
    """Of those blocks, how many kept slot 1, 2, ...: it and all before it were the target's own greedy tokens."""
    kept_by_reference: list[int]


class Contract(_Part):
    schema_version: Literal[1] = 1
    made_by: Literal["python -m trainer export"] = "python -m trainer export"
    format: Format
    layout: Layout
    dtype: Literal["float32", "bfloat16"]
    origin: Origin
    target: TargetFacts
    torch: str
    files: dict[str, FileFacts]
    gate: Gate | None
    """None: exported with --no-gate, nobody has looked whether it decodes as it was trained."""

    def as_bytes(self) -> bytes:
        return json.dumps(self.model_dump(), indent=1).encode() + b"\n"


def read(directory: Path) -> Contract:
    """Raises `ConfigError` for a directory that is no export, or whose contract cannot be believed."""
    path = directory / NAME
    try:
        return Contract.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        there = "is not there" if not directory.exists() else f"has no {NAME}"
        raise ConfigError(f"{directory}: no export of this trainer ({there}); {MADE_BY} RUN makes one") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ConfigError(f"{path}: {where}: {first['msg']}; export it anew") from None


def differences(found: Any, expected: Any, prefix: str = "") -> list[str]:
    """By name, what is not the same in two layouts, configurations or other plain data; empty where all is."""
    found, expected = (_plain(one) for one in (found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        inner = prefix and f"{prefix}."
        return [
            said for key in {**expected, **found}
            for said in differences(found.get(key), expected.get(key), f"{inner}{key}")
        ]  # fmt: skip
    return [] if found == expected else [f"{prefix} is {json.dumps(found)}, not {json.dumps(expected)}"]


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
