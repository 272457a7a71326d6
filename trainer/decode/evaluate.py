"""How good a drafter is where it counts: tokens per verification, and wall-clock speed against the target alone.

Every prompt is decoded twice in this process, by the drafter with its target and by the target alone, with the same
kernels, the same memory and, on CUDA, graphs of the same kind. Both are run once before anything is measured.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.decode import parity
from trainer.decode.acceptance import DEFINITION
from trainer.decode.engine import Engine
from trainer.decode.generate import Generated, end_ids, engine_for, run
from trainer.decode.loaded import Loaded
from trainer.decode.prompts import Prompt
from trainer.decode.sampling import Sampling

Say = Callable[[str], None]
PACKAGES = ("torch", "transformers")
ALL = "all"


def evaluate(loaded: Loaded, prompts: Sequence[Prompt], *, max_tokens: int, batch_size: int, sampling: Sampling,
             seed: int, compiled: bool = False, say: Say) -> dict[str, Any]:  # fmt: skip
    """What was found, as plain data: for all prompts and by category; see docs/decoding.md for what is what."""
    target = loaded.target
    ids = [prompt.ids for prompt in prompts]

    def both(*, compiled: bool) -> dict[str, Engine]:
        return {
            name: engine_for(target, drafter, ids, max_tokens=max_tokens, batch_size=batch_size, sampling=sampling,
                             stop_ids=end_ids(target), compiled=compiled, say=say)
            for name, drafter in (("drafted", loaded.block_drafter), ("plain", None))
        }  # fmt: skip

    ways = both(compiled=compiled)
    if len({engine.rounds.compiled for engine in ways.values()}) > 1:
        say("torch compiles only one of the two ways: both are measured without")
        ways = both(compiled=False)
    for engine in ways.values():
        run(engine, [max(ids, key=len)], max_tokens=min(max_tokens, 16), seed=seed)
    found: dict[str, dict[str, Generated]] = {}
    for category, group in itertools.groupby(prompts, key=lambda prompt: prompt.category):
        own = [prompt.ids for prompt in group]
        found[category] = {name: run(engine, own, max_tokens=max_tokens, seed=seed) for name, engine in ways.items()}
        say(f"evaluated {category}: {len(own)} prompts, {_tau(found[category])}")
    same = {name: _same(loaded, made) if sampling.greedy else {} for name, made in found.items()}
    whole = {
        name: Generated(
            continuations=[one for made in found.values() for one in made[name].continuations],
            reading_s=sum(made[name].reading_s for made in found.values()),
            decoding_s=sum(made[name].decoding_s for made in found.values()),
        )
        for name in ways
    }  # fmt: skip
    return {
        "drafter": loaded.source,
        "target": str(target.model.config._name_or_path),
        "target_files": target.files,
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "block_size": loaded.block_drafter.block_size,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
        "seed": seed,
        "graphs": all(engine.rounds.recorded for engine in ways.values()),
        "compiled": ways["drafted"].rounds.compiled,
        "preparing_s": {name: engine.rounds.preparing_s for name, engine in ways.items()},
        "tau_is": DEFINITION,
        "tie_is": parity.RULE,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        ALL: _figures(whole, _add(same.values())),
        "categories": {name: _figures(made, same[name]) for name, made in found.items()},
    }


def _figures(made: dict[str, Generated], same: dict[str, int]) -> dict[str, Any]:
    drafted, plain = made["drafted"], made["plain"]
    acceptance = drafted.acceptance
    return {
        "prompts": len(drafted.continuations),
        "tokens": drafted.tokens,
        "verifications": acceptance.verifications,
        "plain_verifications": plain.acceptance.verifications,
        "tau": acceptance.tau,
        "kept_by_slot": acceptance.by_slot,
        "kept_by_slot_if_reached": acceptance.by_slot_if_reached,
        "tok_s": drafted.tok_s,
        "plain_tok_s": plain.tok_s,
        "speedup": drafted.tok_s / plain.tok_s if plain.tok_s else None,
        "decoding_s": drafted.decoding_s,
        "plain_decoding_s": plain.decoding_s,
        "reading_s": drafted.reading_s,
        **same,
    }


def _same(loaded: Loaded, made: dict[str, Generated]) -> dict[str, int]:
    """Of greedy texts: how many are the target's own, how many are up to a tie, and how many are not."""
    counts = {"same": 0, "same_up_to_a_tie": 0, "different": 0}
    for ours, theirs in zip(made["drafted"].continuations, made["plain"].continuations, strict=True):
        difference = parity.first_difference(loaded.target, ours.prompt, ours.tokens, theirs.tokens)
        if difference is None:
            counts["same" if len(ours.tokens) == len(theirs.tokens) else "different"] += 1
        else:
            counts["same_up_to_a_tie" if difference.tie else "different"] += 1
    return counts


def _add(counts: Any) -> dict[str, int]:
    counts = list(counts)
    return {key: sum(one[key] for one in counts) for key in counts[0]}


def _tau(made: dict[str, Generated]) -> str:
    tau = made["drafted"].acceptance.tau
    speed = f"{made['drafted'].tok_s:.1f} tok/s, alone {made['plain'].tok_s:.1f}"
    return f"{'no verification' if tau is None else f'τ {tau:.2f}'}, {speed}"
