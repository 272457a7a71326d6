"""One drafter on one device: its weights, its optimizer, and what it does with a micro-batch.

A drafter thread owns one `Replica`; the compile plan borrows it once, before the threads start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.attention import Attention
from trainer.blocks import Blocks, bring
from trainer.config import Config
from trainer.data import Cursor
from trainer.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.loss import block_loss
from trainer.optim import AdamW, FlatWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One replica's share of one step, on its device."""

    step: int
    rows: list[int]
    """Indices of the data's rows, so that a bad one can be named."""
    features_BSF: Tensor
    blocks: Blocks
    weight_sum: float
    """Over the whole step, not only this share."""
    weight: float
    tokens: int
    cursor: Cursor
    """Where the data goes on after this step."""
    ready: Any = None
    """CUDA event after which the tensors may be read."""


class Replica:
    """One drafter with its optimizer on `device`, and the target's frozen ends there, which others may share.

    `drafter`'s parameters are views of `flat.weights` [P], their gradients of `flat.gradients` [P]; both float32.
    """

    def __init__(self, shape: DrafterShape, ends: FrozenEnds, attend: Attention, config: Config, device: torch.device,
                 *, initial: torch.Generator) -> None:  # fmt: skip
        self.device = device
        self.ends, self.attend = ends, attend
        self.drafter = Drafter(shape)
        self.drafter.initialise(initial)
        self.drafter.to(device)
        self.flat = FlatWeights(self.drafter)
        self.optimizer = AdamW(self.flat, config.optimizer)
        self._chunk_rows = config.drafter.head_chunk_rows

    def accept(self, *, step: int, rows: list[int], features_BSF: Tensor, blocks: Blocks, weight_sum: float,
               tokens: int, cursor: Cursor) -> MicroBatch:  # fmt: skip
        """A micro-batch with its tensors brought to this replica's device; called by the target thread.

        `features_BSF` is [rows, S, captured * H], in the target's type and on its device; `blocks` has the same rows.
        """
        weight = blocks.weights_BNk.sum().item()
        features_BSF, blocks = bring(features_BSF, self.device), blocks.to(self.device)
        ready = None
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                ready = torch.cuda.Event()
                ready.record()
        return MicroBatch(
            step=step, rows=rows, features_BSF=features_BSF, blocks=blocks, weight_sum=weight_sum, weight=weight,
            tokens=tokens, cursor=cursor, ready=ready,
        )  # fmt: skip

    def loss_and_gradients(self, batch: MicroBatch) -> float:
        """Fill the flat gradients; returns this share's part of the step's loss, which may be nan or infinite.

        Under a forbidden recompile a batch of another shape is torch's error, naming the guard.
        """
        if batch.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(batch.ready)
        self.flat.gradients.zero_()
        features_BSF = batch.features_BSF.to(self.ends.head_VH.dtype)
        slots_BTH = self.drafter(features_BSF, batch.blocks, self.ends, self.attend)
        loss = block_loss(
            slots_BTH, batch.blocks, self.ends.head_VH, weight_sum=batch.weight_sum, chunk_rows=self._chunk_rows
        )
        loss.backward()
        return loss.item()

    def gradient_norm(self) -> float:
        """Of all gradients together, as they are now; waits for the device."""
        return self.flat.gradients.norm().item()

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's own state, no copy, by parameter: `exp_avg.NAME`, `exp_avg_sq.NAME`."""
        return {
            f"{key}.{name}": tensor
            for key, flat in self.optimizer.moments.items()
            for name, tensor in self.flat.named(flat).items()
        }

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor], *, steps_done: int) -> None:
        """Take over what a checkpoint holds; names or shapes that do not fit are a `RuntimeError` or `KeyError`."""
        self.drafter.load_state_dict(weights)
        for name, moment in self.moments().items():
            moment.copy_(moments[name])
        self.optimizer.resume_at(steps_done)
