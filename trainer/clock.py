"""How long things take where they happen: on the host, or on a device that the thread is ahead of."""

from __future__ import annotations

import time
from dataclasses import dataclass
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
