"""--gpus, `gpus:` and what a configuration counts on -> which GPUs a run is to have to itself (`GpuWish`).

Everything that can be said of it before the target is asked, where numbers become UUIDs (`agent/devices.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from orchestrator.errors import ConfigError
from orchestrator.inventory import Target
from orchestrator.model import GpuWish

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ONE = re.compile(r"\d{1,3}(:\d{1,3})?|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What was typed."""

    gpus: str | None = None
    queue: bool = False
    claim: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What follows for the run."""

    numbers: list[int] = field(default_factory=list)
    """What is asked for by number, and by nothing else."""
    wish: GpuWish | None = None
    env: dict[str, str] = field(default_factory=dict)
    """What its environment is to say, where there is no claim that says it."""


def choose(asked: Asked, target: Target, *, cuda: int | None) -> Chosen:
    """`cuda`: how many CUDA devices its configuration counts on; None: nobody knows. Raises `ConfigError`."""
    declared, own = target.gpus or [], target.env.get(VISIBLE)
    if not asked.claim and asked.queue:
        raise ConfigError("--queue waits for a claim, and --no-claim makes none", hint="leave out one of them")
    if asked.gpus == "none" or (asked.gpus is None and cuda == 0):
        if cuda:
            raise ConfigError(f"--gpus none: the configuration's devices: name {_devices(cuda)}", target=target.name)
        if asked.queue:
            why = "--gpus none" if asked.gpus else "its configuration runs on the CPU"
            raise ConfigError(f"--queue waits for GPUs, and this run has none ({why})", target=target.name)
        return Chosen(env={VISIBLE: ""} if asked.gpus else {})
    if asked.gpus is None:
        # `env:` is what the program will see in the end, whatever `gpus:` says.
        among = _words(own) if own is not None else [str(number) for number in declared]
        count = cuda
    else:
        among, count = parse(asked.gpus)
        _allowed(among, target)
        if not among:
            among = [str(number) for number in declared]
        if cuda and cuda > (count if count is not None else len(among) or cuda):
            raise ConfigError(
                f"--gpus {asked.gpus}: the configuration's devices: name {_devices(cuda)}", target=target.name,
                hint=f"--gpus {cuda}, or change devices:",
            )  # fmt: skip
    numbers = [int(name) for name in among if name.isdigit()] if all(map(str.isdigit, among)) else []
    if not asked.claim:
        if count is not None and asked.gpus is not None:
            raise ConfigError(
                f"--gpus {asked.gpus} lets the target choose free ones, and --no-claim asks nobody what is free",
                hint="name them: --gpus 0,1",
            )
        return Chosen(numbers=numbers, env={VISIBLE: ",".join(among)} if asked.gpus and among else {})
    wish = GpuWish(
        among=among, count=count, wanted=bool(asked.gpus or declared), must=bool(asked.gpus or asked.queue),
        queue=asked.queue, claims_dir=target.claims_dir, place=f"{target.name}, {target.place}",
    )  # fmt: skip
    if asked.gpus is None and own is not None and not among:
        return Chosen(numbers=numbers)  # the target's env: hides them all
    return Chosen(numbers=numbers if count in (None, len(among)) or asked.gpus is None else [], wish=wish)


def parse(text: str) -> tuple[list[str], int | None]:
    """(which ones, or none for all; how many of them, or None for each). Raises `ConfigError`."""
    if text == "all":
        return [], None
    if re.fullmatch(r"[1-9]\d{0,2}", text):
        return [], int(text)
    words = _words(text)
    if not words or text.isdigit() or not all(map(_ONE.fullmatch, words)) or len({*words}) < len(words):
        raise ConfigError(
            f"--gpus {text[:60]!r}: is none, all, how many (2), or which: 0,1 or GPU-... or 0:1 for a MIG device",
            hint="one alone by its number has a comma behind it: --gpus 3,",
        )
    return words, None


def _allowed(among: list[str], target: Target) -> None:
    for name in among if target.gpus else []:
        number = name.partition(":")[0]
        if number.isdigit() and int(number) not in (target.gpus or []):
            raise ConfigError(
                f"--gpus: `gpus:` of the target lets runs have only GPU {', '.join(map(str, target.gpus or []))}, not "
                f"{number}", target=target.name,
            )  # fmt: skip


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip()) and word != "-1"]


def _devices(cuda: int) -> str:
    return f"{cuda} CUDA device{'s' if cuda > 1 else ''}"
