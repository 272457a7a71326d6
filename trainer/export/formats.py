"""config.json as the servers read it: z-lab's, which SGLang and vLLM load, and that of speculators, which vLLM loads.

Both name the same tensors, so that `model.safetensors` is the same file in both. What they read, and where that is
seen, is in docs/export.md. `written` makes one of a layout, `read` gets out again what such a file says, by which
the two can be held against each other.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

from trainer.config import ConfigError
from trainer.export.contract import Format, Layout, Rope
from trainer.export.source import Source
from trainer.inputs import choose_layers
from trainer.model.drafter import DrafterShape

SPECULATORS_VERSION = "0.9.0"
"""Whose fields these are."""
SIZES = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate": "intermediate_size",
}  # fmt: skip
"""Of a drafter's shape, by what config.json calls them."""
MOST, MOST_LAYERS, MOST_FLOAT = 1 << 24, 1 << 10, 1e30
"""More than any drafter has."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def layout_of(source: Source, format: Format) -> Layout:
    """Of this trainer's drafter, as a directory of this format says it."""
    return Layout(
        block_size=source.block_size, mask_token_id=source.mask_token_id, layer_ids=source.layer_ids,
        layer_id_base=1 if format == "speculators" else 0,
        rope=Rope(theta=source.shape.rope_theta, dims=source.shape.head_dim, style="halves"),
    )  # fmt: skip


def written(source: Source, layout: Layout, format: Format, *, dtype: str, target_name: str) -> dict[str, Any]:
    """What config.json holds. Raises `ConfigError` for what the format has no word for."""
    draft = _transformer(source, layout, dtype)
    if format == "zlab":
        return {
            "architectures": ["DFlashDraftModel"], **draft, "block_size": layout.block_size,
            "num_target_layers": source.target.layers,
            "dflash_config": {
                "block_size": layout.block_size, "mask_token_id": layout.mask_token_id,
                "target_layer_ids": _ids(layout),
            },
        }  # fmt: skip
    if source.target.layers - 1 in source.layer_ids:
        raise ConfigError(
            f"--format speculators: layer {source.target.layers - 1}, the target's last, is captured; there its output"
            " is kept for another purpose, and after the final norm; choose --format zlab"
        )
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": layout.block_size - 1, "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": [source.target.architecture]},
        },
        "transformer_layer_config": draft,
        "draft_vocab_size": source.target.vocabulary,
        "target_hidden_size": None,
        "block_size": layout.block_size,
        "aux_hidden_state_layer_ids": _ids(layout),
        "mask_token_id": layout.mask_token_id,
        "sample_from_anchor": False,
        # There are no sliding layers; but vLLM has read this as the causality of all layers.
        "sliding_window_non_causal": not layout.causal,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }  # fmt: skip


def _ids(layout: Layout) -> list[int]:
    return [layer + layout.layer_id_base for layer in layout.layer_ids]


def _transformer(source: Source, layout: Layout, dtype: str) -> dict[str, Any]:
    shape, target = source.shape, source.target_config
    window, rope = layout.window, layout.rope
    rope_parameters = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.dims != shape.head_dim:
        rope_parameters["partial_rotary_factor"] = rope.dims / shape.head_dim
    sliding = window.layers if window else []
    found = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "rope_parameters": rope_parameters,
        "max_position_embeddings": target.get("max_position_embeddings") or 32768,
        "layer_types": ["sliding_attention" if n in sliding else "full_attention" for n in range(shape.layers)],
        "sliding_window": window.tokens if window else None,
        "use_sliding_window": window is not None,
        "max_window_layers": shape.layers,
        "vocab_size": source.target.vocabulary,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        **{key: target.get(key) for key in TOKENS},
    }
    if rope.style != "halves":
        found["is_neox_style"] = False
    if layout.causal:
        found["is_causal"] = True
    return found


def shape_in(config: dict[str, Any], layout: Layout) -> DrafterShape:
    """Sizes that such a config.json gives. Raises `KeyError` where it gives none, `TypeError` or `ValueError` where
    they are none."""
    draft = config.get("transformer_layer_config", config)
    most = {"layers": MOST_LAYERS}
    sizes = {field: _size(draft[name], name, most=most.get(field, MOST)) for field, name in SIZES.items()}
    if sizes["head_dim"] % 2 or sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"{sizes['heads']} heads of {sizes['head_dim']} cannot share {sizes['kv_heads']} key heads")
    return DrafterShape(
        captured=len(layout.layer_ids), rms_norm_eps=_positive(draft["rms_norm_eps"], "rms_norm_eps"),
        rope_theta=_positive(said_in(config)["rope"]["theta"], "rope_theta"), **sizes,
    )  # fmt: skip


def _size(value: Any, name: str, *, most: int, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {_short(value)}, not a number from {least} to {most:,}")
    return value


def _positive(value: Any, name: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MOST_FLOAT:
        raise ValueError(f"{name} is {_short(value)}, not a number above 0")
    return float(value)


def _short(value: Any) -> str:
    return textwrap.shorten(json.dumps(value), 40)


def said_in(config: dict[str, Any]) -> dict[str, Any]:
    """What such a config.json says of the layout, by the layout's names; `config_layer_ids` as it counts them."""
    draft = config.get("transformer_layer_config", config)
    dflash = {**config, **config.get("dflash_config", {})}
    rope = draft.get("rope_parameters") or {}
    sliding = [n for n, kind in enumerate(draft.get("layer_types") or []) if kind == "sliding_attention"]
    return {
        "block_size": dflash.get("block_size"),
        "mask_token_id": dflash.get("mask_token_id"),
        "config_layer_ids": dflash.get("target_layer_ids", config.get("aux_hidden_state_layer_ids")),
        "causal": dflash.get("causal", draft.get("is_causal", False)),
        "rope": {
            "theta": draft.get("rope_theta", rope.get("rope_theta")),
            "dims": round(draft.get("head_dim", 0) * rope.get("partial_rotary_factor", 1.0)),
            "style": "halves" if draft.get("is_neox_style", True) else "interleaved",
        },
        "window": {"tokens": draft.get("sliding_window"), "layers": sliding} if sliding else None,
    }


def layout_in(config: dict[str, Any]) -> Layout:
    """What a config.json in z-lab's form says, and what that form takes for granted. Raises `KeyError` for what it
    lacks, `ValueError` for values that are none."""
    said = said_in(config)
    ids = said["config_layer_ids"]
    if ids is None:  # those that this form chooses by itself
        ids = choose_layers(None, config["num_hidden_layers"], count=config["num_target_layers"])
    values = {**said, "layer_ids": ids, **{f"rope.{key}": value for key, value in said["rope"].items()}}
    for name in ("block_size", "mask_token_id", "rope.theta"):
        if values[name] is None:
            raise KeyError(name)
    rising = sorted({_size(layer, "layer", most=MOST, least=0) for layer in ids})
    if not ids or ids != rising:
        raise ValueError(f"target_layer_ids are {_short(ids)}, which do not rise")
    _size(said["block_size"], "block_size", most=MOST, least=2)
    _size(said["mask_token_id"], "mask_token_id", most=MOST, least=0)
    return Layout(
        block_size=said["block_size"], mask_token_id=said["mask_token_id"], layer_ids=ids, layer_id_base=0,
        causal=said["causal"], rope=Rope(**said["rope"]),
    )  # fmt: skip


def not_here(config: dict[str, Any]) -> str | None:
    """What such a config.json has that is in no layout, and that this trainer's drafter has not."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        return f"its rotary embedding is scaled ({kind})"
    if window := said_in(config)["window"]:
        return f"its layers {window['layers']} look back {window['tokens']} tokens only"
    if config.get("hidden_act", "silu") != "silu":
        return f"its MLP has {config['hidden_act']}, not silu"
    return None


def meant_by(layout: Layout) -> dict[str, Any]:
    """The same as `said_in`, of a layout."""
    window = layout.window
    return {
        "block_size": layout.block_size, "mask_token_id": layout.mask_token_id, "config_layer_ids": _ids(layout),
        "causal": layout.causal, "rope": layout.rope.model_dump(),
        "window": {"tokens": window.tokens, "layers": window.layers} if window else None,
    }  # fmt: skip
