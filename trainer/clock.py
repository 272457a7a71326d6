"""How long things take where they happen: on the host, or on a device that the thread is ahead of.

A `Timer` takes the time of the stages of a step, for `python -m trainer bench`; a run has one that takes none.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """Now; on CUDA, when the device gets to this place of the current stream."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Between two marks of one device."""

    begin: Any
    end: Any

    def seconds(self) -> float:
        """To be asked once the device has passed the end."""
        if isinstance(self.begin, float):
            return float(self.end - self.begin)
        return float(self.begin.elapsed_time(self.end)) / 1000


@dataclass(slots=True)
class Timer:
    """The spans of a step's stages, from any thread. `on`: whether it takes any time at all."""

    on: bool = False
    _spans: dict[tuple[str, str, int], list[Span]] = field(default_factory=lambda: defaultdict(list))
    """By stage, thread and step."""

    @contextlib.contextmanager
    def measure(self, stage: str, device: torch.device, step: int) -> Iterator[None]:
        """What is inside is told to the current stream of `device`."""
        if not self.on:
            yield
            return
        begin = mark(device)
        yield
        self._spans[stage, threading.current_thread().name, step].append(Span(begin=begin, end=mark(device)))

    def seconds(self, *, after_step: int) -> dict[str, list[float]]:
        """By stage: what each worker took for each step after that one. To be asked once devices are through."""
        found: dict[str, list[float]] = defaultdict(list)
        for (stage, _, step), spans in list(self._spans.items()):
            if step > after_step:
                found[stage].append(sum(span.seconds() for span in spans))
        return dict(found)
