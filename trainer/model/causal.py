"""Attention without transformers' masks, for targets in which a token sees all before it and none after.

Left to itself transformers asks every batch whether documents are packed in it, which waits for the device in the
middle of a forward; or it writes a whole mask out where it may not ask, as when a CUDA graph is recorded. To an
attention that it knows no mask for it hands over none, and SDPA's own causal kernels are used; and where documents are
packed, the mask of `documents_mask`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.model import remembering

NAME = "sdpa_without_masks"


def documents_mask(positions_BS: Tensor) -> Tensor:
    """[B, 1, S, S]: which token (third) sees which (last), where positions begin anew with each document of a row."""
    place_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
    starts_BS = place_S - positions_BS
    same_BSS = starts_BS[:, :, None] == starts_BS[:, None, :]
    return (same_BSS & (place_S[:, None] >= place_S))[:, None]


@torch.no_grad()
def without_masks(model: Any) -> bool:
    """Let `model` attend causally and to everything before; whether it now does. One that must not stays as it is: its
    layers look back only so far, or in chunks, or what it computes would change."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if not remembering.lent():
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        if not remembering.is_numbered():
            remembering.here.layer = module.layer_idx
        return remembering.attend(query, key, value, scale=options.get("scaling")), None

    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if any(windows) or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return False
    was = model.config._attn_implementation
    ids = torch.arange(64, device=model.device)[None] % config.vocab_size
    before = model.base_model(input_ids=ids, use_cache=False)[0]
    AttentionInterface.register(NAME, attend)
    try:
        model.set_attn_implementation(NAME)
        after = model.base_model(input_ids=ids, use_cache=False)[0]
        if config._attn_implementation == NAME and (after - before).abs().max() <= 1e-2 * before.abs().max():
            return True
    except (ValueError, TypeError, NotImplementedError):  # a model with attention of its own
        pass
    model.set_attn_implementation(was)
    return False
