"""Recording what a device does, as far as that shows without one: what a recording that fails must leave behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import losses
from trainer.compile_plan import Unit
from trainer.graphs import Graphs
from trainer.report.records import RunIdentity
from trainer.report.reporter import Reporter
from trainer.warmup import record_or_say


@pytest.mark.parametrize("early", [False, True])
def test_a_recording_that_breaks_off_in_the_backward_leaves_nothing_to_the_first_step(
    train: Callable[..., Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    settings["devices"]["drafter"] = ["cpu"]

    def break_off(_graphs: Graphs, _key: Any, inputs: Any, work: Callable[[Any], None]) -> None:
        came = itertools.count(1)

        def fail_at_the_sixth(_gradient: torch.Tensor) -> None:
            if next(came) == 6:
                raise ArithmeticError

        hooks = [parameter.register_hook(fail_at_the_sixth) for parameter in member.drafter.parameters()]
        with pytest.raises(ArithmeticError):
            work(inputs)
        for hook in hooks:
            hook.remove()
        assert any(parameter.grad is not None for parameter in member.drafter.parameters())
        raise RuntimeError("cannot be recorded")

    def try_to_record(training: Any) -> None:
        nonlocal member
        member = training.members[0]
        if early:
            member.exchange_early()
        monkeypatch.setattr(Graphs, "record", break_off)
        unit = Unit(device="cpu", rows=4, context_length=48, anchors=8, block_size=4)
        batch = training.warmup._batch(unit, member)
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            member.record([batch], averaged=False, several=False)

    member: Any = None
    train({**settings, "output_dir": str(tmp_path / "plain")})
    train({**settings, "output_dir": str(tmp_path / "tried")}, before=try_to_record)
    assert losses(tmp_path / "tried") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)


def test_an_error_without_a_word_is_named_by_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    reporter = Reporter(RunIdentity(directory=tmp_path, run_id="test"))
    reporter.open()

    def fail() -> None:
        raise RuntimeError

    record_or_say("drafter-0", fail, reporter=reporter, wanted="auto")
    reporter.ended(code=0, stopped=False)
    assert "graphs=drafter-0 none: every kernel is launched by itself, much slower: RuntimeError()\n" in (
        capsys.readouterr().out
    )
