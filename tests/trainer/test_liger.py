"""liger-kernel's Triton kernel as a loss, by Triton's interpreter, which needs no GPU; and what is said without it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.support import REPOSITORY
from trainer.config import ConfigError
from trainer.model import liger

EQUAL = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import dataclasses, torch
from tests.trainer.test_loss import HEAD_VH, case
from trainer.model.liger import head_loss
from trainer.model.loss import PLAIN, block_loss

for chunk_rows in (5, 6, 1000):
    found = []
    for form in (head_loss(), PLAIN[True]):
        slots, blocks = case()
        slots.requires_grad_()
        loss, *_ = block_loss(slots, blocks, HEAD_VH, weight_sum=5.0, chunk_rows=chunk_rows, head_loss=form)
        loss.backward()
        found.append((loss.detach(), slots.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
print("equal")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None,
    reason="needs liger-kernel and triton",
)
def test_the_kernel_gives_the_loss_and_gradient_of_the_own_fused_form() -> None:
    done = subprocess.run([sys.executable, "-c", EQUAL], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.stdout == "equal\n", done.stderr


def test_a_kernel_that_wants_more_than_is_known_is_refused_by_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*liger.OURS, *list(liger.PLAIN_CROSS_ENTROPY)[:5]]
    found: dict[str, Any] = {"arg_names": names}
    monkeypatch.setattr(liger, "_kernel", lambda: SimpleNamespace(**found))
    assert liger.head_loss().fused
    found["arg_names"] = [*names, "temperature"]
    with pytest.raises(ConfigError, match=r"this liger-kernel is not known here \(temperature\); take the version"):
        liger.head_loss()


def test_a_machine_without_it_is_told_what_to_install_and_a_cpu_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], train: Any
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", None)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(
        ConfigError, match=r"the package liger-kernel is needed, and .*; install specctl's extra `liger`"
    ):
        liger.check(["cuda:0"])
    with pytest.raises(ConfigError, match="liger runs on GPUs only, and a drafter is on the cpu; fused runs anywhere"):
        train({**settings, "loss": {"kernel": "liger"}})
