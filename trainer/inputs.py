"""Whether what a run reads is there and can be what it is said to be, by looking at files and headers alone.

Milliseconds, and the standard library only: `__main__.py` looks before torch is imported, and specctl, which ships this
file, runs it on a target (`python3 -m trainer.inputs`) before an environment is made for the trainer.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.data import source_files

Problem = tuple[str, str]
"""The key of the configuration, and what is wrong."""

KINDS = ("model", "files", "drafter")
"""Of what is read."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Each as one file, or in shards that `NAME.index.json` lists."""
MARKER = "COMPLETE.json"
"""Of a checkpoint: see `checkpoint.py`."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
LFS = source_files.LFS
MOST_HEADER_BYTES = 100 << 20


def file_problem(path: Path) -> str | None:
    """Why `path` is no file that can be read."""
    try:
        with path.open("rb") as file:
            return _is_pointer(path) if file.read(len(LFS)) == LFS else None
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def model_problems(path: Path, wanted: dict[str, Any], *, weights: bool = True) -> Iterator[Problem]:
    """What is wrong with the model at `path`, and with what is `wanted` of it: `mask_token_id`, `layer_ids`,
    `captured_layers`. Nothing is said that depends on anything but these files."""
    try:
        config = _config(path)
        for problem in (weights_problem(path) if weights else None, _tokenizer_problem(path)):
            if problem:
                yield "target.path", problem
    except _NoModel as error:
        yield "target.path", str(error)
        return
    except OSError as error:
        yield "target.path", f"{error.filename or path}: {error.strerror or error}"
        return
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    rows, layers = text.get("vocab_size"), text.get("num_hidden_layers", text.get("n_layer"))
    mask = wanted["mask_token_id"]
    if isinstance(rows, int) and mask >= rows:
        spare = spare_rows(path, rows)
        said = f"{mask} is no token of {path}, which has {rows:,}: 0 to {rows - 1}"
        yield "drafter.mask_token_id", f"{said}; spare is {spare}" if spare else said
    if isinstance(layers, int):
        try:
            choose_layers(wanted["layer_ids"], wanted["captured_layers"], count=layers)
        except LayerError as error:
            yield error.key, str(error)


def spare_rows(path: Path, rows: int) -> str:
    """Some of the embedding's `rows` that the model at `path` seems to have no use for, for a person: special tokens
    that neither its chat template nor its settings name, and the first row without a token. Empty if none is found."""
    try:
        tokenizer, settings = (
            json.loads((path / name).read_bytes()) for name in ("tokenizer.json", "tokenizer_config.json")
        )
        added, vocabulary = tokenizer["added_tokens"], tokenizer["model"]["vocab"]
        lists = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
        used = [str(value) for key, value in settings.items() if key not in lists]
        used += [file.read_text("utf-8", "replace") for file in path.glob("chat_template*")]
        special = [(one["id"], one["content"]) for one in added if one["special"]]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        end = 1 + max([*ids, *(one["id"] for one in added)], default=-1)
        found = [f"{at} ({content})" for at, content in special if not any(content in text for text in used)][:2]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return " or ".join([*found, *([f"{end} (a row without a token)"] if end < rows else [])])


class LayerError(ValueError):
    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def choose_layers(ids: list[int] | None, wanted: int, *, count: int) -> list[int]:
    """The configured `ids`, or `wanted` of them evenly spread from 1 to count-3 (one: the middle)."""
    if ids is not None:
        if max(ids) >= count or ids != sorted(set(ids)):
            raise LayerError("target.layer_ids", f"must rise, from 0 to {count - 1} at most; is {ids}")
        return ids
    if wanted == 1:
        return [count // 2]
    spread = [round(1 + index * (count - 4) / (wanted - 1)) for index in range(wanted)]
    if count < 4 or len(set(spread)) < wanted:
        said = f"{count} layers are too few to spread {wanted}; set target.layer_ids"
        raise LayerError("target.captured_layers", said)
    return spread


def drafter_problem(path: Path) -> str | None:
    """Why nothing can start from `path`: neither a run's directory, nor a checkpoint, nor a drafter as servers load
    it."""
    try:
        if is_checkpoint(path):
            return None if (path / MARKER).exists() else f"{path} is no whole checkpoint: {MARKER} is missing"
        root = path if path.name == "checkpoints" else path / "checkpoints"
        if root.is_dir():
            whole = any(is_checkpoint(one) and (one / MARKER).exists() for one in root.iterdir())
            return None if whole else f"{root} holds no whole checkpoint"
        _config(path, "drafter")
        return weights_problem(path, WEIGHTS[:1])
    except _NoModel as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is meant as one, whole or not."""
    return (path / MARKER).exists() or path.name.startswith("step-")


# --- the files of a model -------------------------------------------------------------------------------------------


class _NoModel(Exception):
    """What is at the path is no model at all."""


def _config(path: Path, what: str = "Hugging Face model") -> dict[str, Any]:
    if not path.exists():
        raise _NoModel(f"no {what} in {path} (there is no such directory)")
    if not path.is_dir():
        raise _NoModel(f"{path} is a file, and the directory of a {what} is needed")
    file = path / "config.json"
    if not file.is_file():
        # A download's cache keeps the files a few folders down.
        inner = sorted(found.parent for found in [*path.glob("*/config.json"), *path.glob("snapshots/*/config.json")])
        said = f"; {inner[-1]} has one" if inner else ""
        raise _NoModel(f"no {what} in {path} (config.json is missing{said})")
    data = file.read_bytes()
    if data.startswith(LFS):
        raise _NoModel(_is_pointer(file))
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _NoModel(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise _NoModel(f"{file} is not a model's configuration: it holds no object")
    return config


def weights_problem(path: Path, names: Sequence[str] = WEIGHTS) -> str | None:
    """Why the weights in `path`, under one of these names, are not there, or not whole."""
    if (path / "adapter_config.json").exists():
        return None  # its weights are another model's, and what finds them knows better
    for name in names:
        if (path / name).exists():
            return _file_problem(path / name)
        index = path / f"{name}.index.json"
        if index.exists():
            return _shards_problem(index)
    said = f"{path} holds no weights ({' or '.join(names)}, or their .index.json)"
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".gguf", ".pth"))
    if others:
        return f"{said}; {', '.join(others[:3])} is not a name that is looked for"
    return f"{said}: was the download broken off?"


def _shards_problem(index: Path) -> str | None:
    data = index.read_bytes()
    if data.startswith(LFS):
        return _is_pointer(index)
    try:
        names = sorted(set(json.loads(data)["weight_map"].values()))
        shards = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{index} is no index of weights (it has no weight_map)"
    missing = [name for name, shard in zip(names, shards, strict=True) if not shard.is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        return f"{index.parent} lacks {len(missing)} of its {len(names)} files of weights: {listed}"
    return next((said for shard in shards if (said := _file_problem(shard))), None)


def parameter_count(path: Path) -> int:
    """How many numbers the model's weights are; from the headers of its safetensors files, else from its files' sizes
    as if each took two bytes."""
    count = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as content:
            header = json.loads(content.read(struct.unpack("<Q", content.read(8))[0]))
        for name, entry in header.items():
            count += math.prod(entry["shape"]) if name != "__metadata__" else 0
    return count or sum(file.stat().st_size // 2 for file in path.glob("pytorch_model*.bin"))


def _file_problem(file: Path) -> str | None:
    """Why this file of weights cannot be whole. Of a .bin only that it is there."""
    size = file.stat().st_size
    with file.open("rb") as content:
        head = content.read(len(LFS))
        if head == LFS:
            return _is_pointer(file)
        if not size:
            return f"{file} is empty"
        if file.suffix != ".safetensors":
            return None
        length = struct.unpack("<Q", head[:8])[0] if size >= 8 else MOST_HEADER_BYTES + 1
        if length > MOST_HEADER_BYTES:
            return f"{file} is not a safetensors file"
        content.seek(8)
        header = content.read(length)
    if len(header) < length:
        return f"{file} is cut off: {size:,} bytes, and its header alone needs {8 + length:,}"
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return f"{file} is not a safetensors file: its header cannot be read"
    if size != needed:
        what = "is cut off" if size < needed else "is longer than its header says"
        return f"{file} {what}: {size:,} of {needed:,} bytes; fetch it again"
    return None


def _tokenizer_problem(path: Path) -> str | None:
    found = [path / name for name in TOKENIZERS if (path / name).exists()]
    if not found:
        return f"{path} has no tokenizer (tokenizer.json)"
    return file_problem(found[0])


def _is_pointer(file: Path) -> str:
    return f"{file} is a Git LFS pointer, not the file itself: git lfs pull fetches it"


def problems(asked: dict[str, Any], *, weights: bool = True) -> Iterator[Problem]:
    """What is wrong with the `model`, the `files` and the `drafter`, paths by their keys, and with what is `wanted` of
    the model; without its weights, if only its tokenizer is needed."""
    for path in asked["model"].values():
        yield from model_problems(Path(path), asked["wanted"], weights=weights)
    for key, path in asked["files"].items():
        if problem := source_files.problem(Path(path), asked["wanted"].get("data_kind", "text")):
            yield key, problem
    for key, path in asked.get("drafter", {}).items():
        if problem := drafter_problem(Path(path)):
            yield key, problem


def main() -> None:
    """Reads what `problems` takes, as JSON on stdin, and prints what it gives."""
    print(json.dumps(list(problems(json.loads(sys.stdin.buffer.read())))))


if __name__ == "__main__":
    main()
