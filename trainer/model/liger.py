"""The fused loss by liger-kernel's Triton kernel, where that package is installed: `loss.kernel: liger`.

Only its kernel is taken, which turns a chunk's logits into their gradient in place. Around it the package counts labels
and waits for that number, which no step may (`graphs.py`); and it can weigh no single row. Here rows are weighed
afterwards, as in `loss.py`, whose `HeadLoss` this is one of. Triton compiles it in the warm-up, for each chunk's shape.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ConfigError
from trainer.model.loss import HeadLoss

MOST_COLUMNS_AT_ONCE = 1 << 15
"""Of the logits, in one block of the kernel, as the package itself has it."""

PLAIN_CROSS_ENTROPY: dict[str, Any] = {
    "weight_ptr": None, "z_loss_ptr": None, "token_accuracy_ptr": None, "token_accuracy_stride": 0,
    "predicted_tokens_ptr": None, "predicted_tokens_stride": 0, "n_non_ignore": 1, "sum_non_ignore_weight": 1.0,
    "weight_sum": 0.0, "ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "none",
    "softcap": None, "RETURN_Z_LOSS": False, "RETURN_TOKEN_ACCURACY": False, "RETURN_PREDICTED_TOKENS": False,
    "HAS_WEIGHT": False, "HAS_SOFTCAPPING": False, "HAS_GRADIENTS": True,
}  # fmt: skip
"""What the kernel could do besides, each switched off. A version has some of these."""
OURS = {
    "X_ptr", "X_stride", "Y_ptr", "Y_stride", "loss_ptr", "loss_stride", "n_cols", "BLOCK_SIZE",
}  # fmt: skip


def head_loss() -> HeadLoss:
    """Raises `ConfigError` where the package is not there, or is one whose kernel is not known."""
    kernel = _kernel()
    names = set(kernel.arg_names)
    if unknown := sorted((names ^ OURS) - PLAIN_CROSS_ENTROPY.keys()):
        raise ConfigError(
            f"loss.kernel: liger: the kernel of this liger-kernel is not known here ({', '.join(unknown)}); take the"
            " version in constraints.txt, or kernel: fused"
        )
    others = {name: value for name, value in PLAIN_CROSS_ENTROPY.items() if name in names}

    def chunk(hidden_CH: Tensor, head_VH: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        """As `loss.cross_entropy_and_gradient`."""
        logits_CV = F.linear(hidden_CH, head_VH)
        rows, columns = logits_CV.shape
        loss_C = torch.empty(rows, device=logits_CV.device)
        kernel[(rows,)](
            X_ptr=logits_CV, X_stride=logits_CV.stride(0), Y_ptr=labels_C, Y_stride=labels_C.stride(0),
            loss_ptr=loss_C, loss_stride=loss_C.stride(0), n_cols=columns,
            BLOCK_SIZE=min(MOST_COLUMNS_AT_ONCE, 1 << (columns - 1).bit_length()), num_warps=32, **others,
        )  # fmt: skip
        return loss_C, logits_CV @ head_VH

    return HeadLoss(chunk=chunk, last_chunk=chunk, fused=True, compiles=False)


def check(drafters: Sequence[str]) -> None:
    """Raises `ConfigError` unless drafters on these devices can use it."""
    if "cpu" in drafters:
        raise ConfigError("loss.kernel: liger runs on GPUs only, and a drafter is on the cpu; fused runs anywhere")
    head_loss()


def _kernel() -> Any:
    try:
        return importlib.import_module("liger_kernel.ops.cross_entropy").liger_cross_entropy_kernel
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"loss.kernel: liger: the package liger-kernel is needed, and cannot be used here ({error}); install"
            " specctl's extra `liger`, or take kernel: fused"
        ) from error
