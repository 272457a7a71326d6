"""Floating-point operations that a step has to do, and how many a second a device can: their ratio is the MFU.

Counted is what the mathematics asks for, whatever a kernel does: a matrix product [m, k] x [k, n] is 2mkn, recomputed
activations and logits are not counted again, and attention counts the pairs of query and key that see each other, not
the whole matrix. Rows are counted as they are computed, with their padding. Everything that is no matrix product is
left out, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.blocks import Blocks
from trainer.model.drafter import DrafterShape


def drafter_flop(shape: DrafterShape, *, vocabulary: int, context: int, slots: int, supervised: int, pairs: float
                 ) -> float:  # fmt: skip
    """Of forward, loss and backward over `context` tokens, `slots` slots, `supervised` of them through the output head,
    and `pairs` of a slot and a key that it sees.

    A layer: q and o [H, Q] and the MLP [H, I] for slots, k and v [H, K] for context and slots, 4 Q a pair; twice as
    much again in the backward. `fc` [captured H, H] has no gradient of its input, the frozen head [H, V] none of its
    weights: for both, the backward costs what the forward does.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 2 * slots * shape.hidden * (2 * queries + 3 * shape.intermediate)
    layer += 2 * (context + slots) * shape.hidden * 2 * keys
    layer += 4 * pairs * queries
    features = 2 * context * shape.captured * shape.hidden * shape.hidden
    head = 2 * supervised * shape.hidden * vocabulary
    return float(3 * shape.layers * layer + 2 * features + 2 * head)


def drafter_flop_of(blocks: Blocks, shape: DrafterShape, *, vocabulary: int) -> float:
    """The same for some rows of a step: a slot sees the context between its document's start and its anchor, and its
    own block."""
    size = blocks.block_size
    before = ((blocks.anchors_BN - blocks.starts_BN) * blocks.valid_BN).sum().item()
    return drafter_flop(
        shape, vocabulary=vocabulary, context=blocks.positions_BS.numel(), slots=blocks.tokens_BT.numel(),
        supervised=blocks.weights_BNk.numel(), pairs=size * (before + size * blocks.anchors_BN.numel()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetCost:
    """What the target's forward up to its captured layers costs; its output head is not run."""

    per_token: float
    per_pair: float
    """Of a token and one that it sees, over all layers that see everything before."""
    per_near_pair: float = 0.0
    """Over those that see no further than `window`."""
    window: int = 0

    @classmethod
    def of(cls, model: Any, *, layers: int | None = None) -> TargetCost:
        """Of a Hugging Face causal language model: 2 a weight and token, of the experts only for those that a token
        goes through; 4 heads x head_dim a layer and pair. What a layer of another kind does besides its weights
        (recurrences, convolutions) is not counted. `layers`: how many there are, if not what its configuration says."""
        base, config = model.base_model, model.config.get_text_config()
        tables = {id(module.weight) for module in base.modules() if isinstance(module, nn.Embedding)}
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        part = (getattr(config, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
        weights = sum(
            weight.numel() * (part if ".experts." in name else 1.0)
            for name, weight in base.named_parameters() if weight.dim() > 1 and id(weight) not in tables
        )  # fmt: skip
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        kinds = kinds[:layers]
        window = getattr(config, "sliding_window", None) or 0
        near = sum(kind == "sliding_attention" for kind in kinds) if window else 0
        full = sum(kind in ("full_attention", "sliding_attention") for kind in kinds) - near
        return cls(
            per_token=2.0 * weights, per_pair=4.0 * width * full, per_near_pair=4.0 * width * near, window=window
        )  # fmt: skip

    def flop(self, positions_BS: Tensor) -> float:
        """Of rows whose tokens stand at these places of their documents."""
        sees_BS = positions_BS + 1
        near = self.per_near_pair and self.per_near_pair * sees_BS.clamp(max=self.window).sum().item()
        return self.per_token * positions_BS.numel() + self.per_pair * sees_BS.sum().item() + near


PEAK_TFLOP_S: dict[str, tuple[float, float]] = {
    "B200": (2250.0, 75.0), "GB200": (2500.0, 80.0), "B100": (1750.0, 60.0),
    "H200 NVL": (835.5, 60.0), "H200": (989.4, 66.9), "GH200": (989.4, 66.9),
    "H100 NVL": (835.5, 60.0), "H100 PCIe": (756.0, 51.2), "H100": (989.4, 66.9), "H800": (989.4, 66.9),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5), "A800": (312.0, 19.5), "A40": (149.7, 37.4), "A30": (165.0, 10.3), "A10": (125.0, 31.2),
    "A6000": (154.8, 38.7), "L40S": (362.0, 91.6), "L40": (181.0, 90.5), "L4": (121.0, 30.3),
    "RTX 4090": (165.2, 82.6), "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.4, 163.4), "MI325X": (1307.4, 163.4), "MI250X": (191.5, 47.9),
}  # fmt: skip
"""Of a device that torch names so: TFLOP/s of a dense product in bfloat16 (accumulating in float32), and in float32
without TF32, as torch computes it by default. From the makers' data sheets, where figures "with sparsity" are halved;
of an MI250X one of its two halves, which torch sees as a device each."""

OTHERS = {"Laptop", "Max", "Ti", "SUPER", "D", "Ada", "MIG"}
"""In the name of a card they make it another one, or a part of one."""


def peak_flop_s(device: torch.device, dtype: torch.dtype, *, given_tflops: float | None = None) -> float | None:
    """What `device` can do at most; None if nobody knows: a CPU, or a card that the table lacks."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    return _of_card(torch.cuda.get_device_name(device), dtype)


def _of_card(name: str, dtype: torch.dtype) -> float | None:
    words = name.replace("-", " ").split()
    if not OTHERS.isdisjoint(words):
        return None
    # The more words of a card's name there are, the better it is known: "H100 PCIe" before "H100".
    for known in sorted(PEAK_TFLOP_S, key=lambda one: -len(one.split())):
        if all(word in words for word in known.split()):
            bf16, fp32 = PEAK_TFLOP_S[known]
            return 1e12 * (fp32 if dtype == torch.float32 else bf16)
    return None


class Peaks:
    """FLOP/s of the devices of a run, each given with a type that it computes in, and may be given with several."""

    def __init__(self, dtypes: Iterable[tuple[torch.device, torch.dtype]], *, given_tflops: float | None) -> None:
        self._peaks: dict[torch.device, float | None] = {}
        for device, dtype in dtypes:
            peak = peak_flop_s(device, dtype, given_tflops=given_tflops)
            # Of two types the faster: so much it could do.
            self._peaks[device] = max(filter(None, (peak, self._peaks.get(device))), default=None)

    @property
    def devices(self) -> list[torch.device]:
        return list(self._peaks)

    def of(self, device: torch.device) -> float | None:
        return self._peaks[device]

    @property
    def all(self) -> float | None:
        """Of all devices together; None where one is not known."""
        known = [peak for peak in self._peaks.values() if peak is not None]
        return sum(known) if len(known) == len(self._peaks) else None
