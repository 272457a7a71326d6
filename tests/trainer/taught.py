"""A tiny target that has learnt to hold conversations of one kind, and a drafter that has learnt to draft for it.

Random targets write loops, and no drafter agrees with them; this one answers, ends, and can be sampled from. Both are
taught in seconds, once for all processes of a test run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.trainer.support import REPOSITORY, write_config

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OPENINGS = ("What is {} plus {}?", "Add {} and {}, please.", "Count from {} to {}.")


def conversation(draw: random.Random) -> list[dict[str, str]]:
    """A question about two numbers, and its answer."""
    one, other = sorted(draw.sample(range(10), 2))
    question = draw.choice(OPENINGS)
    asked = question.format(DIGITS[one], DIGITS[other])
    if question.startswith("Count"):
        said = ", ".join(DIGITS[one : other + 1]) + "."
    else:
        said = f"The sum of {DIGITS[one]} and {DIGITS[other]} is {one + other}."
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def write_conversations(path: Path, count: int, *, seed: int = 0) -> Path:
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        messages = conversation(draw)
        category = "counting" if messages[0]["content"].startswith("Count") else "sums"
        lines.append(json.dumps({"messages": messages, "category": category}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def teach_target(plain: Path, directory: Path, *, steps: int = 120) -> None:
    """The target in `plain`, trained on conversations, into `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that share a busy core are much slower
    tokenizer, model = AutoTokenizer.from_pretrained(plain), AutoModelForCausalLM.from_pretrained(plain)
    torch.manual_seed(0)
    draw = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(steps):
        texts = [tokenizer.apply_chat_template(conversation(draw), tokenize=False) for _ in range(16)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def drafter_settings(target: Path, data: Path, output_dir: Path) -> dict[str, Any]:
    """A configuration that teaches a drafter for the taught target."""
    return {
        "seed": 3, "steps": 150, "batch_size": 8, "output_dir": str(output_dir), "checkpoint_every": 1000,
        "log_every": 50, "tracking": {"tensorboard": False},
        "devices": {"target": ["cpu"], "drafter": ["cpu"]},
        "target": {"path": str(target), "dtype": "float32", "captured_layers": 3},
        "data": {"kind": "conversations", "paths": [str(data)], "sequence_length": 64},
        "drafter": {"layers": 1, "block_size": 6, "anchors": 8, "mask_token_id": 3},
        "optimizer": {"lr": 4e-3},
    }  # fmt: skip


@contextlib.contextmanager
def once(directory: Path) -> Iterator[bool]:
    """Whether what belongs into `directory` is yet to be made: of several processes one makes it, and the others
    wait."""
    directory.mkdir(parents=True, exist_ok=True)
    done = directory / "done"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not done.exists()
        done.touch()


def shared(factory: Any, name: str, make: Callable[[Path], None]) -> Path:
    """A directory that `make` has filled, for all processes of this run."""
    base = factory.getbasetemp()
    # Under xdist each process has a folder of its own in one that they share.
    directory: Path = (base.parent if base.name.startswith("popen-") else base) / name
    with once(directory) as needed:
        if needed:
            make(directory)
    return directory


def train_drafter(target: Path, directory: Path) -> None:
    """A whole run of the trainer."""
    data = write_conversations(directory / "chat.jsonl", 300)
    write_conversations(directory / "held-out.jsonl", 40, seed=9)
    config = write_config(drafter_settings(target, data, directory), directory / "chat.yaml")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECCTL_")}
    subprocess.run([sys.executable, "-m", "trainer", "train", str(config)], check=True, cwd=REPOSITORY, env=environment,
                   stdout=subprocess.DEVNULL, timeout=900)  # fmt: skip
