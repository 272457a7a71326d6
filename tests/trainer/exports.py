"""A run whose drafter has learnt what the tiny target writes after a prompt, and whose norms are no ones: what is
exported of it decodes well, and as soon as anything about it is mistaken, badly."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from tests.trainer.support import write_config
from trainer import checkpoint
from trainer.checkpoint import Checkpoint
from trainer.config import load_config
from trainer.data.rows import load_rows
from trainer.export import gate, prompts
from trainer.export.package import Package
from trainer.kernels import plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import generator_for, lay_out
from trainer.model.drafter import Drafter
from trainer.model.loss import block_loss
from trainer.model.target import Target, drafter_shape, load_target
from trainer.saves import what_must_stay

CPU = torch.device("cpu")
PROMPTS = ["class Popen:"]


def make_run(directory: Path, tiny_target: Path) -> None:
    """With one checkpoint, whose last weights and moving average differ."""
    config = load_config(str(write_config({
        "seed": 11, "steps": 6, "batch_size": 2, "output_dir": str(directory),
        "devices": {"target": ["cpu"], "drafter": ["cpu"]},
        "target": {"path": str(tiny_target), "dtype": "float32", "captured_layers": 3},
        "data": {"kind": "text", "paths": [subprocess.__file__], "sequence_length": 48},
        "drafter": {"layers": 2, "block_size": 4, "anchors": 8, "mask_token_id": 3},
        "optimizer": {"lr": 3e-3, "ema": 0.9},
    }, directory / "config.yaml")))  # fmt: skip
    target = load_target(config.target, CPU)
    shape = drafter_shape(target, config.drafter)
    drafter = Drafter(shape)
    drafter.initialise(generator_for(1))
    _learn_by_heart(drafter, target)
    rows = load_rows(config.data, target.tokenizer, mask_token_id=3, seed=11)
    weights = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    checkpoint.save(directory / "checkpoints", Checkpoint(
        step=6, weights={name: tensor * 1.25 for name, tensor in weights.items()}, optimizer={}, averages=weights,
        state={"run": "0123", "must_keep": what_must_stay(config, target, rows, shape), "torch": torch.__version__,
               "config": json.loads(config.model_dump_json())},
    ))  # fmt: skip


def _learn_by_heart(drafter: Drafter, target: Target) -> None:
    texts = list(gate.continued(target, prompts_of(target), block_size=4))
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.dim() == 1:
                weight.copy_(0.5 + torch.rand(weight.shape, generator=generator_for(name)))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(70):
        for ids_S, anchors in texts:
            anchors_BN = torch.tensor([anchors])
            blocks = lay_out(
                ids_S[None], torch.ones(1, len(ids_S), dtype=torch.bool), anchors_BN, anchors_BN > 0, block_size=4,
                mask_token_id=3, gamma=2.0,
            )  # fmt: skip
            slots_BTH = drafter(target.features(ids_S[None]), blocks, target.ends, plain(DenseAttention()))
            loss, *_ = block_loss(slots_BTH, blocks, target.ends.head_VH, weight_sum=24.0, chunk_rows=512)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def prompts_of(target: Target) -> list[Tensor]:
    return [prompts.tokens_of(target, text) for text in PROMPTS]


def look(made: Package, directory: Path, replay: gate.Replay) -> gate.Outcome:
    """Write it, and let the gate look at it."""
    directory.mkdir(exist_ok=True)
    made.write(directory, gate=None)
    return gate.judge(directory, replay, say=lambda line: None)
