"""The doctor on data, tokenizer and machine: is the text what it was, are there anchors, is there room."""

from __future__ import annotations

import itertools
import os
import shutil

import torch

from trainer.doctor.checks_model import rendered_chat
from trainer.doctor.checkup import Check, Finding, Patient, fail, ok, warn

ROUND_TRIP_ROWS = 32
SAID = "Two  spaces,\n\n\ta Tab; naïve café, 漢字, 😀 don't 1,234.50 <b> End ."
"""What a tokenizer should give back to the letter. Of rows, which it has made itself, it has lost that already."""
ROWS_LOOKED_AT = 2048
PADDING_AT_MOST = 0.25
"""Share of blocks that train nothing above which it is worth a word."""


def tokenizer(patient: Patient) -> Finding:
    tokenizer, rows = patient.target.tokenizer, patient.rows

    def ids_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    vocabulary = patient.target.ends.embedding_VH.shape[0]
    some = _some(len(rows), ROUND_TRIP_ROWS)
    changed, other_ids, highest = [], 0, 0
    for row in some.tolist():
        ids = rows.cut(torch.tensor([row]), int(rows.lengths_R[row]))[0][0].tolist()
        highest = max(highest, *ids)
        text = text_of(ids)
        again = ids_of(text)
        other_ids += again != ids
        if text_of(again) != text:
            changed.append(row)
    said = f"{len(some)} rows, as text and back: {len(changed)} are other text, {other_ids} other tokens"
    said += f"; {len(tokenizer):,} tokens, embedding of {vocabulary:,} rows"
    if highest >= vocabulary:
        return fail(f"{said}; the data holds token {highest}", "tokenizer and model do not belong together")
    if len(tokenizer) > vocabulary:
        return warn(said, "tokens beyond the embedding must never occur: see that the tokenizer is this model's")
    if len(changed) > len(some) // 2:
        return warn(said, "the tokenizer does not give back what it was given: look at rendered samples")
    if (back := text_of(ids_of(SAID))) != SAID:
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(SAID, back, strict=False))
        at = sum(1 for _ in alike)
        lost = f"of {SAID[at : at + 12]!r} it gives back {back[at : at + 12]!r}"
        return warn(f"{said}; {lost}", "what it changes in the data cannot be learnt: look at rendered samples")
    return ok(said)


def chat_template(patient: Patient) -> Finding:
    tokenizer = patient.target.tokenizer
    wanted = patient.config.data.kind == "conversations"
    if not tokenizer.chat_template:
        return ok("none, and none is needed")
    try:
        text = rendered_chat(tokenizer)[0]
    except Exception as error:  # a template is a program of the model's
        said = f"it does not render a question and its answer: {' '.join(str(error).split())}"
        advice = "conversations cannot be trained on with this tokenizer"
        return fail(said, advice) if wanted else warn(said, advice)
    generation = getattr(patient.target.model, "generation_config", None)
    declared = getattr(generation, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])} - {None}
    told = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in sorted(ends)) or "no token"
    after = tokenizer(text[text.index("It is a test.") :], add_special_tokens=False)["input_ids"]
    if not ends & set(after):
        return warn(f"the assistant's turn does not end with {told}, at which the target stops",
                    "see that the tokenizer's eos_token is what ends a turn")  # fmt: skip
    return ok(f"renders; the assistant's turn ends with {told}")


def anchors(patient: Patient) -> Finding:
    config, rows = patient.config, patient.rows
    padded_R = rows.order.padded_R
    missing = wanted = short = 0
    looked = _some(len(rows), ROWS_LOOKED_AT)
    for length in config.data.lengths:
        own = looked[padded_R[looked] == length]
        count = config.anchors_at(length)
        for part in own.split(64):
            _, mask_BS, starts_BS = rows.cut(part, length)
            eligible_B = (mask_BS[:, :-1] & mask_BS[:, 1:] & (starts_BS[:, :-1] == starts_BS[:, 1:])).sum(1)
            missing += int((count - eligible_B).clamp(min=0).sum())
            short += int((eligible_B < count).sum())
            wanted += count * len(part)
    share = missing / max(wanted, 1)
    said = f"{short / len(looked):.0%} of the rows have fewer than {config.drafter.anchors}"
    said += f"; {share:.1%} of all blocks are padding"
    if share > PADDING_AT_MOST:
        return warn(said, "fewer drafter.anchors, data.packing, or data.buckets: padding is computed like any block",
                    padding=share)  # fmt: skip
    return ok(said, padding=share)


def machine(patient: Patient) -> Finding:
    config = patient.config
    targets = sum(name == "cpu" for name in config.devices.target)
    drafters = sum(name == "cpu" for name in config.devices.drafter)
    threads = targets * config.cpu_threads.target + drafters * config.cpu_threads.drafter
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = torch.cuda.device_count()
    said = f"{cores} cores, {gpus} GPUs; {threads} threads compute on the CPU at once, 1 loads"
    used = {name for name in (*config.devices.target, *config.devices.drafter) if name != "cpu"}
    if used and len(used) < gpus:
        said += f"; {gpus - len(used)} GPUs are left idle"
    if threads > 2 * cores:
        return warn(said, "fewer workers on the CPU, or cpu_threads: 1: they take turns at the cores")
    return ok(said)


def room(patient: Patient) -> Finding:
    config = patient.config
    root = patient.reporter.identity.directory
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    weights = sum(parameter.numel() for parameter in _on_meta(patient).parameters())
    # Weights, two moments and an average, if one is kept, in float32; one more while the newest is written aside.
    one, count = 4 * weights * (3 + (config.optimizer.ema is not None)), config.keep_checkpoints + 1
    mib = 1 << 20
    said = f"{count} checkpoints of {one / mib:,.0f} MiB; {free / mib:,.0f} MiB free at {there}"
    if free < one:
        return fail(said, "make room: not one checkpoint fits", free_bytes=free, checkpoint_bytes=one)
    if free < count * one:
        return warn(said, "make room, or keep fewer (keep_checkpoints)", free_bytes=free, checkpoint_bytes=one)
    return ok(said, free_bytes=free, checkpoint_bytes=one)


def _on_meta(patient: Patient) -> torch.nn.Module:
    from trainer.model.drafter import Drafter

    return Drafter.without_content(patient.shape)


def _some(count: int, at_most: int) -> torch.Tensor:
    """That many indices, evenly spread."""
    return torch.arange(0, count, max(1, -(-count // at_most)))


CHECKS = [
    Check(name="tokenizer", what="rows of the data are the same text after a round trip", look=tokenizer),
    Check(name="chat template", what="it renders, and a turn ends as generation does", look=chat_template),
    Check(name="anchors in the data", what="rows have as many anchors as are asked for", look=anchors),
    Check(name="machine", what="workers and cores fit", look=machine),
    Check(name="disk", what="checkpoints have room", look=room),
]
