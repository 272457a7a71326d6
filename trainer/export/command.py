"""`python -m trainer export RUN|CKPT`: from a checkpoint to a directory that SGLang and vLLM load, through the gate."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trainer.config import ConfigError
from trainer.device import device_for
from trainer.export import gate, package, prompts, source
from trainer.export.contract import Contract
from trainer.export.gate import Outcome
from trainer.export.package import Package


class _Refused(Exception):
    """The gate has refused what lies aside; it must not become an export."""


def export(arguments: argparse.Namespace, *, page: Console, say: Callable[[str], None]) -> int:
    """0 if the directory is there, 1 if the gate has refused it. Raises `ConfigError`."""
    target = Path(arguments.target).expanduser() if arguments.target else None
    found = source.find(Path(arguments.checkpoint).expanduser(), which=arguments.weights, target=target, say=say)
    to = (Path(arguments.to).expanduser() if arguments.to else _in_the_run(found.path)).resolve()
    made = package.package(
        found, format=arguments.format, dtype=found.computed_in if arguments.dtype == "auto" else arguments.dtype,
        target_name=arguments.target_name or str(found.target_path),
    )  # fmt: skip
    outcome: Outcome | None = None
    # What is wrong with these is said before anything is written.
    device, texts = device_for(arguments.device), prompts.reader(arguments.prompts)
    try:
        with package.place(to) as aside:
            contract = made.write(aside, gate=None)
            if arguments.gate:
                say(f"gate: the target writes, and the trainer's drafter drafts ({arguments.arithmetic} on {device})")
                replay = gate.replay(made, texts, device=device, arithmetic=arguments.arithmetic)
                blocks = len(replay.drafted.tokens_Nk)
                say(f"gate: the reference decoder reads the export, and drafts the same {blocks} blocks")
                outcome = gate.judge(aside, replay, say=say)
                if outcome.differences:
                    raise _Refused
                contract = contract.model_copy(update={"gate": outcome.gate})
                package.write_contract(aside, contract)
    except _Refused:
        pass
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"--device {device}: has too little memory for the gate, in which the target computes in"
            f" {arguments.arithmetic}; --arithmetic bfloat16 takes half of it, --device cpu none"
        ) from None
    refused = outcome is not None and bool(outcome.differences)
    if arguments.json:
        page.print_json(json.dumps(_facts(made, contract, to, outcome)))
    elif outcome is not None:
        page.print(table(outcome))
        page.print("\n".join(below(outcome)), highlight=False, soft_wrap=True)
    if refused:
        assert outcome is not None
        say(f"{made.source.path} is not exported: {refusal(outcome)}")
        return 1
    if not arguments.json:
        page.print("\n".join(summary(made, contract, to)), highlight=False, soft_wrap=True)
    return 0


def refusal(outcome: Outcome) -> str:
    """One line for a person: what differs, and which mistake explains it."""
    said = f"the export does not decode as the checkpoint does: {'; '.join(outcome.differences)}"
    if outcome.diagnosis:
        return f"{said}; what explains all of it: {', or '.join(outcome.diagnosis)}"
    if not outcome.gate.kept_by_reference:
        return said
    return f"{said}; no known mistake explains it alone"


def summary(made: Package, contract: Contract, to: Path) -> list[str]:
    """What has been exported, for a person."""
    found, layout = made.source, contract.layout
    weights = "the last weights" if found.origin.weights == "last" else (
        f"their moving average (optimizer.ema {found.ema_decay:g})"
    )  # fmt: skip
    lines = [
        f"exported step {found.origin.step}, {weights}, as {made.format} in {made.dtype}: {to}",
        f"  block {layout.block_size} with mask token {layout.mask_token_id}, target layers {layout.layer_ids}"
        f" of {found.target.layers}, {sum(tensor.numel() for tensor in made.tensors.values()) / 1e6:,.1f} M weights",
    ]
    if contract.gate is None:
        lines.append("  not looked at by the gate (--no-gate), and the contract says so")
    return lines


def table(outcome: Outcome) -> Table:
    """Acceptance per position, from both."""
    seen = outcome.gate
    count, both = seen.blocks, bool(seen.kept_by_reference)
    title = f"{count} blocks behind {outcome.prompts} prompts, greedy, {seen.arithmetic}"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in ("slot", "trainer keeps", "reference keeps", "of those that kept the slot before"):
        shown.add_column(name, justify="right")
    before = count
    for slot, by_trainer in enumerate(seen.kept_by_trainer, start=1):
        by_reference = f"{seen.kept_by_reference[slot - 1]}" if both else "unreadable"
        share = by_trainer / before if before else math.nan
        shown.add_row(str(slot), str(by_trainer), by_reference, f"{share:.1%}" if before else "-")
        before = by_trainer
    return shown


def below(outcome: Outcome) -> list[str]:
    """What the table comes to."""
    mean = 1 + sum(outcome.gate.kept_by_trainer) / outcome.gate.blocks
    lines = [f"{mean:.2f} tokens a block, with the target's own token behind those that it keeps"]
    if outcome.ties:
        lines.append(f"ties, where two tokens are as good as each other: {outcome.ties}")
    if not outcome.differences:
        also = "" if any(outcome.gate.kept_by_trainer) else "; no slot is kept, and hidden states were compared"
        lines.append(f"gate passed: the export decodes as it was trained{also}")
    return lines


def _facts(made: Package, contract: Contract, to: Path, outcome: Outcome | None) -> dict[str, Any]:
    """For programs."""
    return {
        "exported": str(to) if outcome is None or not outcome.differences else None,
        "checkpoint": str(made.source.path),
        "contract": contract.model_dump(),
        "gate": None if outcome is None else {
            **outcome.gate.model_dump(), "passed": not outcome.differences, "differences": outcome.differences,
            "diagnosis": outcome.diagnosis, "ties": outcome.ties,
        },
    }  # fmt: skip


def _in_the_run(checkpoint: Path) -> Path:
    """Where `specctl pull RUN --export` looks."""
    root = checkpoint.resolve().parent
    if root.name != "checkpoints":
        raise ConfigError(f"{checkpoint}: lies in no run's directory; say where the export goes with --to DIR")
    return root.parent / "export"
