"""`python -m trainer synthesize CONFIG` and `regenerate CONFIG`: portion by portion until there are enough.

What comes out is data as a training reads it (`data.kind: conversations`), with where each conversation came from
beside it: the target by the hash of its files, seed, number, how it was drawn, versions.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainer import kept
from trainer.config import ConfigError, expand_path
from trainer.data import source_files, source_hashes, sources
from trainer.data.source_files import Source, SourceError
from trainer.data.source_hashes import hash_of
from trainer.device import device_for
from trainer.model.target import Target, load_target
from trainer.sections import TargetConfig
from trainer.synthesis import filters
from trainer.synthesis.author import LONGEST_PROMPT, Author
from trainer.synthesis.config import SynthesisConfig
from trainer.synthesis.portions import Made, Regeneration, Synthesis, fresh
from trainer.synthesis.store import HELD_OUT, TRAIN, Store

Say = Callable[[str], None]
PORTION = 4
"""Times `batch_size`: so few rows wait for the longest conversation."""
HOPELESS_AFTER, HOPELESS_SHARE = 2000, 0.01
PACKAGES = ("torch", "transformers")


def write(config: SynthesisConfig, verb: str, *, say: Say, complain: Say) -> int:
    """Exit code: 1 where nearly nothing that the target writes can be kept. Raises `ConfigError`."""
    directory = expand_path(config.output_dir, key="output_dir").absolute()
    device = device_for(None if config.device == "auto" else config.device)
    found = _sources(config)
    say("phase=load_target")
    if device.type == "cuda" and config.compile != "off":  # where a training looks for it too
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept.kept_folder(directory, "compile-cache", os.environ)))
    target = load_target(
        TargetConfig(path=config.target.path, dtype=config.target.dtype, layer_ids=[0]), device
    )  # fmt: skip
    hashes = kept.kept_folder(directory, "token-cache", os.environ)
    made_with = {
        **config.what_decides(verb), "target": hash_of(target.files), "dtype": str(target.model.dtype),
        **({"paths": [content for source in found for content in source_hashes.content_of(hashes, source)]}
           if verb == "regenerate" else {}),
    }  # fmt: skip
    store = Store(directory, made_with=made_with, complain=complain)
    try:
        return _write(config, verb, store, target, found, say=say)
    finally:
        store.close()


def _write(config: SynthesisConfig, verb: str, store: Store, target: Target, found: list[Source], *, say: Say) -> int:
    known = {filters.key_of(asked) for asked in store.questions()}
    wanted = config.conversations
    if store.next:
        say(f"goes on: conversations={store.count} tried={store.next} in {store.directory}")
    if wanted is not None and store.count >= wanted:
        say(f"nothing to do: {store.count} conversations of {wanted} are there; raise conversations to go on")
        return 0
    # A question, and what the template puts around it, which may be a system's whole prompt.
    longest = LONGEST_PROMPT if verb == "regenerate" else config.question.max_tokens + 256
    author = Author(target, config, longest_prompt=longest, say=say)
    way = Synthesis(author) if verb == "synthesize" else Regeneration(author, _records(found), begin=store.next)
    provenance = _provenance(config, verb, target)
    started, began = time.monotonic(), store.next
    say(f"phase={verb}")
    while wanted is None or store.count < wanted:
        portion = PORTION * config.batch_size
        if wanted is not None:  # half of what is tried is dropped, about: no more than may be needed
            portion = min(portion, max(config.batch_size, 2 * (wanted - store.count)))
        numbers = range(store.next, store.next + portion)
        made = way.portion(numbers)
        if not made:
            break
        room = len(made) if wanted is None else wanted - store.count
        made = _first(fresh(made, known), room)
        records = [
            (HELD_OUT if filters.held_out(one.key, config.held_out_fraction) else TRAIN,
             {**one.record, "provenance": {"number": one.number, **provenance}})
            for one in made if one.record is not None
        ]  # fmt: skip
        store.add(records, Counter(one.fault for one in made if one.record is None), next_=made[-1].number + 1)
        of = f"/{wanted}" if wanted else ""
        dropped = sum(store.dropped.values())
        say(
            f"conversations={store.count}{of} held_out={store.written[HELD_OUT]} tried={store.next} dropped={dropped}"
            f" tok/s={author.tokens / (time.monotonic() - started):.1f}"
        )
        if verb == "synthesize" and store.next - began >= HOPELESS_AFTER and store.count < HOPELESS_SHARE * store.next:
            say(_told(store))
            say(f"gives up: of {store.next} conversations {store.count} could be kept; is it a chat model?")
            return 1
    say(_told(store))
    return 0


def _first(made: list[Made], count: int) -> list[Made]:
    """Up to the one with the last of `count` records."""
    records = 0
    for place, one in enumerate(made):
        records += one.record is not None
        if records == count:
            return made[: place + 1]
    return made


def _told(store: Store) -> str:
    reasons = "".join(f"\n  {count} dropped: {reason}" for reason, count in store.dropped.most_common())
    files = ", ".join(f"{count} in {store.directory / name}" for name, count in store.written.items())
    return f"{store.count} conversations: {files}{reasons}"


def _provenance(config: SynthesisConfig, verb: str, target: Target) -> dict[str, Any]:
    left_out = {"min_tokens", "max_tokens", "unfinished"}
    drawn = {name: getattr(config, name).model_dump(exclude=left_out, exclude_none=True)
             for name in ("question", "answer") if verb == "synthesize" or name == "answer"}  # fmt: skip
    return {
        "by": verb, "seed": config.seed, "target": hash_of(target.files), **drawn,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
    }  # fmt: skip


def _sources(config: SynthesisConfig) -> list[Source]:
    try:
        return list(itertools.chain.from_iterable(
            source_files.resolve(expand_path(path, key="paths"), "conversations") for path in config.paths
        ))  # fmt: skip
    except (SourceError, OSError) as error:
        raise ConfigError(f"paths: {error}") from None


def _records(found: list[Source]) -> Iterator[tuple[str, Any]]:
    for source in found:
        for at, record in sources.read(source, text_field=None):
            yield _short(sources.where(source, at), source.path), record


def _short(where: str, path: Path) -> str:
    """Without the folders: data travel."""
    return where.replace(str(path), path.name)
