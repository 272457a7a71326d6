"""A plain decoder that knows an export and nothing of the trainer: what a server finds in the directory.

It shares no code with what trained the drafter: its own reading of the files, RMS norm, rotary embedding, attention,
and its own target, whose hidden states Hugging Face hands out. Everything is written as it would be explained, one
block after the other behind a cache of the context, without a mask where none is needed. `gate.py` compares what it
drafts with what the trainer drafts. Shapes: S context, K slots of a block, H hidden, D head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Unreadable(Exception):
    """Its text says why the directory cannot be decoded with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the directory says it is to be used: config.json, and contract.json for what that has no word for."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    block_size: int
    mask_token_id: int
    hidden_state_ids: tuple[int, ...]
    """Into Hugging Face's `hidden_states`, where 0 is the embedding and n the output of layer n - 1."""
    rope_theta: float
    rope_dims: int
    rope_halves: bool
    slot_predicts: int
    slot_position: int
    context_end: int
    causal: bool
    window: int | None
    window_layers: tuple[int, ...]
    window_from_anchor: bool
    tensors: dict[str, Tensor] = field(repr=False)

    def with_tensors(self, changed: dict[str, Tensor]) -> Reading:
        return replace(self, tensors={**self.tensors, **changed})


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafted:
    """What was drafted for some blocks; N blocks, k = 1 .. K-1."""

    tokens_Nk: Tensor
    greedy_Nk: Tensor
    """What the target itself says, greedily, where each slot predicts."""
    hidden_NkH: Tensor
    """What the head is applied to; float32."""
    margin_Nk: Tensor
    """By how much the drafted token leads, in logits; and"""
    greedy_margin_Nk: Tensor
    """by how much the target's does."""


def read(directory: Path) -> Reading:
    """Raises `Unreadable` where files are missing, contradict each other, or do not hold exactly the tensors that the
    architecture has."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
        layout = json.loads((directory / "contract.json").read_bytes())["layout"]
        tensors = load_file(directory / "model.safetensors")
    except (OSError, ValueError, KeyError) as error:
        raise Unreadable(f"{directory} cannot be read: {error}") from None
    try:
        reading = _reading(config, layout, tensors)
    except (KeyError, TypeError) as error:
        raise Unreadable(f"config.json or contract.json lacks {error}") from None
    _see_that_tensors_fit(reading, config.get("transformer_layer_config", config))
    return reading


def _reading(config: dict[str, Any], layout: dict[str, Any], tensors: dict[str, Tensor]) -> Reading:
    if config.get("speculators_model_type"):
        draft, block, ids = config["transformer_layer_config"], config, config["aux_hidden_state_layer_ids"]
    else:
        draft, block, ids = config, config["dflash_config"], config["dflash_config"]["target_layer_ids"]
    rope = draft["rope_parameters"]
    dims = round(draft["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    halves = draft.get("is_neox_style", True)
    sliding = tuple(n for n, kind in enumerate(draft["layer_types"]) if kind == "sliding_attention")
    window = layout["window"] or {"tokens": None, "layers": [], "convention": ""}
    for what, here, there in (
        ("block size", block["block_size"], layout["block_size"]),
        ("mask token", block["mask_token_id"], layout["mask_token_id"]),
        ("captured layers", ids, [layer + layout["layer_id_base"] for layer in layout["layer_ids"]]),
        ("base of the rotary embedding", rope["rope_theta"], layout["rope"]["theta"]),
        ("rotated dimensions", dims, layout["rope"]["dims"]),
        ("rotary style", "halves" if halves else "interleaved", layout["rope"]["style"]),
        ("window", (draft["sliding_window"] if sliding else None, list(sliding)),
         (window["tokens"], window["layers"])),
        ("causality", draft.get("is_causal", False), layout["causal"]),
    ):  # fmt: skip
        if here != there:
            raise Unreadable(f"{what}: config.json says {here}, and contract.json {there}")
    if layout["anchor_slot"] != 0:
        raise Unreadable(f"the anchor in slot {layout['anchor_slot']} is a layout that servers do not have")
    return Reading(
        layers=draft["num_hidden_layers"], heads=draft["num_attention_heads"], kv_heads=draft["num_key_value_heads"],
        head_dim=draft["head_dim"], eps=draft["rms_norm_eps"], block_size=block["block_size"],
        mask_token_id=block["mask_token_id"],
        hidden_state_ids=tuple(number - layout["layer_id_base"] + 1 for number in ids),
        rope_theta=rope["rope_theta"], rope_dims=dims, rope_halves=halves, slot_predicts=layout["slot_predicts"],
        slot_position=layout["slot_position"], context_end=layout["context_end"], causal=layout["causal"],
        window=window["tokens"], window_layers=sliding, window_from_anchor=window["convention"] == "from the anchor",
        tensors=tensors,
    )  # fmt: skip


def _see_that_tensors_fit(reading: Reading, draft: dict[str, Any]) -> None:
    """Servers skip a tensor that they do not know without a word, and keep what was there for one that is missing."""
    hidden, inner = draft["hidden_size"], draft["intermediate_size"]
    queries, keys = reading.heads * reading.head_dim, reading.kv_heads * reading.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(reading.hidden_state_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for number in range(reading.layers):
        for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (reading.head_dim,), "self_attn.k_norm": (reading.head_dim,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }.items():  # fmt: skip
            expected[f"layers.{number}.{name}.weight"] = shape
    found = {name: tuple(tensor.shape) for name, tensor in reading.tensors.items()}
    reshaped = [name for name in found.keys() & expected.keys() if found[name] != expected[name]]
    for what, names in (
        ("lacks", sorted(expected.keys() - found.keys())),
        ("holds, and nothing would load,", sorted(found.keys() - expected.keys())),
        ("has in another shape", sorted(reshaped)),
    ):  # fmt: skip
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise Unreadable(f"model.safetensors {what} {listed}")


# --- the target -----------------------------------------------------------------------------------------------------


class ReferenceTarget:
    """The target by Hugging Face's own eager attention and `output_hidden_states`."""

    def __init__(self, path: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.device, self.dtype = device, dtype
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
        self.model = model.requires_grad_(False).eval().to(device)
        self.embedding_VH, self.head_VH = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        count = model.config.get_text_config().num_hidden_layers
        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        self._last_layer = next(layers for layers in lists if len(layers) == count)[-1]

    @torch.no_grad()
    def look(self, ids_S: Tensor, hidden_state_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states side by side [S, F], and logits [S, V] in float32."""
        before_the_norm: list[Tensor] = []
        # Only the last entry of `hidden_states` is not what its layer put out: the final norm has been applied.
        handle = self._last_layer.register_forward_hook(
            lambda _module, _inputs, output: before_the_norm.append(output[0] if isinstance(output, tuple) else output)
        )
        out = self.model(input_ids=ids_S[None].to(self.device), output_hidden_states=True, use_cache=False)
        handle.remove()
        states = [*out.hidden_states[:-1], *before_the_norm]
        return torch.cat([states[number][0] for number in hidden_state_ids], dim=-1), out.logits[0].float()


# --- the drafter ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def draft(reading: Reading, target: ReferenceTarget, texts: Sequence[tuple[Tensor, Sequence[int]]]) -> Drafted:
    """A block behind every anchor of every text (ids [S], anchors). A text goes on for `block_size` + 1 tokens or more
    behind its last anchor."""
    parts: list[tuple[Tensor, ...]] = []
    k = reading.block_size - 1
    tensors = {name: tensor.to(target.device, target.dtype) for name, tensor in reading.tensors.items()}
    reading = replace(reading, tensors=tensors)
    for ids_S, anchors in texts:
        features_SF, logits_SV = target.look(ids_S, reading.hidden_state_ids)
        cache = _context(reading, features_SF)
        for anchor in anchors:
            hidden_KH = _block(reading, target, cache, int(ids_S[anchor]), anchor)[1:]
            top_k2 = torch.nn.functional.linear(hidden_KH, target.head_VH).float().topk(2, dim=-1)
            first = anchor + 1 + reading.slot_predicts
            # The logits at a position are the target's word on the next one.
            greedy_k2 = logits_SV[first - 1 : first - 1 + k].topk(2, dim=-1)
            parts.append((
                top_k2.indices[:, 0], greedy_k2.indices[:, 0], hidden_KH.float(),
                top_k2.values[:, 0] - top_k2.values[:, 1], greedy_k2.values[:, 0] - greedy_k2.values[:, 1],
            ))  # fmt: skip
    tokens, greedy, hidden, margin, greedy_margin = (torch.stack(part).cpu() for part in zip(*parts, strict=True))
    return Drafted(
        tokens_Nk=tokens, greedy_Nk=greedy, hidden_NkH=hidden, margin_Nk=margin, greedy_margin_Nk=greedy_margin
    )


def _context(reading: Reading, features_SF: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [heads, S, D] of each layer, of all target features: what a server keeps."""
    projected_SH = features_SF @ reading.tensors["fc.weight"].T
    context_SH = _norm(projected_SH, reading.tensors["hidden_norm.weight"], reading.eps)
    positions_S = torch.arange(len(context_SH), device=context_SH.device)
    return [_keys_values(reading, number, context_SH, positions_S) for number in range(reading.layers)]


def _block(reading: Reading, target: ReferenceTarget, cache: list[tuple[Tensor, Tensor]], token: int, anchor: int
           ) -> Tensor:  # fmt: skip
    """Hidden states [K, H] of the block at `anchor`, whose token is known; ready for the head."""
    size, device = reading.block_size, target.device
    ids_K = torch.full((size,), reading.mask_token_id, device=device)
    ids_K[0] = token
    positions_K = anchor + reading.slot_position + torch.arange(size, device=device)
    seen = anchor + reading.context_end
    x_KH = target.embedding_VH[ids_K]
    for number in range(reading.layers):
        def weight(name: str, number: int = number) -> Tensor:
            return reading.tensors[f"layers.{number}.{name}.weight"]

        normed_KH = _norm(x_KH, weight("input_layernorm"), reading.eps)
        own_keys, own_values = _keys_values(reading, number, normed_KH, positions_K)
        keys, values = (
            torch.cat([kept[:, :seen], own], dim=1)
            for kept, own in zip(cache[number], (own_keys, own_values), strict=True)
        )
        queries = _heads(normed_KH @ weight("self_attn.q_proj").T, reading.heads)
        queries = _rotate(reading, _norm(queries, weight("self_attn.q_norm"), reading.eps), positions_K)
        group = reading.heads // reading.kv_heads
        scores = queries @ keys.repeat_interleave(group, dim=0).transpose(1, 2) / math.sqrt(reading.head_dim)
        hidden = _hidden_from_slots(reading, number, positions_K, seen, anchor)
        shares = scores.float().masked_fill(hidden, -math.inf).softmax(dim=-1).to(values.dtype)
        mixed_KE = (shares @ values.repeat_interleave(group, dim=0)).transpose(0, 1).flatten(1)
        x_KH = x_KH + mixed_KE @ weight("self_attn.o_proj").T
        normed_KH = _norm(x_KH, weight("post_attention_layernorm"), reading.eps)
        gate = torch.nn.functional.silu(normed_KH @ weight("mlp.gate_proj").T)
        x_KH = x_KH + (gate * (normed_KH @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    return _norm(x_KH, reading.tensors["norm.weight"], reading.eps)


def _hidden_from_slots(reading: Reading, number: int, positions_K: Tensor, seen: int, anchor: int) -> Tensor:
    """[K, seen + K]: which keys, context and then slots, a slot may not look at."""
    size = reading.block_size
    context = torch.arange(seen, device=positions_K.device)[None].expand(size, -1)
    slots = torch.arange(size, device=positions_K.device)
    later = (slots[None] > slots[:, None]) & reading.causal
    far = torch.zeros_like(context, dtype=torch.bool)
    if reading.window is not None and number in reading.window_layers:
        if reading.window_from_anchor:
            far = context < anchor - reading.window
        else:
            far = positions_K[:, None] - context >= reading.window
    return torch.cat([far, later], dim=1)


def _keys_values(reading: Reading, number: int, x_LH: Tensor, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    prefix = f"layers.{number}.self_attn"
    keys = _heads(x_LH @ reading.tensors[f"{prefix}.k_proj.weight"].T, reading.kv_heads)
    values = _heads(x_LH @ reading.tensors[f"{prefix}.v_proj.weight"].T, reading.kv_heads)
    keys = _norm(keys, reading.tensors[f"{prefix}.k_norm.weight"], reading.eps)
    return _rotate(reading, keys, positions_L), values


def _heads(x_LE: Tensor, count: int) -> Tensor:
    return x_LE.view(len(x_LE), count, -1).transpose(0, 1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()).to(x.dtype)


def _rotate(reading: Reading, x_GLD: Tensor, positions_L: Tensor) -> Tensor:
    """Each pair as a complex number, turned by its position times its frequency."""
    dims = reading.rope_dims
    turned, left = x_GLD[..., :dims].float(), x_GLD[..., dims:]
    frequencies = torch.tensor([reading.rope_theta ** (-2 * i / dims) for i in range(dims // 2)], device=x_GLD.device)
    turn_Ld = torch.polar(torch.ones(1, device=x_GLD.device), positions_L[:, None].float() * frequencies)
    if reading.rope_halves:
        pairs = torch.complex(turned[..., : dims // 2].contiguous(), turned[..., dims // 2 :].contiguous()) * turn_Ld
        turned = torch.cat([pairs.real, pairs.imag], dim=-1)
    else:
        pairs = torch.complex(turned[..., 0::2].contiguous(), turned[..., 1::2].contiguous()) * turn_Ld
        turned = torch.stack([pairs.real, pairs.imag], dim=-1).flatten(-2)
    return torch.cat([turned.to(x_GLD.dtype), left], dim=-1)
