"""Texts as programs write them, for the other benchmarks: step lines of several kinds, bars, prose, tracebacks."""

from __future__ import annotations

import random
from collections.abc import Callable

WORDS = (  # noqa: SIM905
    "the quick model loaded tokenizer shard from cache layer attention weights were moved to device warning using slow "
    "path for kernel selection in iteration over dataset loader process finished connection reset steps"
).split()
STEPS = 5000


def prose(rng: random.Random, _: int) -> str:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 15)))
    return f"2026-11-29 14:{rng.randint(10, 59)}:{rng.randint(10, 59)},{rng.randint(100, 999)} INFO loop: {words}\n"


def requests(rng: random.Random, index: int) -> str:
    return f"GET /shard/{rng.randint(0, 99999)}.bin 206 {index} bytes from cache, 12 ms, ok, next one in queue\n"


def workers(rng: random.Random, index: int) -> str:
    return f"step={index} worker=drafter-{index % 3} loss={rng.random() + 2:.4f} tok/s={rng.randint(1000, 9999)}.5\n"


def logged(rng: random.Random, index: int) -> str:
    return (
        f"2026-11-29 14:{index // 60 % 60:02}:{index % 60:02},{index % 1000:03} | INFO | train:main:88 - "
        f"step {index}/{STEPS} | loss {rng.random() + 2:.4f} | grad norm: {rng.random():.3f} | "
        f"lr {1e-4 * rng.random():.2e} | {rng.randint(1000, 9999)} tok/s\n"
    )


def json_lines(rng: random.Random, index: int) -> str:
    return (
        f'{{"step": {index}, "loss": {rng.random() + 2:.4f}, "lr": {1e-4 * rng.random():.3g}, '
        f'"grad_norm": {rng.random():.4f}, "tok_s": {9000 * rng.random():.1f}}}\n'
    )


def dicts(rng: random.Random, index: int) -> str:
    return f"{{'loss': {rng.random() + 2:.4f}, 'grad_norm': {rng.random()}, 'epoch': {index / STEPS:.2f}}}\n"


def bars(rng: random.Random, index: int) -> str:
    step = index % STEPS
    drawn = ("█" * (step * 20 // STEPS)).ljust(20)
    return (
        f"\rTraining: {step * 100 // STEPS:3}%|{drawn}| {step}/{STEPS} [{step // 600:02}:{step // 10 % 60:02}<09:30, "
        f"{rng.random() * 5 + 7:5.2f}it/s, loss={rng.random() + 2:.3f}]"
    )


def loading(rng: random.Random, index: int) -> str:
    part = index % 100
    drawn = ("#" * (part // 5)).ljust(20)
    return f"\r{part:3}%|{drawn}| {part}/100 [00:{part // 3:02}<00:30, {rng.random() + 3:.2f}it/s]"


def mixed(rng: random.Random, index: int) -> str:
    return logged(rng, index) if index % 20 == 0 else prose(rng, index)


def coloured(rng: random.Random, index: int) -> str:
    return f"\x1b[32m{mixed(rng, index)[:-1]}\x1b[0m\n"


def failing(rng: random.Random, index: int) -> str:
    if index % 200:
        return mixed(rng, index)
    return (
        "Traceback (most recent call last):\n"
        '  File "/srv/train.py", line 88, in main\n    loss = step(batch)\n'
        '  File "/srv/model.py", line 12, in step\n    return self.forward(batch)\n'
        f"RuntimeError: batch {index} is not what it should be\n"
    )


TEXTS: dict[str, Callable[[random.Random, int], str]] = {
    "step lines of three workers": workers,
    "step lines of logging": logged,
    "step lines as JSON": json_lines,
    "figures as dicts": dicts,
    "a training's bar": bars,
    "a bar of loading": loading,
    "prose": prose,
    "prose without keywords": requests,
    "prose, 1 step line in 20": mixed,
    "the same, coloured": coloured,
    "prose with 1 traceback in 200": failing,
}


def make(line: Callable[[random.Random, int], str], size: int, *, block: int = 2_000_000) -> bytes:
    """About `size` bytes of such lines; after `block` bytes they repeat."""
    rng, text, index = random.Random(7), bytearray(), 0
    while len(text) < min(block, size):
        text += line(rng, index).encode()
        index += 1
    return bytes(text) * max(1, size // len(text))
