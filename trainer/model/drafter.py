"""The DFlash drafter: a few Qwen3-style layers that read the target's features and fill a block of masked slots at
once.

Queries come from the block slots only. Keys and values are projections of [context features | slots]; the features
are one vector per context token (`fc` over the captured layers, then `hidden_norm`), shared by all layers. Embedding
and output head are the target's own, frozen (`FrozenEnds`), and not part of the weights. A state dict has the names
that the servers load; inside, what has the same input is one product (`Joined`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.kernels import Kernels
from trainer.model.attention import Attention
from trainer.model.blocks import Blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterShape:
    hidden: int
    captured: int
    """Number of target layers whose outputs are concatenated."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenEnds:
    """The target's embedding and output head, on one device, in the drafter's type of arithmetic."""

    embedding_VH: Tensor
    head_VH: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> FrozenEnds:
        tied = self.embedding_VH.data_ptr() == self.head_VH.data_ptr()
        embedding = self.embedding_VH.to(device, dtype)
        return FrozenEnds(embedding_VH=embedding, head_VH=embedding if tied else self.head_VH.to(device, dtype))


class Linear(nn.Linear):
    """Without bias; computes in the input's type, whatever the weights' is."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Joined(Linear):
    """Several linear maps of one input as one product. Outside they are still several, each by its own name, as views
    of the one weight (`Drafter.apart`)."""

    def __init__(self, inputs: int, **outputs: int) -> None:
        super().__init__(inputs, sum(outputs.values()))
        self.outputs = outputs

    def forward_from(self, x: Tensor, first: int) -> Tensor:
        """Without the first so many outputs."""
        return F.linear(x, self.weight[first:].to(x.dtype))


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotate(x_BHLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor) -> Tensor:
    """Rotary embedding over the whole head, halves paired as in Llama and Qwen."""
    first, second = x_BHLD.chunk(2, dim=-1)
    return x_BHLD * cos_BLD[:, None] + torch.cat((-second, first), dim=-1) * sin_BLD[:, None]


class SelfAttention(nn.Module):
    """Slots attend to context and slots, under a mask; every head normalised and rotated, as in Qwen3."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.queries, self.keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv_proj = Joined(shape.hidden, q_proj=self.queries, k_proj=self.keys, v_proj=self.keys)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, slots_BTH: Tensor, context_BSH: Tensor, rope: tuple[Tensor, Tensor], attend: Attention, mask: Any
                ) -> Tensor:  # fmt: skip
        """Slots [B, T, H] from normed slots [B, T, H] and context [B, S, H].

        `rope`: cosines and sines [B, S+T, head size] of the positions of context and slots; `mask`: of `attend`.
        """
        cos, sin = rope
        context_length = context_BSH.shape[1]
        query, of_slots = self.qkv_proj(slots_BTH).split((self.queries, 2 * self.keys), dim=-1)
        of_context = self.qkv_proj.forward_from(context_BSH, self.queries)
        key, value = torch.cat((of_context, of_slots), dim=1).chunk(2, dim=-1)
        query, key, value = self.q_norm(self._heads(query)), self.k_norm(self._heads(key)), self._heads(value)
        query = rotate(query, cos[:, context_length:], sin[:, context_length:])
        key = rotate(key, cos, sin)
        out_BHTD = attend(query, key, value, mask)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))

    def context_keys(self, context_BSH: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, key heads, S, head size] of the context alone, for those who go on remembering them."""
        key, value = map(self._heads, self.qkv_proj.forward_from(context_BSH, self.queries).chunk(2, dim=-1))
        return rotate(self.k_norm(key), *rope), value

    def _heads(self, x_BLE: Tensor) -> Tensor:
        return x_BLE.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_up_proj = Joined(shape.hidden, gate_proj=shape.intermediate, up_proj=shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, slots_BTH: Tensor, context_BSH: Tensor, rope: tuple[Tensor, Tensor], attend: Attention, mask: Any
                ) -> Tensor:  # fmt: skip
        slots_BTH = slots_BTH + self.self_attn(self.input_layernorm(slots_BTH), context_BSH, rope, attend, mask)
        return slots_BTH + self.mlp(self.post_attention_layernorm(slots_BTH))


class Drafter(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(shape.captured * shape.hidden, shape.hidden)
        self.hidden_norm = RmsNorm(shape.hidden, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.rms_norm_eps)
        self._joined = {
            name: {f"{name.rpartition('.')[0]}.{part}.weight": size for part, size in module.outputs.items()}
            for name, module in self.named_modules() if isinstance(module, Joined)
        }  # fmt: skip
        self.register_state_dict_post_hook(_take_apart)
        self.register_load_state_dict_pre_hook(_put_together)

    def apart(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`named`, by names of parameters, under the names that the servers load; no copies."""
        found = {}
        for name, tensor in named.items():
            parts = self._joined.get(name.removesuffix(".weight"))
            if parts is None:
                found[name] = tensor
            else:
                found.update(zip(parts, tensor.split(list(parts.values())), strict=True))
        return found

    def together(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The way back. Names that are missing stay so."""
        left = dict(named)
        for name, parts in self._joined.items():
            if all(part in left for part in parts):
                left[f"{name}.weight"] = torch.cat([left.pop(part) for part in parts])
        return left

    @classmethod
    def without_content(cls, shape: DrafterShape) -> Drafter:
        """One whose weights have shapes alone, and take no memory."""
        with torch.device("meta"):
            return cls(shape)

    @classmethod
    def fresh(cls, shape: DrafterShape, generator: torch.Generator) -> Drafter:
        """One with fresh weights, on the CPU, without those that torch would have drawn before: half the time."""
        drafter = cls.without_content(shape).to_empty(device="cpu")
        drafter.initialise(generator)
        return drafter

    def initialise(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Fresh weights, the same for the same generator on any device; norms are ones."""
        with torch.no_grad():
            for weight in self.apart(dict(self.named_parameters())).values():
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * std)
                else:
                    weight.fill_(1.0)

    def forward(self, features_BSF: Tensor, blocks: Blocks, ends: FrozenEnds, kernels: Kernels) -> Tensor:
        """Hidden states of all slots [B, T, H], ready for the output head."""
        rope = self.rope(torch.cat((blocks.positions_BS, blocks.positions_BT), dim=1), ends.head_VH.dtype)
        mask = kernels.attention.mask(blocks, features_BSF.shape[1])
        context_BSH = self.hidden_norm(self.fc(features_BSF))
        slots_BTH = F.embedding(blocks.tokens_BT, ends.embedding_VH)
        for number, layer in enumerate(self.layers):
            run = kernels.layer if number else kernels.first_layer
            slots_BTH = run(layer, slots_BTH, context_BSH, rope, mask)
        return self.norm(slots_BTH)

    def rope(self, positions_BL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, L, head size]."""
        size = self.shape.head_dim
        exponents = torch.arange(0, size, 2, device=positions_BL.device, dtype=torch.float32) / size
        angles = positions_BL[..., None].float() * self.shape.rope_theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _take_apart(drafter: Drafter, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    own = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    state.update({prefix + name: tensor for name, tensor in drafter.apart(own).items()})


def _put_together(drafter: Drafter, state: dict[str, Any], prefix: str, *_: Any) -> None:
    own = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    state.update({prefix + name: tensor for name, tensor in drafter.together(own).items()})
